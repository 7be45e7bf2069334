"""How a budget is divided: among the layers once all of them have seen the prompt, and among a layer's heads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer
    from kvjax.cache.eviction.budgets import Budget
    from kvjax.cache.eviction.selection import Selection
    from kvjax.cache.method import Method

SHARED_ROUNDING = 16
"""A layer's slots are a multiple of this where layers divide a budget, so that similar prompts share programs."""


class LayerBudgets:
    """The `layer_budgets` slot of a method: each layer measures its prompt, and gets tokens by its measure."""

    num_queries: int | None = 0  # of a row's last prompt queries, as in `Needs`
    # whether `allocate_tokens` tells them for each head, which takes a store for heads of unequal length
    by_head = False

    def measure(self, layer: MethodLayer, block: KVBlock, observation: Observation | None) -> Any:
        """What the shares are made of, from one layer's prompt: arrays [B ...], as f32[B]."""
        raise NotImplementedError

    def allocate_tokens(self, layer: MethodLayer, measures: Any, lengths: Array) -> Array:
        """Tokens that each layer keeps, i32[L B], or each of its heads, i32[L B K].

        Args:
          layer: one of the layers, for what all have in common; its `budgets` are what each layer would keep by itself.
          measures: those of all layers, arrays [L B ...].
          lengths: i32[B], of the prompts.
        """
        raise NotImplementedError

    def check(self, layer: MethodLayer) -> None:
        """Raises KvjaxError for other slots of the method that this one cannot work with."""


class HeadBudgets:
    """How many units each key/value head of a layer keeps: a rule that stands in `Pages`, in the slot `side_store`.

    A rule is a frozen dataclass with the method `allocate`, and `at(spec)` where it differs between layers.
    """

    def bind_budget(self, method: Method, budget: Budget, spec: LayerSpec) -> tuple[Selection | None, HeadBudgets]:
        """(the method's selection with the budget of this layer, the rule in it); the base changes neither.

        A rule that also divides the budget among layers, before any prompt, gives the selection another one.
        """
        return method.select, self

    def tokens_by_length(self, longest: int) -> np.ndarray | None:
        """i32[longest + 1, K]: tokens that each head keeps of prompts of 0..longest; None where the prompt decides."""
        return None

    def of_rows(self, lengths: Array, longest: int) -> HeadBudgets:
        """The rule for prompts of i32[B] tokens, at most `longest`: one that goes by lengths looks them up here."""
        return self

    def others(self, spec: LayerSpec) -> int:
        """How many other heads' budgets one head may have beside its own."""
        return spec.num_kv_heads - 1

    def allocate(self, scores: Array, allowed: Array, quota: Array, beside: Array) -> Array:
        """Units that all heads of a layer keep, i32[B K], each row's sum K * quota.

        scores f32[B K U]: of every unit. allowed bool[B U]: the units that a head may keep; no head gets more than
        there are. quota i32[B]: units per head in the mean. beside i32[B]: what each head keeps in any case, in units.
        """
        raise NotImplementedError

    def allocate_local(self, scores: Array, allowed: Array, quota: Array, beside: Array) -> Array:
        """The same of the heads on this device, whose scores are given."""
        here = scores.shape[1]
        every = self.allocate(over_heads.gather(scores), allowed, quota, beside)
        return lax.dynamic_slice_in_dim(every, over_heads.first_head(here), here, 1)


@dataclasses.dataclass(frozen=True)
class Table(HeadBudgets):
    """Shares that are known beforehand: a weight of each key/value head, one row per layer (HeadKV, 2410.19258).

    The units of a layer are divided in proportion, rounded down; what is left goes to its heads in turn. The paper also
    moves tokens between layers: give these as a `budgets.Table`.
    """

    weights: tuple[tuple[float, ...], ...]

    def at(self, spec: LayerSpec) -> Table:
        assert spec.index is not None
        if len(self.weights) != spec.num_layers or len(self.weights[spec.index]) != spec.num_kv_heads:
            sizes = f"{len(self.weights)} layers of {sorted({len(row) for row in self.weights})} heads"
            raise KvjaxError(
                f"the table of weights has {sizes}, the model {spec.num_layers} layers of {spec.num_kv_heads} "
                "key/value heads; give one row per layer and one weight per key/value head"
            )
        return Table((self.weights[spec.index],))

    def allocate(self, scores: Array, allowed: Array, quota: Array, beside: Array) -> Array:
        K = scores.shape[1]
        weights, total = jnp.asarray(self.weights[0], jnp.float32)[:, None], K * quota
        parts = jnp.floor(weights / weights.sum() * total[None].astype(jnp.float32)).astype(jnp.int32)
        return match_total(parts, total, jnp.zeros_like(quota), allowed.sum(-1, dtype=jnp.int32)).T


def match_total(parts: Array, total: Array, least: Array, most: Array) -> Array:
    """Parts i32[n B], all moved by the same amount until each column sums to total i32[B], as far as that can be.

    Each stays within least..most i32[B], and what these cut off goes to the others. Where an amount cannot be divided,
    the first parts take one more.
    """
    n = parts.shape[0]
    total = jnp.clip(total, n * least, n * most)

    def missing(parts: Array) -> Array:
        return total - parts.sum(0, dtype=jnp.int32)

    def step(parts: Array) -> Array:
        amount = missing(parts)
        free = jnp.where(amount > 0, parts < most[None], parts > least[None])
        count = jnp.maximum(free.sum(0, dtype=jnp.int32), 1)
        each, left = jnp.abs(amount) // count, jnp.abs(amount) % count
        one_more = jnp.cumsum(free, 0, dtype=jnp.int32) <= left[None]
        by = jnp.where(free, each[None] + one_more.astype(jnp.int32), 0)
        return jnp.clip(parts + jnp.sign(amount)[None] * by, least[None], most[None])

    start = jnp.clip(parts, least[None], most[None])
    return lax.while_loop(lambda parts: (missing(parts) != 0).any(), step, start)
