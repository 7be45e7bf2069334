"""A text that is edited after it was read: the cache follows, and what comes behind the edit is not read again (PIE).

He et al. 2024, arXiv 2407.03157 ("Let the Code LLM Edit Itself When You Edit the Code"): the new tokens are read behind
those before them, and the keys of all later tokens lose the rotation of their old position and get that of their new
one, which is a rotation by the difference. Their values, and what later tokens knew of the old text, stay as they were:
so an edit is exact in the first layer and near in those above. Unverified: no code is public.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.protocol import BoundLayer, Cache, EditableLayer
from kvjax.cache.state import missing_ability
from kvjax.core import memory
from kvjax.core.mesh import per_device
from kvjax.core.rope import Rope, rotate
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError
from kvjax.generation.cache_ops import sequences
from kvjax.generation.calls import extend_padded
from kvjax.generation.checks import check_cache
from kvjax.generation.inputs import Prompts, round_up, token_ids
from kvjax.models.model import Model


def splice(model: Model, cache: Cache, start: int | Sequence[int], stop: int | Sequence[int], tokens: Prompts) -> Cache:
    """The cache of texts in which the tokens start..stop-1 of each row have been replaced by others.

    start, stop: one number for all rows, or one for each; equal for an insertion. tokens: texts or lists of ids, one
    per row, empty ones for a deletion. Raises KvjaxError for places outside the rows and for too little room, and
    IncompatibleMethod for a method whose cache cannot be cropped to `start`, or holds tokens in groups.
    """
    cache = check_cache(model, cache)
    fresh = _inserted(model, tokens, cache.length.shape[0])
    first, end = (sequences.per_row(x, cache, name) for x, name in ((start, "start"), (stop, "stop")))
    held, new = sequences.held_tokens(cache), np.array([len(row) for row in fresh])
    _check(first, end, held, new, cache.capacity)
    for layer in cache.plan:
        if not isinstance(layer, EditableLayer):
            raise missing_ability(layer, "be edited")
    before = sequences.crop(cache, first.tolist())
    if new.any():
        before = extend_padded(model, fresh, before)[1]
    tail = held - end
    if not tail.any():
        return before
    count = jnp.asarray(tail, jnp.int32)
    layers = _moved(
        layers=cache.layers,
        before=before.layers,
        count=count,
        shift=jnp.asarray(first + new - end, jnp.int32),
        plan=cache.plan,
        width=min(round_up(int(tail.max())), cache.capacity),
        rope=model.config.rope,
        heads=model.config.kv_heads,
        mesh=model.mesh,
    )
    return dataclasses.replace(before, layers=layers, length=before.length + count)


def _inserted(model: Model, tokens: Prompts, rows: int) -> list[list[int]]:
    """The new tokens of each row, which may be none."""
    if not isinstance(tokens, Iterable):
        raise KvjaxError(
            f"the new tokens are one text or list of ids per row, empty ones to delete, got {tokens!r:.60}"
        )
    given = [tokens] if isinstance(tokens, str) else list(tokens)
    if len(given) != rows:
        raise KvjaxError(f"{len(given)} texts were given for {rows} rows; give one per row, an empty one to delete")
    return [token_ids(model, [row])[0] if len(row) else [] for row in given]


def _check(start: np.ndarray, stop: np.ndarray, held: np.ndarray, new: np.ndarray, capacity: int) -> None:
    """Raises KvjaxError for places outside the rows, and for too little room."""
    for row, (a, b, n) in enumerate(zip(start, stop, held, strict=True)):
        if not 0 <= a <= b <= n:
            raise KvjaxError(
                f"row {row} has {n} tokens: tokens {a}..{b} of it cannot be replaced; use 0 <= start <= stop"
            )
    most = int((held + start + new - stop).max())
    if most > capacity:
        raise KvjaxError(
            f"the edited text has {most} tokens and the cache room for {capacity}; read with capacity={most} or more"
        )


@functools.partial(jax.jit, static_argnames=("plan", "width", "rope", "heads", "mesh"))
def _moved(
    layers: tuple[Any, ...],
    before: tuple[Any, ...],
    count: Array,
    shift: Array,
    plan: tuple[BoundLayer, ...],
    width: int,
    rope: Rope,
    heads: int,
    mesh: Mesh | None,
) -> tuple[Any, ...]:
    """The states `before` with the last count i32[B] tokens of `layers` behind them, shift i32[B] places further on."""

    def one(layer: BoundLayer, state: Any, before: Any) -> Any:
        assert isinstance(layer, EditableLayer)

        def run(state: Any, before: Any, count: Array, shift: Array) -> Any:
            return layer.append_block(before, _turned(_last(layer.decoded_block(state), count, width), shift, rope))

        return per_device(run, count.shape[0], heads, mesh)(state, before, count, shift)

    return tuple(map(one, plan, layers, before))


def _last(block: KVBlock, count: Array, width: int) -> KVBlock:
    """The last count i32[B] tokens of each row, in `width` places."""
    n = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
    place = jnp.arange(width, dtype=jnp.int32)[None]
    slot = jnp.clip((n - count)[:, None] + place, 0, block.pos.shape[2] - 1)[:, None]
    pos = jnp.take_along_axis(block.pos, jnp.broadcast_to(slot, (*block.pos.shape[:2], width)), 2)
    pos = jnp.where((place < count[:, None])[:, None], pos, -1)
    return KVBlock(memory.take(block.k, slot), memory.take(block.v, slot), pos)


def _turned(block: KVBlock, shift: Array, rope: Rope) -> KVBlock:
    """The tokens shift i32[B] places further on; where that is 0, bit by bit the same."""
    k = rotate(block.k, *rope.angles(shift[:, None, None]))
    return dataclasses.replace(block, k=k, pos=jnp.where(block.pos >= 0, block.pos + shift[:, None, None], -1))
