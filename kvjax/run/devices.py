"""A bound layer on a mesh: each device runs it on its own rows and heads. Nothing else calls a layer on arrays."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from kvjax.cache.contract import Layer, MeasuredLayer
from kvjax.core.mesh import per_device
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block


def prefill(layer: Layer, block: Block, seen: Obs | None, slots: int, mesh: Mesh | None) -> Any:
    """`Layer.prefill`."""

    def run(block: Block, seen: Obs | None) -> Any:
        return layer.prefill(block, seen, slots)

    return per_device(run, *block.k.shape[:2], mesh)(block, seen)


def start(layer: Layer, block: Block, slots: int, mesh: Mesh | None) -> Any:
    """`Layer.prefill` of a block without slots; the given one has some, as XLA divides no empty arrays."""

    def run(block: Block) -> Any:
        return layer.prefill(block.first(0), None, slots)

    return per_device(run, *block.k.shape[:2], mesh)(block)


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
