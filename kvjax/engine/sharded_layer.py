"""A layer on a mesh: each device runs it on its own rows and heads. The decoder calls layers only through here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.cache.contract import Layer, MeasuredLayer, ProbedLayer
from kvjax.core.mesh import per_device
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block


def prefill(layer: Layer, block: Block, seen: Obs | None, slots: int, mesh: Mesh | None) -> Any:
    """`Layer.prefill`."""
    empty = mesh is not None and block.pos.shape[2] == 0

    def run(block: Block, seen: Obs | None) -> Any:
        return layer.prefill(block.first(0) if empty else block, seen, slots)

    # XLA cannot divide a call of which all arguments are empty: a slot goes in, and is left out there.
    given = jax.tree.map(_with_a_slot, block) if empty else block
    return per_device(run, *block.k.shape[:2], mesh)(given, seen)


def extend(
    layer: Layer, state: Any, q: Array, fresh: Block, commit: int, carry: Any, mesh: Mesh | None
) -> tuple[Array, Any, Any]:
    """`Layer.extend`."""

    def run(state: Any, q: Array, fresh: Block, carry: Any) -> tuple[Array, Any, Any]:
        return layer.extend(state, q, fresh, commit, carry)

    return per_device(run, *q.shape[:2], mesh)(state, q, fresh, carry)


def measure(layer: MeasuredLayer, block: Block, seen: Obs | None, mesh: Mesh | None) -> Array:
    """`MeasuredLayer.measure`."""
    return per_device(layer.measure, *block.k.shape[:2], mesh)(block, seen)


def look(
    layer: ProbedLayer, block: Block, start: Array, seen: Obs, fresh: Block, before: Array, mesh: Mesh | None
) -> Array:
    """`ProbedLayer.look`."""
    return per_device(layer.look, *block.k.shape[:2], mesh)(block, start, seen, fresh, before)


def _with_a_slot(x: Array) -> Array:
    """Zeros [B K 1 ...] instead of [B K 0 ...]."""
    return jnp.zeros((*x.shape[:2], 1, *x.shape[3:]), x.dtype)
