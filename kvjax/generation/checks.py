"""Pre-flight checks of context length, memory and the owner of a cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvjax.cache.accounting import CacheBytes
from kvjax.cache.protocol import Cache, KVMethod
from kvjax.core import memory
from kvjax.core.types import Array
from kvjax.engine.forward import Plan
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError, KvjaxWarning, OtherWeights
from kvjax.generation.memory_plan import total_bytes
from kvjax.models.config import MAX_SIZE
from kvjax.models.model import Model
from kvjax.registry.strings import method_of, name_of
from kvjax.utils.keywords import caller_level


def check_prompts(
    model: Model,
    plan: Plan,
    lengths: Sequence[int],
    num_slots: tuple[int, ...],
    capacity: int,
    *,
    width: int,
    chunk: int,
) -> None:
    """Raises KvjaxError where the cache of prompts cannot fit, and warns where the model has too few positions.

    The prompts are padded to `width` tokens, and run in chunks of `chunk`; the others as in `kvjax.engine.prefill`.
    """
    if capacity > MAX_SIZE:
        raise KvjaxError(
            f"a cache for {capacity:,} tokens per sequence was asked for, and positions are 32-bit integers; ask for "
            "fewer new tokens, or for less room"
        )
    longest = max(lengths)
    if longest > model.config.max_positions and not all(
        x.needs.unbounded_length and x.needs.prompt_chunk for x in plan
    ):
        _warn_of_positions(model, f"prompts of {longest:,} tokens go")
    cache_bytes = total_bytes(plan, model.config, num_slots, len(lengths), min(width, capacity), jnp.dtype(model.dtype))
    # A lower bound of what a layer's forward pass takes: its hidden vectors and the MLP's.
    layer_width = model.config.width + model.config.mlp_width
    activation_bytes = len(lengths) * min(longest, chunk) * layer_width * model.dtype.itemsize
    what = f"{len(lengths)} sequences of up to {longest:,} tokens in a cache for {capacity:,}"
    _check_memory(model, cache_bytes["device"] + activation_bytes, cache_bytes["pinned_host"], what)


def _check_memory(model: Model, device_bytes: int, host_bytes: int, what: str) -> None:
    """Raises KvjaxError for more bytes than the model's devices, or this machine, have in all."""
    embedding = model.params["embedding"]
    available = memory.installed_memory(embedding.devices() if isinstance(embedding, Array) else jax.devices()[:1])
    needed = [(device_bytes, available.device), (host_bytes, available.host)]
    if available.shared:  # on a CPU both kinds are the same RAM
        needed = [(device_bytes + host_bytes, available.device)]
    for size, limit in needed:
        if limit is not None and size > limit:
            raise KvjaxError(
                f"{what} take at least {size / 1e9:,.1f} GB of memory, and there are {limit / 1e9:,.1f} GB; give fewer "
                "or shorter prompts at a time, ask for fewer new tokens, or use a method that holds less"
            )


def check_result(model: Model, batch: int, num_tokens: int) -> None:
    """Raises KvjaxError where the logits of `num_tokens` tokens of each sequence cannot fit in memory."""
    size = 4 * batch * num_tokens * model.config.vocab_size
    _check_memory(model, size, 0, f"the logits of {batch} sequences of {num_tokens:,} tokens")


def check_positions(model: Model, plan: Plan, used: int, more: int) -> None:
    """Warns where `more` tokens after `used` ones are the first beyond the positions that the model was trained on."""
    if used <= model.config.max_positions < used + more and not all(layer.needs.unbounded_length for layer in plan):
        _warn_of_positions(model, f"{more:,} tokens after {used:,} others go")


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


def _warn_of_positions(model: Model, what: str) -> None:
    warnings.warn(
        f"{what} beyond the {model.config.max_positions:,} positions that {model.name or 'this model'} was made for, "
        "and the output may mean nothing; shorten the text, or use a method that is made for endless text, such as "
        "infllm",
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
