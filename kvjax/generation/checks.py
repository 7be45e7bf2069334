"""The owner of a cache, and warnings about long texts and methods that save nothing."""

from __future__ import annotations

import warnings

from kvjax.cache.accounting import CacheBytes
from kvjax.cache.protocol import Cache, KVMethod
from kvjax.engine.forward import Plan
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError, KvjaxWarning, OtherWeights
from kvjax.models.model import Model
from kvjax.registry.strings import method_of, name_of
from kvjax.utils.keywords import caller_level


def warn_of_positions(model: Model, plan: Plan, used: int, more: int) -> None:
    """Warns where `more` tokens after `used` ones are the first beyond the positions that the model was trained on."""
    limit = model.config.max_positions
    # A prompt keeps its own positions, unless the method reads it in chunks.
    serves_any_length = all(x.needs.unbounded_length and (used or x.needs.prompt_chunk) for x in plan)
    if serves_any_length or not used <= limit < used + more:
        return
    what = f"{more:,} tokens after {used:,} others go" if used else f"prompts of {more:,} tokens go"
    warnings.warn(
        f"{what} beyond the {limit:,} positions that {model.name or 'this model'} was made for, and the output may "
        "mean nothing; shorten the text, or use a method that is made for endless text, such as infllm",
        KvjaxWarning,
        stacklevel=caller_level(),
    )


_WARNED_METHODS: set[str] = set()
"""Names of the methods for which `warn_of_no_saving` has warned."""


def warn_of_no_saving(method: KVMethod, size: CacheBytes) -> None:
    """Warns, once for each method, where its cache takes as much device memory as the exact one of the same tokens."""
    exact_on_device = method.traits.exact and not method.traits.host
    if size.fraction_of_full < 1 or exact_on_device or (name := name_of(method)) in _WARNED_METHODS:
        return
    _WARNED_METHODS.add(name)
    warnings.warn(
        f"{name} saves nothing on this prompt: {size.held['device']:,} bytes held on the device, "
        f"{size.fraction_of_full:.1%} of the exact {size.dtype} cache; a longer prompt shows what it saves, or a "
        "smaller budget",
        KvjaxWarning,
        stacklevel=caller_level(),
    )


def check_cache(model: Model, cache: Cache, method: str | KVMethod | None = None) -> Cache:
    """Returns the cache of this model.

    Raises:
      OtherWeights: a cache of another model, or of `kvjax.functional`, which names none.
      KvjaxError: a cache of another method, or no cache.
    """
    if not isinstance(cache, Cache):
        raise KvjaxError(f"a cache is what kvjax.prefill returns, got {type(cache).__name__}")
    cache.check_usable()
    if cache.config != model.config:
        raise OtherWeights("this cache was filled by another model; prefill the prompt with this one")
    if cache.dtype != model.dtype.name:
        raise OtherWeights(
            f"this cache was filled by a model in {cache.dtype} and this one is in {model.dtype}; prefill the prompt "
            f"with this one, or load it with dtype={cache.dtype!r}"
        )
    if not cache.weights:
        raise OtherWeights(
            "this cache does not say which weights filled it, as kvjax.functional is given parameters and no model; if "
            "they are those of this model, say so: cache = dataclasses.replace(cache, weights=model.fingerprint)"
        )
    if cache.weights != model.fingerprint:
        raise OtherWeights(
            "this cache was filled by a model of equal configuration and other weights; prefill the prompt with this "
            "one, or use the model that filled it"
        )
    if method is not None and bind(method, model.config) != cache.plan:
        raise KvjaxError(
            f"this cache was filled under another method than {name_of(method_of(method))}; go on without naming a "
            "method, or prefill the prompt under this one"
        )
    return cache
