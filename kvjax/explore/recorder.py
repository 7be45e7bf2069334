"""Which tokens of a prompt stand for others: noted while a method's own slots choose and fold them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.eviction.representatives import EvictableUnits
from kvjax.cache.eviction.selection import SelectedSlots
from kvjax.cache.protocol import BoundLayer, LayerSpec
from kvjax.cache.token_status import scatter_index
from kvjax.core.types import Array, KVBlock, pytree


@pytree
class Notes:
    """Of the token at each position: whether it was chosen to stand for others, and whether others were folded in."""

    represents: Array  # bool[B K C]
    merged: Array  # bool[B K C]


class Noting:
    """What the slots `representatives` and `merge` of one layer do, listened to within one trace."""

    def __init__(self) -> None:
        self.represented: list[tuple[Array, int, int]] = []  # units i32[B n], the tokens before the first, those of one
        self.folded: list[tuple[Array, Array]] = []  # positions i32[B 1|K n], whether something was folded in

    def notes(self, rows: int, heads: int, capacity: int) -> Notes:
        """What was heard, by position."""
        represents = merged = jnp.zeros((rows, heads, capacity), bool)
        for units, first, size in self.represented:
            slot = first + units[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]
            slot = jnp.where(units[:, :, None] >= 0, slot, -1).reshape(rows, 1, -1)
            represents = represents.at[scatter_index(slot, represents.shape)].set(True, mode="drop")
        for pos, changed in self.folded:
            merged = merged.at[scatter_index(pos, merged.shape)].max(changed, mode="drop")
        return Notes(represents, merged)


class _Heard:
    """A slot that is listened to; what is asked of it beside its one call is as it has it."""

    def __init__(self, slot: Any, noting: Noting):
        self.slot, self.noting = slot, noting

    def __getattr__(self, name: str) -> Any:
        return getattr(self.slot, name)


class _Represent(_Heard):
    """The slot `representatives`."""

    def __init__(self, slot: Any, noting: Noting, sinks: int):
        super().__init__(slot, noting)
        self.sinks = sinks
        self.share = slot.share  # from Python 3.12 on, a runtime protocol looks past `__getattr__`

    def choose(self, units: EvictableUnits, count: Array, places: int) -> Array:
        found = self.slot.choose(units, count, places)
        self.noting.represented.append((found, self.sinks, units.scores.shape[4]))
        return found


class _Merge(_Heard):
    """The slot `merge`."""

    def __call__(self, block: KVBlock, kept: KVBlock, choice: SelectedSlots, spec: LayerSpec) -> KVBlock:
        folded = self.slot(block, kept, choice, spec)
        changed = (folded.k != kept.k).any(3) | (folded.v != kept.v).any(3)
        self.noting.folded.append((folded.pos, changed if folded.bias is None else changed | (folded.bias > 0)))
        return folded


def noted(layer: BoundLayer) -> tuple[BoundLayer, Noting]:
    """A layer whose slots `representatives` and `merge` are listened to, where it has any, and what they say."""
    noting = Noting()
    if not isinstance(layer, MethodLayer):
        return layer, noting
    method, representatives = layer.method, None
    if method.representatives is None and method.merge is None:
        return layer, noting
    if method.representatives is not None and method.select is not None:
        representatives = _Represent(method.representatives, noting, method.select.sinks)
    merge = None if method.merge is None else _Merge(method.merge, noting)
    return dataclasses.replace(
        layer, method=dataclasses.replace(method, representatives=representatives, merge=merge)
    ), noting
