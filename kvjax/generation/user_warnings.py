"""Warnings: texts longer than a model knows, and methods that save nothing."""

from __future__ import annotations

import warnings

from kvjax.cache.accounting import CacheBytes
from kvjax.cache.protocol import KVMethod
from kvjax.engine.forward import Plan
from kvjax.errors import KvjaxWarning
from kvjax.models.model import Model
from kvjax.registry.strings import name_of
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
