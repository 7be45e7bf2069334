"""Checks before and after a call: whose cache it is, context length and memory, and finite logits."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import CacheBytes
from kvjax.cache.protocol import Cache, KVMethod
from kvjax.core import memory
from kvjax.core.types import Array
from kvjax.engine.forward import Plan
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError, KvjaxWarning, OtherWeights
from kvjax.generation.memory_plan import bytes_of
from kvjax.methods.strings import method_of, name_of
from kvjax.models.config import MAX_SIZE, Config
from kvjax.models.model import Model

SHORTEN = "shorten the text, or use a method that is made for endless text, such as infllm"


def check_prompts(
    model: Model, plan: Plan, lengths: Sequence[int], slots: tuple[int, ...], capacity: int, width: int, piece: int
) -> None:
    """Before prompts are read: raises KvjaxError where their cache cannot fit, and warns of too few positions.

    slots: of each layer. capacity: tokens per row. width: what rows are padded to. piece: tokens read at a time.
    """
    if capacity > MAX_SIZE:
        raise KvjaxError(
            f"a cache for {capacity:,} tokens per row was asked for, and positions are 32-bit integers; ask for fewer "
            "new tokens, or for less room"
        )
    longest = max(lengths)
    if longest > model.config.max_positions and not all(
        x.needs.unbounded_length and x.needs.prompt_chunk for x in plan
    ):
        _warn(model, f"prompts of {longest:,} tokens go")
    needed = _planned(plan, model.config, slots, len(lengths), min(width, capacity), jnp.dtype(model.dtype))
    reading = len(lengths) * min(longest, piece) * (model.config.width + model.config.mlp_width) * model.dtype.itemsize
    what = f"{len(lengths)} rows of up to {longest:,} tokens in a cache for {capacity:,}"
    _check_memory(model, needed["device"] + reading, needed["pinned_host"], what)


@functools.lru_cache(maxsize=1024)
def _planned(
    plan: Plan, config: Config, slots: tuple[int, ...], rows: int, width: int, dtype: jnp.dtype
) -> dict[str, int]:
    """Bytes of a cache by memory kind: known again as long as its compiled programs are."""
    return bytes_of(plan, config, slots, rows, width, dtype)


def _check_memory(model: Model, device: int, host: int, what: str) -> None:
    """Raises KvjaxError for more bytes than the model's devices, or this machine, have in all."""
    held = model.params["embedding"]
    there = memory.installed_memory(held.devices() if isinstance(held, Array) else jax.devices()[:1])
    needed = [(device + host, there.device)] if there.shared else [(device, there.device), (host, there.host)]
    for size, most in needed:
        if most is not None and size > most:
            raise KvjaxError(
                f"{what} take at least {size / 1e9:,.1f} GB of memory, and there are {most / 1e9:,.1f} GB; give fewer "
                "or shorter prompts at a time, ask for fewer new tokens, or use a method that holds less"
            )


def check_result(model: Model, rows: int, tokens: int) -> None:
    """Raises KvjaxError where the logits of so many tokens of each row cannot fit."""
    size = 4 * rows * tokens * model.config.vocab_size
    _check_memory(model, size, 0, f"the logits of {rows} rows of {tokens:,} tokens")


def check_positions(model: Model, plan: Plan, used: int, more: int) -> None:
    """Warns where `more` tokens behind `used` ones are the first beyond the positions that the model was made for."""
    if used <= model.config.max_positions < used + more and not all(layer.needs.unbounded_length for layer in plan):
        _warn(model, f"{more:,} tokens behind {used:,} others go")


def check_decoding(model: Model, cache: Cache, new: int) -> None:
    """`check_positions` for so many tokens that may be generated behind what a cache holds."""
    check_positions(model, cache.plan, int(np.max(np.asarray(cache.length), initial=0)), new)


_WARNED_METHODS: set[str] = set()
"""Names of the methods of which it has been said that they save nothing."""


def warn_of_no_saving(method: KVMethod, size: CacheBytes) -> None:
    """Warns, once for each method, where its cache holds as much on the device as the exact one of the same tokens."""
    exact_on_device = method.traits.exact and not method.traits.host
    if size.fraction_of_full < 1 or exact_on_device or (name := name_of(method)) in _WARNED_METHODS:
        return
    _WARNED_METHODS.add(name)
    warnings.warn(
        f"{name} saves nothing on this prompt: {size.held['device']:,} bytes held on the device, "
        f"{size.fraction_of_full:.1%} of the exact {size.dtype} cache; a longer prompt shows what it saves, or a "
        "smaller budget",
        KvjaxWarning,
        stacklevel=3,
    )


def _warn(model: Model, what: str) -> None:
    most = f"{model.config.max_positions:,} positions"
    name = model.name or "this model"
    warnings.warn(
        f"{what} beyond the {most} that {name} was made for, and what comes of that may mean nothing; {SHORTEN}",
        KvjaxWarning,
        stacklevel=4,
    )


def check_cache(model: Model, cache: Cache, method: str | KVMethod | None = None) -> Cache:
    """The cache; raises OtherWeights for that of another model, and KvjaxError where another method is named."""
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
    if cache.weights not in ("", model.fingerprint):
        raise OtherWeights(
            "this cache was filled by a model of equal configuration and other weights; prefill the prompt with this "
            "one, or go on with that one"
        )
    if method is not None and bind(method, model.config) != cache.plan:
        raise KvjaxError(
            f"this cache was filled under another method than {name_of(method_of(method))}; go on without naming a "
            "method, or prefill the prompt under this one"
        )
    return cache


def check_finite(model: Model, logits: Array) -> None:
    """Raises KvjaxError where the logits f32[B V] behind prompts are not finite."""
    is_finite = np.isfinite(np.asarray(logits)).all(-1)
    if not is_finite.all():
        raise KvjaxError(
            f"the logits after prompt {int(np.argmin(is_finite))} are not finite: the model or the method computes "
            f"what {model.dtype} cannot hold; load the model with dtype='float32', or convert its checkpoint again; "
            "jax.config.update('jax_debug_nans', True) then stops where the first such number comes up"
        )
