"""A recorder of the tokens that stand for others: it listens while a method's components choose and fold tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.components import Components, EvictableUnits, SelectedSlots
from kvjax.cache.protocol import BoundLayer, LayerSpec
from kvjax.cache.token_status import scatter_index
from kvjax.core.types import Array, KVBlock, pytree


@pytree
class TokenRoles:
    """The role of the token at each position."""

    represents: Array  # bool[B K C], it was chosen to stand for others
    merged: Array  # bool[B K C], others were folded into it


class Recorder:
    """Records the calls of one layer's components `representatives` and `merge` within one trace."""

    def __init__(self) -> None:
        self.chosen_units: list[tuple[Array, int, int]] = []  # units i32[B n], tokens before the first unit, unit size
        self.merged_slots: list[tuple[Array, Array]] = []  # positions i32[B 1|K n], whether tokens were folded in

    def token_roles(self, batch: int, heads: int, capacity: int) -> TokenRoles:
        """Returns the recorded roles by position."""
        represents = merged = jnp.zeros((batch, heads, capacity), bool)
        for units, first, size in self.chosen_units:
            slot = first + units[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]
            slot = jnp.where(units[:, :, None] >= 0, slot, -1).reshape(batch, 1, -1)
            represents = represents.at[scatter_index(slot, represents.shape)].set(True, mode="drop")
        for pos, changed in self.merged_slots:
            merged = merged.at[scatter_index(pos, merged.shape)].max(changed, mode="drop")
        return TokenRoles(represents, merged)


class _RecordingProxy:
    """A component whose one call is recorded; every other attribute is the component's own."""

    def __init__(self, component: Any, recorder: Recorder):
        self.component, self.recorder = component, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.component, name)


class _RecordedRepresentatives(_RecordingProxy):
    def __init__(self, component: Any, recorder: Recorder, sinks: int):
        super().__init__(component, recorder)
        self.sinks = sinks
        self.share = component.share  # from Python 3.12 on, a runtime protocol looks past `__getattr__`

    def choose(self, units: EvictableUnits, count: Array, places: int) -> Array:
        chosen = self.component.choose(units, count, places)
        self.recorder.chosen_units.append((chosen, self.sinks, units.scores.shape[4]))
        return chosen


class _RecordedMerge(_RecordingProxy):
    def __call__(self, block: KVBlock, kept: KVBlock, choice: SelectedSlots, spec: LayerSpec) -> KVBlock:
        merged = self.component(block, kept, choice, spec)
        changed = (merged.k != kept.k).any(3) | (merged.v != kept.v).any(3)
        self.recorder.merged_slots.append((merged.pos, changed if merged.bias is None else changed | (merged.bias > 0)))
        return merged


def record_roles(layer: BoundLayer) -> tuple[BoundLayer, Recorder]:
    """Returns the layer with its components `representatives` and `merge` recorded, where it has any."""
    recorder = Recorder()
    method, representatives = getattr(layer, "method", None), None
    if not isinstance(method, Components) or (method.representatives is None and method.merge is None):
        return layer, recorder
    if method.representatives is not None and method.select is not None:
        representatives = _RecordedRepresentatives(method.representatives, recorder, method.select.sinks)
    merge = None if method.merge is None else _RecordedMerge(method.merge, recorder)
    method = dataclasses.replace(method, representatives=representatives, merge=merge)
    recorded: Any = layer
    return dataclasses.replace(recorded, method=method), recorder
