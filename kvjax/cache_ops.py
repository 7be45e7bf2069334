"""Operations on a bare `kvjax.Cache`: crop, edit, take, fork and join."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kvjax.cache.protocol import BatchedLayer, BoundLayer, Cache, EditableLayer, RewindableLayer
from kvjax.cache.sequences import concat_sequences, missing_ability, take_sequences
from kvjax.cache.uses import CONTEXT_REMEDY
from kvjax.core import memory
from kvjax.core.explicit_axes import accepts_explicit_axes, specs_as_before
from kvjax.core.mesh import check_divides, foreign_axes, per_device, to_numpy
from kvjax.core.rope import rotate
from kvjax.core.types import Array, KVBlock
from kvjax.engine import prefill as engine_prefill
from kvjax.engine.forward import Target
from kvjax.errors import IncompatibleMethod, KvjaxError, OtherWeights
from kvjax.generation.inputs import Prompts, check_cache, round_up, token_ids
from kvjax.generation.model_calls import extend_padded
from kvjax.models.config import Config
from kvjax.models.kinds import LayerKind
from kvjax.models.model import Model
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords

__all__ = ["crop", "edit", "fork", "join", "take"]


@checks_keywords
@accepts_explicit_axes(specs_as_before)
def crop(cache: Cache, lengths: int | Sequence[int]) -> Cache:
    """Keeps only the first tokens of each sequence, exactly: as if the others had never been fed.

    Args:
      cache: of any method that can give tokens back.
      lengths: tokens that each sequence keeps, one number or one per sequence; 0 leaves it as one without tokens.

    Returns:
      A new cache; the given one stays usable.

    Raises:
      IncompatibleMethod: a method that has evicted some of the tokens, or has coded them in groups for good.
    """
    cache.check_usable()
    old_lengths = sequence_lengths(cache)
    new_lengths = per_sequence(lengths, cache, "lengths", least=0, most=old_lengths)
    count, emptied_layers = old_lengths - new_lengths, []
    for i, (layer, state) in enumerate(zip(cache.plan, cache.layers, strict=True)):
        if not isinstance(layer, RewindableLayer):
            raise missing_ability(layer, "give back tokens")
        max_rollback = to_numpy(layer.max_rollback(state))
        # A sequence without tokens needs none of those that are coded for good, or have left a window.
        can_be_emptied = (new_lengths == 0) & (not isinstance(layer, BatchedLayer))
        emptied_layers += [i] if (can_be_emptied & (count > max_rollback)).any() else []
        for b in np.flatnonzero((count > max_rollback) & ~can_be_emptied)[:1]:
            raise IncompatibleMethod(
                f"sequence {b} of layer {i} cannot give back its last {count[b]} tokens, {max_rollback[b]} at "
                "most: those before lie in groups that are coded for good, or in a shared prefix, or would see tokens "
                "that have left the layer's window (`full + in_windows` keeps them); crop to "
                f"{old_lengths[b] - max_rollback[b]} tokens or more; {CONTEXT_REMEDY}"
            )
    count = jnp.asarray(count, jnp.int32)
    target = Target(cache.config, mesh_of(cache))
    layers = list(crop_layers(cache.layers, count, plan=cache.plan, config=cache.config, mesh=target.mesh))
    if emptied_layers:
        B = len(count)
        empty = engine_prefill.empty(cache.plan, target, B, cache.capacity, jnp.dtype(cache.dtype))
        which = jnp.asarray(np.where(new_lengths == 0, B, 0) + np.arange(B), jnp.int32)
        for i in emptied_layers:
            both = concat_sequences(cache.plan[i], [layers[i], empty.layers[i]])
            layers[i] = take_sequences(cache.plan[i], both, which)
    return dataclasses.replace(cache, layers=tuple(layers), length=cache.length - count)


@functools.partial(jax.jit, static_argnames=("plan", "config", "mesh"))
def crop_layers(
    layers: tuple[Any, ...], count: Array, plan: tuple[BoundLayer, ...], config: Config, mesh: Mesh | None
) -> tuple:
    """Removes the last count i32[B] tokens of each sequence, at most `max_rollback`, from the states of all layers."""
    states = []
    for i, (layer, state) in enumerate(zip(plan, layers, strict=True)):
        assert isinstance(layer, RewindableLayer)
        heads = config.kind(i).attention.kv_heads
        states.append(per_device(layer.crop, count.shape[0], heads, mesh)(state, count))
    return tuple(states)


@checks_keywords
@accepts_explicit_axes(specs_as_before)
def take(cache: Cache, which: Sequence[int]) -> Cache:
    """Takes the sequences with these indices, in this order, each as often as it is listed; any method, bit by bit."""
    cache.check_usable()
    indices, B = np.asarray(which), cache.length.shape[0]
    is_list = indices.ndim == 1 and indices.size and np.issubdtype(indices.dtype, np.integer)
    if not is_list or indices.min() < 0 or indices.max() >= B:
        raise KvjaxError(
            f"the cache has sequences 0..{B - 1}, which are named by a list of one number or more; got {which!r:.80}"
        )
    mesh = mesh_of(cache)
    if mesh is not None:
        check_divides("B", len(indices), mesh, "take a number of sequences that does")
    at = jnp.asarray(indices, jnp.int32)
    layers = tuple(take_sequences(layer, state, at) for layer, state in zip(cache.plan, cache.layers, strict=True))
    return dataclasses.replace(cache, layers=layers, length=take_sequences(None, cache.length, at))


@checks_keywords
def fork(cache: Cache, times: int) -> Cache:
    """Copies each sequence `times` times; the copies of a sequence are adjacent."""
    return take(cache, np.repeat(np.arange(cache.length.shape[0]), arguments.integer("times", times)).tolist())


@checks_keywords
@accepts_explicit_axes(lambda result, caches: specs_as_before(result, caches[0]))
def join(caches: Sequence[Cache]) -> Cache:
    """Joins the sequences of several caches of one method, model and capacity into one batch, bit by bit.

    Documents may be of any lengths. Where that gives the caches different numbers of slots, those of fewer get empty
    ones, which count as reserved bytes.

    Raises:
      KvjaxError: caches of different models, methods or capacities, or of a layer of your own whose arrays differ.
    """
    if not caches:
        raise KvjaxError("no caches were given; pass one or more")
    for cache in caches:
        cache.check_usable()
    # Padding a cache to another capacity would change what its method has stored: a policy with more slots evicts less.
    first = caches[0]
    for i, cache in enumerate(caches[1:], 1):
        if cache.weights != first.weights:
            raise OtherWeights(
                f"cache {i} is of a model with other weights than cache 0, or one of them names none, as those of "
                "kvjax.functional; join those of one model"
            )
        if (cache.config, cache.plan, cache.capacity) != (first.config, first.plan, first.capacity):
            raise KvjaxError(
                f"cache {i} is of another model or method than cache 0, or of LongRoPE's other factors, or has room "
                f"for {cache.capacity} tokens per sequence and cache 0 for {first.capacity}; join caches of one "
                "method, read with one capacity"
            )
    try:
        layers = tuple(concat_sequences(x, [c.layers[i] for c in caches]) for i, x in enumerate(first.plan))
    except ValueError as e:
        raise KvjaxError(f"these caches hold unlike shapes ({e}); read their documents in one batch") from e
    return dataclasses.replace(first, layers=layers, length=concat_sequences(None, [c.length for c in caches]))


@checks_keywords
@accepts_explicit_axes(lambda result, model, cache, *_, **__: specs_as_before(result, cache))
def edit(model: Model, cache: Cache, start: int | Sequence[int], stop: int | Sequence[int], tokens: Prompts) -> Cache:
    """Replaces tokens start..stop-1 of each sequence by others; the tokens after them are not run again.

    Positional integrity encoding (PIE; He et al. 2024, arXiv 2407.03157, "Let the Code LLM Edit Itself When You Edit
    the Code"): the new tokens are run after the unchanged beginning, and the keys of all later tokens are rotated from
    their old position to their new one. Values stay, and so do traces of the old text in later tokens: an edit is exact
    in the first layer and approximate above it. Unverified: no code is public.

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
    cache, lengths = check_cache(model, cache), sequence_lengths(cache)
    first = per_sequence(start, cache, "start", least=0, most=lengths)
    end = per_sequence(stop, cache, "stop", least=first, most=lengths)
    texts = [tokens] if isinstance(tokens, str) else list(tokens) if isinstance(tokens, Iterable) else []
    if len(texts) != len(lengths):
        raise KvjaxError(
            f"the new tokens are one text or list of ids per sequence, empty ones to delete: {len(lengths)} of them, "
            f"got {tokens!r:.60}"
        )
    inserted = [
        token_ids(model, [text], begins=bool(a == 0))[0] if len(text) else []
        for text, a in zip(texts, first, strict=True)
    ]
    num_inserted = np.array(list(map(len, inserted)))
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
        config=cache.config,
        mesh=model.auto_mesh,
    )
    return dataclasses.replace(edited, layers=layers, length=edited.length + count)


@functools.partial(jax.jit, static_argnames=("plan", "width", "config", "mesh"))
def _append_later_tokens(
    *,
    states: tuple[Any, ...],
    old_states: tuple[Any, ...],
    count: Array,
    shift: Array,
    plan: tuple[BoundLayer, ...],
    width: int,
    config: Config,
    mesh: Mesh | None,
) -> tuple[Any, ...]:
    """Appends the last count i32[B] tokens of the old states, moved on by shift i32[B] positions, in `width` slots."""

    def append(layer: BoundLayer, kind: LayerKind, state: Any, old_state: Any) -> Any:
        assert isinstance(layer, EditableLayer)

        def run(state: Any, old_state: Any, count: Array, shift: Array) -> Any:
            block = layer.decoded_block(old_state)
            num_tokens = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
            index = jnp.arange(width, dtype=jnp.int32)[None]
            slot = jnp.clip((num_tokens - count)[:, None] + index, 0, block.pos.shape[2] - 1)[:, None]
            pos = jnp.take_along_axis(block.pos, jnp.broadcast_to(slot, (*block.pos.shape[:2], width)), 2)
            pos = jnp.where((index < count[:, None])[:, None], pos, -1)
            # Keys are stored after RoPE, so one more rotation by the difference moves them; by 0 it changes no bit.
            k, rope = memory.take(block.k, slot), kind.attention.rope
            if rope is not None:
                k = rotate(k, *rope.angles(shift[:, None, None]))
            v, pos = memory.take(block.v, slot), jnp.where(pos >= 0, pos + shift[:, None, None], -1)
            return layer.append_block(state, KVBlock(k, v, pos))

        return per_device(run, count.shape[0], kind.attention.kv_heads, mesh)(state, old_state, count, shift)

    return tuple(map(append, plan, map(config.kind, range(config.layers)), states, old_states))


def per_sequence(
    x: int | Sequence[int], cache: Cache, name: str, least: int | np.ndarray, most: np.ndarray
) -> np.ndarray:
    """Broadcasts one number, or one for each sequence of a cache, to i64[B]; raises KvjaxError outside the limits."""
    B, values = cache.length.shape[0], np.asarray(x)
    if values.shape not in ((), (B,)) or not np.issubdtype(values.dtype, np.integer):
        raise KvjaxError(f"{name} must be a whole number, or one for each of {B} sequences, got {x!r:.80}")
    values, least, most = (np.broadcast_to(n, (B,)).astype(np.int64) for n in (values, least, most))
    for b in np.flatnonzero((values < least) | (values > most))[:1]:
        raise KvjaxError(
            f"sequence {b} has {sequence_lengths(cache)[b]} tokens: {name} must be {least[b]} to {most[b]} "
            f"for it, got {values[b]}"
        )
    return values


def sequence_lengths(cache: Cache) -> np.ndarray:
    """Returns the tokens of each sequence, evicted ones included, as i64[B]."""
    return to_numpy(cache.length).astype(np.int64)


def mesh_of(cache: Cache) -> Mesh | None:
    """Returns the mesh that a cache is sharded over; None for one of other axes, over which the compiler divides it."""
    sharding = cache.length.sharding
    if not isinstance(sharding, NamedSharding) or foreign_axes(cast(Mesh, sharding.mesh)):
        return None
    return cast(Mesh, sharding.mesh)
