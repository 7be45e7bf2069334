"""Positional integrity encoding (PIE): a text is edited in the cache, and the tokens after the edit are not run again.

He et al. 2024, arXiv 2407.03157 ("Let the Code LLM Edit Itself When You Edit the Code"). The new tokens are run after
the unchanged beginning, and the keys of all later tokens are rotated from their old position to their new one. Values
stay, and so do traces of the old text in later tokens: an edit is exact in the first layer and approximate above it.
Unverified: no code is public.
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
from kvjax.generation.cache_ops.sequences import crop, per_sequence, sequence_lengths
from kvjax.generation.checks import check_cache
from kvjax.generation.inputs import Prompts, round_up, token_ids
from kvjax.generation.model_calls import extend_padded
from kvjax.models.model import Model
from kvjax.utils.keywords import checks_keywords


@checks_keywords
def edit(model: Model, cache: Cache, start: int | Sequence[int], stop: int | Sequence[int], tokens: Prompts) -> Cache:
    """Replaces tokens start..stop-1 of each sequence by others.

    Args:
      model: the model that filled the cache.
      cache: it stays usable.
      start: first token that is replaced, one number or one per sequence.
      stop: the token after the last one that is replaced; equal to `start` for an insertion.
      tokens: one text or list of ids per sequence, an empty one to delete. A text gets the special tokens that stand
        before a sequence where it begins one, at start 0: to put a text between them and the first word, start after
        them.

    Returns:
      The cache of the edited texts.

    Raises:
      KvjaxError: positions outside a sequence, or a text longer than the capacity.
      IncompatibleMethod: a method whose cache cannot be cropped to `start`, or stores tokens in groups.
    """
    cache = check_cache(model, cache)
    batch, first, end = cache.length.shape[0], per_sequence(start, cache, "start"), per_sequence(stop, cache, "stop")
    if not isinstance(tokens, Iterable):
        raise KvjaxError(
            f"the new tokens are one text or list of ids per sequence, empty ones to delete, got {tokens!r:.60}"
        )
    texts = [tokens] if isinstance(tokens, str) else list(tokens)
    if len(texts) != batch:
        raise KvjaxError(
            f"{len(texts)} texts were given for {batch} sequences; give one per sequence, an empty one to delete"
        )
    inserted = [
        token_ids(model, [text], begins=bool(a == 0))[0] if len(text) else []
        for text, a in zip(texts, first, strict=True)
    ]
    lengths, num_inserted = sequence_lengths(cache), np.array([len(row) for row in inserted])
    for row, (a, b, n) in enumerate(zip(first, end, lengths, strict=True)):
        if not 0 <= a <= b <= n:
            raise KvjaxError(
                f"sequence {row} has {n} tokens: tokens {a}..{b} of it cannot be replaced; use 0 <= start <= stop"
            )
    shift, num_later = first + num_inserted - end, lengths - end
    longest = int((lengths + shift).max())
    if longest > cache.capacity:
        raise KvjaxError(
            f"the edited text has {longest} tokens and the cache room for {cache.capacity}; read with "
            f"capacity={longest} or more"
        )
    for layer in cache.plan:
        if not isinstance(layer, EditableLayer):
            raise missing_ability(layer, "be edited")
    edited = crop(cache, first.tolist())
    if num_inserted.any():
        edited = extend_padded(model, inserted, edited)[1]
    if not num_later.any():
        return edited
    count = jnp.asarray(num_later, jnp.int32)
    layers = _append_later_tokens(
        states=edited.layers,
        old_states=cache.layers,
        count=count,
        shift=jnp.asarray(shift, jnp.int32),
        plan=cache.plan,
        width=min(round_up(int(num_later.max())), cache.capacity),
        rope=model.config.rope,
        heads=model.config.kv_heads,
        mesh=model.mesh,
    )
    return dataclasses.replace(edited, layers=layers, length=edited.length + count)


@functools.partial(jax.jit, static_argnames=("plan", "width", "rope", "heads", "mesh"))
def _append_later_tokens(
    *,
    states: tuple[Any, ...],
    old_states: tuple[Any, ...],
    count: Array,
    shift: Array,
    plan: tuple[BoundLayer, ...],
    width: int,
    rope: Rope,
    heads: int,
    mesh: Mesh | None,
) -> tuple[Any, ...]:
    """Appends the last count i32[B] tokens of the old states, moved on by shift i32[B] positions, in `width` slots."""

    def append(layer: BoundLayer, state: Any, old_state: Any) -> Any:
        assert isinstance(layer, EditableLayer)

        def run(state: Any, old_state: Any, count: Array, shift: Array) -> Any:
            block = layer.decoded_block(old_state)
            num_tokens = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
            index = jnp.arange(width, dtype=jnp.int32)[None]
            slot = jnp.clip((num_tokens - count)[:, None] + index, 0, block.pos.shape[2] - 1)[:, None]
            pos = jnp.take_along_axis(block.pos, jnp.broadcast_to(slot, (*block.pos.shape[:2], width)), 2)
            pos = jnp.where((index < count[:, None])[:, None], pos, -1)
            # Keys are stored after RoPE, so one more rotation by the difference moves them; by 0 it changes no bit.
            k = rotate(memory.take(block.k, slot), *rope.angles(shift[:, None, None]))
            v, pos = memory.take(block.v, slot), jnp.where(pos >= 0, pos + shift[:, None, None], -1)
            return layer.append_block(state, KVBlock(k, v, pos))

        return per_device(run, count.shape[0], heads, mesh)(state, old_state, count, shift)

    return tuple(map(append, plan, states, old_states))
