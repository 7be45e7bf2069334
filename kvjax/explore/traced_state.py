"""A traced method: it works unchanged, and its state also holds the exact keys, values and queries."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import Cache, KVMethod, LayerSpec, Needs, StepResult, Traits
from kvjax.cache.token_status import scatter_index
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial, pytree
from kvjax.explore.recorder import TokenRoles, record_roles


@pytree
class TracedState:
    """The state of a traced layer: the method's own, and everything that the decoder brought."""

    inner: Any
    k: Array  # [B K C H], the key of each position, after RoPE
    v: Array  # [B K C H]
    q: Array  # [B K G 1 H], of the last committed token
    roles: TokenRoles

    @property
    def exact(self) -> KVBlock:
        """All tokens so far, each at its position; the content behind the last one means nothing."""
        pos = jnp.arange(self.k.shape[2], dtype=jnp.int32)
        return KVBlock(self.k, self.v, jnp.broadcast_to(pos, (self.k.shape[0], 1, pos.shape[0])))


@dataclasses.dataclass(frozen=True)
class TracedMethod:
    """A method under observation, for sequences of up to `capacity` tokens."""

    method: KVMethod
    capacity: int

    @property
    def traits(self) -> Traits:
        """Traits of the method itself."""
        return self.method.traits

    def bind(self, spec: LayerSpec) -> TracedLayer:
        """Binds the method to one layer; raises KvjaxError for a model that it cannot serve."""
        # The tracer needs no index, and equal layers then share a compiled program.
        return TracedLayer(self.method.bind(spec), spec.without_index, self.capacity)


@dataclasses.dataclass(frozen=True)
class TracedLayer:
    """A layer under observation: it delegates every call, and copies keys, values and the last query."""

    inner: Any  # a BoundLayer, and a BudgetedLayer or ReplayedLayer where its `needs` say so
    spec: LayerSpec
    capacity: int

    @property
    def needs(self) -> Needs:
        """Needs of the layer itself."""
        return self.inner.needs

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Slots of the layer itself."""
        return self.inner.num_slots(prompt_tokens, headroom_tokens)

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> TracedState:
        """Returns the state after a prompt, with the tokens that the method merges or chooses to represent others."""
        B, K, T, H = block.k.shape
        layer, recorder = record_roles(self.inner)
        inner = layer.prefill(block, observation, num_slots)
        k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, self.capacity - T), (0, 0)]) for x in (block.k, block.v))
        q = jnp.zeros((B, K, self.spec.num_groups, 1, H), block.k.dtype)
        return TracedState(inner, k, v, q, recorder.token_roles(B, K, self.capacity))

    def extend(
        self,
        state: TracedState,
        q: Array,
        new: KVBlock,
        commit: int,
        cross_layer: Any,
        outside: Partial | None = None,
    ) -> StepResult:
        """See `BoundLayer.extend`."""
        # A layer outside of kvjax need not take `outside` to serve models without anything of the kind.
        more = (cross_layer,) if outside is None else (cross_layer, outside)
        out, inner, cross_layer = self.inner.extend(state.inner, q, new, commit, *more)
        state = dataclasses.replace(state, inner=inner)
        if not commit:
            return StepResult(out, state, cross_layer)
        committed = new.first(commit)
        at = scatter_index(committed.pos, state.k.shape)
        k, v = (x.at[at].set(y, mode="drop") for x, y in ((state.k, committed.k), (state.v, committed.v)))
        state = dataclasses.replace(state, k=k, v=v, q=q[:, :, :, commit - 1 : commit])
        return StepResult(out, state, cross_layer)

    def positions(self, state: TracedState) -> Array:
        """Positions of the layer itself."""
        return self.inner.positions(state.inner)

    def measure(self, block: KVBlock, observation: Observation | None) -> Array:
        """See `BudgetedLayer`."""
        return self.inner.measure(block, observation)

    def divide_budget(self, measures: Array, lengths: Array) -> Array:
        """See `BudgetedLayer`."""
        return self.inner.divide_budget(measures, lengths)

    def count_slots(self, tokens: np.ndarray) -> int:
        """See `BudgetedLayer`."""
        return self.inner.count_slots(tokens)

    def resize(self, kept_slots: int, headroom_tokens: int) -> tuple[TracedLayer, int]:
        """See `BudgetedLayer`."""
        inner, num_slots = self.inner.resize(kept_slots, headroom_tokens)
        return dataclasses.replace(self, inner=inner), num_slots

    def update_scores(
        self, block: KVBlock, start: Array, observation: Observation, new: KVBlock, before: Array
    ) -> Array:
        """See `ReplayedLayer`."""
        return self.inner.update_scores(block, start, observation, new, before)


def inner_cache(cache: Cache) -> Cache:
    """Returns the cache of the method itself, without the tracer's copies."""
    plan = tuple(layer.inner for layer in cache.plan if isinstance(layer, TracedLayer))
    return dataclasses.replace(cache, layers=tuple(state.inner for state in cache.layers), plan=plan)
