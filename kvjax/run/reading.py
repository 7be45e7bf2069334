"""What a layer has of a prompt, what its method sees of it, and the state that comes of that."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from kvjax.cache.contract import Layer, last_positions
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block
from kvjax.run import devices
from kvjax.run.forward import positions


class Prompt(NamedTuple):
    """What one layer has of a prompt so far: exact keys and values, and the queries that its method wants to see."""

    k: Array  # [B K S H]
    v: Array  # [B K S H]
    q: Array  # [B K G Q H]
    hidden: Array | None = None  # [B 1 S D], where the method asks for it
    output: Array | None = None  # [1 K G H D], likewise
    probed: Array | None = None  # f32[B K S], likewise
    neighbour: tuple[Array, Array] | None = None  # keys and values [B K S H] of the layer above or below, likewise
    sums: Array | None = None  # f32[B K G Q], the queries' `attention.log_sum`, where the prompt's attention left it


def output_projection(params: Any) -> Array:
    """Of a layer's parameters, the output projection as methods take it: [1 K G H D]."""
    return params["attention"]["o"]["kernel"][None]


def with_output(params: Any, layer: Layer, i: int, prompt: Any) -> Any:
    """A layer's prompt, with the output projection of layer i where its method asks for that."""
    if not layer.needs.output:
        return prompt
    return prompt._replace(output=output_projection(params[f"layer_{i}"]))


def shown(layer: Layer, q: Array, first: Array | int, lengths: Array, before: Array | None = None) -> Array:
    """Of queries [B K G C H] from position `first` (one, or i32[B]) on, those that the layer wants: [B K G Q H].

    before: the same of earlier pieces, where those stay that are not in this one.
    """
    wanted, B, C = layer.needs.queries, q.shape[0], q.shape[3]
    if wanted is None:
        return q if before is None else lax.dynamic_update_slice(before, q, (0, 0, 0, first, 0))
    at = last_positions(lengths, wanted) - jnp.broadcast_to(jnp.asarray(first), (B,))[:, None]
    new = jnp.take_along_axis(q, jnp.clip(at, 0, C - 1)[:, None, None, :, None], 3)
    if before is None:
        return new
    return jnp.where(((at >= 0) & (at < C))[:, None, None, :, None], new, before)


def seen_by(layer: Layer, prompt: Prompt, lengths: Array, keep: Array | None = None) -> tuple[Block, Obs | None]:
    """A layer's prompt as its method takes it: the block, and the queries that it asked for."""
    pos = positions(prompt.k[:, 0, :, 0], lengths)
    block, wanted = Block(prompt.k, prompt.v, pos[:, None]), layer.needs.queries
    if not layer.needs.observes and keep is None:
        return block, None
    q_pos = pos if wanted is None else last_positions(lengths, wanted)
    neighbour = None if prompt.neighbour is None else Block(*prompt.neighbour, pos[:, None])
    return block, Obs(prompt.q, q_pos, keep, prompt.output, prompt.hidden, prompt.probed, neighbour, prompt.sums)


def encode(
    layer: Layer,
    prompt: Prompt,
    lengths: Array,
    slots: int,
    capacity: int,
    mesh: Mesh | None = None,
    keep: Array | None = None,
) -> Any:
    """A layer's prompt -> its state."""
    width = min(prompt.k.shape[2], capacity)  # what lies beyond is padding
    queries, sums = prompt.q, prompt.sums
    if layer.needs.queries is None:
        queries, sums = (None if x is None else x[:, :, :, :width] for x in (queries, sums))
    hidden, probed = (None if x is None else x[:, :, :width] for x in (prompt.hidden, prompt.probed))
    neighbour = None if prompt.neighbour is None else tuple(x[:, :, :width] for x in prompt.neighbour)
    k, v = prompt.k[:, :, :width], prompt.v[:, :, :width]
    cut = Prompt(k, v, queries, hidden, prompt.output, probed, neighbour, sums)
    block, seen = seen_by(layer, cut, lengths, keep)
    return devices.prefill(layer, block, seen, slots, mesh)
