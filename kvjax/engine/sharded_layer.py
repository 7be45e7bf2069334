"""A layer on a mesh: each device runs it on its own rows and heads. The decoder calls layers only through here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.protocol import BoundLayer, BudgetedLayer, ReplayedLayer, StepResult
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import per_device
from kvjax.core.types import Array, KVBlock


def prefill(
    layer: BoundLayer, block: KVBlock, observation: Observation | None, num_slots: int, mesh: Mesh | None
) -> Any:
    """`BoundLayer.prefill`."""
    empty = mesh is not None and block.pos.shape[2] == 0

    def run(block: KVBlock, observation: Observation | None) -> Any:
        return layer.prefill(block.first(0) if empty else block, observation, num_slots)

    # XLA cannot divide a call whose arguments are all empty: the block gets a slot here, and `run` drops it.
    given = jax.tree.map(_with_a_slot, block) if empty else block
    return per_device(run, *block.k.shape[:2], mesh=mesh)(given, observation)


def extend(
    layer: BoundLayer, state: Any, q: Array, new: KVBlock, commit: int, cross_layer: Any, mesh: Mesh | None
) -> StepResult:
    """`BoundLayer.extend`."""

    def run(state: Any, q: Array, new: KVBlock, cross_layer: Any) -> StepResult:
        return layer.extend(state, q, new, commit, cross_layer)

    return per_device(run, *q.shape[:2], mesh=mesh)(state, q, new, cross_layer)


def measure(layer: BudgetedLayer, block: KVBlock, observation: Observation | None, mesh: Mesh | None) -> Array:
    """`BudgetedLayer.measure`."""
    return per_device(layer.measure, *block.k.shape[:2], mesh=mesh)(block, observation)


def update_scores(
    layer: ReplayedLayer,
    block: KVBlock,
    start: Array | np.int32,
    observation: Observation,
    new: KVBlock,
    before: Array,
    mesh: Mesh | None,
) -> Array:
    """`ReplayedLayer.update_scores`."""
    return per_device(layer.update_scores, *block.k.shape[:2], mesh=mesh)(block, start, observation, new, before)


def _with_a_slot(x: Array) -> Array:
    """Zeros [B K 1 ...] instead of [B K 0 ...]."""
    return jnp.zeros((*x.shape[:2], 1, *x.shape[3:]), x.dtype)
