"""A method under observation: it works as ever, and its state also holds what the decoder brought."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import (
    BoundLayer,
    BudgetedLayer,
    Cache,
    KVMethod,
    LayerSpec,
    Needs,
    ReplayedLayer,
    StepResult,
    Traits,
)
from kvjax.cache.token_status import scatter_index
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, pytree
from kvjax.explore.recorder import Notes, noted


@pytree
class Watch:
    """The state of a watched layer: its own, and what came."""

    own: Any
    k: Array  # [B K C H], the key that came for each position, after RoPE
    v: Array  # [B K C H]
    q: Array  # [B K G 1 H], of the last token that was kept
    notes: Notes

    @property
    def came(self) -> KVBlock:
        """All tokens so far, each at its position; what lies behind the last one means nothing."""
        at = jnp.arange(self.k.shape[2], dtype=jnp.int32)
        return KVBlock(self.k, self.v, jnp.broadcast_to(at, (self.k.shape[0], 1, at.shape[0])))


@dataclasses.dataclass(frozen=True)
class Watched:
    """A method under observation, for rows of up to `capacity` tokens."""

    method: KVMethod
    capacity: int

    @property
    def traits(self) -> Traits:
        """Those of the method."""
        return self.method.traits

    def bind(self, spec: LayerSpec) -> WatchedLayer:
        """The method in one layer; raises KvjaxError for a model that it cannot serve."""
        return WatchedLayer(self.method.bind(spec), spec.without_index, self.capacity)


@dataclasses.dataclass(frozen=True)
class WatchedLayer:
    """A layer under observation. It hands everything on, and keeps a copy of the keys, the values and a query."""

    own: BoundLayer
    spec: LayerSpec
    capacity: int

    @property
    def needs(self) -> Needs:
        """Those of the layer itself."""
        return self.own.needs

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Those of the layer itself."""
        return self.own.num_slots(prompt_tokens, headroom_tokens)

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> Watch:
        """The state after a prompt; what the method folds together, and chooses to stand for others, is noted."""
        B, K, T, H = block.k.shape
        layer, noting = noted(self.own)
        state = layer.prefill(block, observation, num_slots)
        later = [(0, 0), (0, 0), (0, self.capacity - T), (0, 0)]
        q = jnp.zeros((B, K, self.spec.num_groups, 1, H), block.k.dtype)
        return Watch(state, jnp.pad(block.k, later), jnp.pad(block.v, later), q, noting.notes(B, K, self.capacity))

    def extend(self, state: Watch, q: Array, new: KVBlock, commit: int, cross_layer: Any) -> StepResult:
        """`BoundLayer.extend`."""
        out, own, cross_layer = self.own.extend(state.own, q, new, commit, cross_layer)
        state = dataclasses.replace(state, own=own)
        if not commit:
            return StepResult(out, state, cross_layer)
        kept = new.first(commit)
        at = scatter_index(kept.pos, state.k.shape)
        k, v = (held.at[at].set(x, mode="drop") for held, x in ((state.k, kept.k), (state.v, kept.v)))
        state = dataclasses.replace(state, k=k, v=v, q=q[:, :, :, commit - 1 : commit])
        return StepResult(out, state, cross_layer)

    def positions(self, state: Watch) -> Array:
        """Those of the layer itself."""
        return self.own.positions(state.own)

    @property
    def _budgeted(self) -> BudgetedLayer:
        assert isinstance(self.own, BudgetedLayer)
        return self.own

    def measure(self, block: KVBlock, observation: Observation | None) -> Array:
        """See `BudgetedLayer`."""
        return self._budgeted.measure(block, observation)

    def divide_budget(self, measures: Array, lengths: Array) -> Array:
        """See `BudgetedLayer`."""
        return self._budgeted.divide_budget(measures, lengths)

    def num_kept_slots(self, tokens: np.ndarray) -> int:
        """See `BudgetedLayer`."""
        return self._budgeted.num_kept_slots(tokens)

    def with_kept_slots(self, slots: int) -> WatchedLayer:
        """See `BudgetedLayer`."""
        return dataclasses.replace(self, own=self._budgeted.with_kept_slots(slots))

    def num_slots_for(self, num_kept: int, headroom_tokens: int) -> int:
        """See `BudgetedLayer`."""
        return self._budgeted.num_slots_for(num_kept, headroom_tokens)

    def update_scores(
        self, block: KVBlock, start: Array, observation: Observation, new: KVBlock, before: Array
    ) -> Array:
        """See `ReplayedLayer`."""
        assert isinstance(self.own, ReplayedLayer)
        return self.own.update_scores(block, start, observation, new, before)


def own_cache(cache: Cache) -> Cache:
    """The cache of the method itself, without what the watching keeps beside it."""
    plan = tuple(layer.own for layer in watched_layers(cache))
    return dataclasses.replace(cache, layers=own_states(cache.layers), plan=plan)


def watched_layers(cache: Cache) -> tuple[WatchedLayer, ...]:
    """The layers of a cache under observation."""
    return tuple(layer for layer in cache.plan if isinstance(layer, WatchedLayer))


def own_states(layers: tuple[Watch, ...]) -> tuple[Any, ...]:
    """What the method itself holds of all layers."""
    return tuple(state.own for state in layers)
