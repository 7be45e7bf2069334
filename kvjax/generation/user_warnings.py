"""Warnings: texts longer than a model knows, and methods that save nothing or have no layer to work in."""

from __future__ import annotations

import dataclasses
import warnings

from kvjax.cache.accounting import CacheBytes
from kvjax.cache.method import Method
from kvjax.cache.protocol import KVMethod
from kvjax.cache.readers.full import Full
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
"""Names of the methods for which `warn_of_no_saving` or `warn_of_windows` has warned."""


def warn_of_windows(model: Model, method: KVMethod) -> None:
    """Warns, once for each method, where it has components that work in no layer: all layers have a window."""
    config = model.config
    has_windows = all(config.kind(i).attention.rule.window is not None for i in range(config.layers))
    if not has_windows or not isinstance(method, Method) or method.windowed == "method":
        return
    left = ("k", "v", "windowed") + (("read",) if isinstance(method.read, Full) else ())
    fields = (f for f in dataclasses.fields(Method) if f.compare and f.name not in left)
    idle = [f"`{f.name}`" for f in fields if getattr(method, f.name) != f.default]
    if not idle or (name := name_of(method)) in _WARNED_METHODS:
        return
    _WARNED_METHODS.add(name)
    components = f"{', '.join(idle)} of {name} does" if len(idle) == 1 else f"{', '.join(idle)} of {name} do"
    warnings.warn(
        f"{components} nothing in this model: all of its layers have a sliding window, and hold the last tokens that "
        f"their queries can see; '{name} + in_windows' works in such layers too",
        KvjaxWarning,
        stacklevel=caller_level(),
    )


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
