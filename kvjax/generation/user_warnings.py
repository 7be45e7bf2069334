"""Warnings: texts longer than a model knows, and methods that save nothing or have no layer to work in."""

from __future__ import annotations

import dataclasses
import warnings

from kvjax.cache.accounting import CacheBytes
from kvjax.cache.method import Method
from kvjax.cache.protocol import KVMethod
from kvjax.cache.readers.full import Full
from kvjax.engine.forward import BoundLayers
from kvjax.errors import KvjaxWarning
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.registry.strings import name_of
from kvjax.utils.keywords import caller_level


def warn_of_positions(model: Model, plan: BoundLayers, used: int, more: int) -> None:
    """Warns where `more` tokens after `used` ones are the first beyond the positions that the model was trained on."""
    limit, ropes = model.config.max_positions, model.config.ropes
    # A prompt keeps its own positions, unless the method reads it in chunks.
    serves_any_length = all(x.needs.unbounded_length and (used or x.needs.prompt_chunk) for x in plan)
    if serves_any_length or not used <= limit < used + more:
        return
    what = f"{more:,} tokens after {used:,} others go" if used else f"prompts of {more:,} tokens go"
    if any(rope.scaling is not None and rope.scaling.kind == "longrope" and not rope.scaling.is_long for rope in ropes):
        text = (
            f"{what} beyond the {limit:,} positions of LongRoPE's factors for short texts, which hold for all of this "
            "text, and the output may mean nothing; read it anew with capacity= or headroom= for all of its tokens, or "
            "load the model with max_positions= where a call has neither: the factors for long texts are then taken"
        )
    else:
        text = (
            f"{what} beyond the {limit:,} positions that {model.name or 'this model'} was made for, and the output may "
            "mean nothing; shorten the text, or use a method that is made for endless text, such as infllm"
        )
    warnings.warn(text, KvjaxWarning, stacklevel=caller_level())


_WARNED_MODELS: set[tuple[str, Config]] = set()
"""Names and configs of the models for which `warn_of_long_factors` has warned."""


def warn_of_long_factors(model: Model, shortest: int, num_tokens: int) -> None:
    """Warns, once for each model, where LongRoPE takes its factors for long texts in a text that is short so far."""
    short = model.config.for_length(shortest)
    if short == model.config.for_length(num_tokens) or (model.name, model.config) in _WARNED_MODELS:
        return
    _WARNED_MODELS.add((model.name, model.config))
    warnings.warn(
        f"a text of {shortest:,} tokens is read with LongRoPE's factors for long texts, since texts of this call may "
        f"grow to {num_tokens:,}; transformers takes those for short ones up to {short.max_positions:,} tokens. Read "
        "long texts in calls of their own, and give short ones no room beyond, to have the same",
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
    # A ring stores tokens by the method's codecs, and is read by its reader if that is `Full`.
    in_use = ("k", "v", "windowed") + (("read",) if isinstance(method.read, Full) else ())
    fields = (field for field in dataclasses.fields(Method) if field.compare and field.name not in in_use)
    idle = [f"`{field.name}`" for field in fields if getattr(method, field.name) != field.default]
    name = name_of(method)
    if not idle or name in _WARNED_METHODS:
        return
    _WARNED_METHODS.add(name)
    verb = "does" if len(idle) == 1 else "do"
    warnings.warn(
        f"{', '.join(idle)} of {name} {verb} nothing in this model: all of its layers have a sliding window, and hold "
        f"the last tokens that their queries can see; '{name} + in_windows' works in such layers too",
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
