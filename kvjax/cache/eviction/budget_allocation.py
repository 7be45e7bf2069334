"""Allocation of a budget: among the layers once all of them have seen the prompt, and among a layer's heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, KVBlock

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer
    from kvjax.cache.eviction.budgets import Budget
    from kvjax.cache.eviction.selection import Selection
    from kvjax.cache.method import Method

SHARED_ROUNDING = 16
"""A layer's slots are a multiple of this where layers divide a budget; see `round_up_shared`."""


def round_up_shared(num_slots: int, mean_slots: int, most_slots: int) -> int:
    """Rounds a layer's slots up to one of few sizes, where layers divide a budget.

    The sizes are 1, 2, 3, 4, 6, 8, 12, 16, .. times `SHARED_ROUNDING`, two for each doubling, and at least a quarter of
    the mean. Every size is a shape, and so a program of its own for the prompt, for a question and for a step: with
    multiples of 16 nearly all layers, and most texts, compiled theirs. A size is at most half as large again as what it
    holds, and a sixth in the mean.

    Args:
      num_slots: of the layer.
      mean_slots: of all layers.
      most_slots: tokens of the longest prompt; beyond them a larger size would be of no use.
    """
    units = max(1, -(-max(num_slots, mean_slots // 4) // SHARED_ROUNDING))
    power = 1 << (units.bit_length() - 1)  # the largest power of two up to `units`
    size = SHARED_ROUNDING * next(size for size in (power, power * 3 // 2, 2 * power) if size >= units)
    whole_prompt = -(-most_slots // SHARED_ROUNDING) * SHARED_ROUNDING
    return min(size, max(whole_prompt, num_slots))


def most_shared_slots(mean_slots: int, most_slots: int) -> int:
    """The most slots that `round_up_shared` gives layers in the mean, which need `mean_slots` in the mean."""
    whole_prompt = -(-most_slots // SHARED_ROUNDING) * SHARED_ROUNDING
    return min((mean_slots + mean_slots // 4 + SHARED_ROUNDING) * 3 // 2, max(whole_prompt, mean_slots))


class LayerBudgets:
    """The component `layer_budgets`: each layer measures its prompt, and gets tokens by its measure (CAKE)."""

    num_queries: int | None = 0  # last prompt queries that `measure` observes, as in `Needs`
    # whether `allocate_tokens` counts tokens of each head, which takes a side store for heads of unequal length
    by_head = False

    def measure(self, layer: MethodLayer, block: KVBlock, observation: Observation | None) -> Any:
        """Measures one layer's prompt: a pytree of arrays [B ...]."""
        raise NotImplementedError(f"{type(self).__name__} has no method `measure`")

    def allocate_tokens(self, layer: MethodLayer, measures: Any, lengths: Array) -> Array:
        """Divides the budget of all layers.

        Args:
          layer: one of the layers, for what all have in common; its `budgets` are what each layer would keep by itself.
          measures: those of all layers, arrays [L B ...].
          lengths: i32[B], tokens of the prompts.

        Returns:
          Tokens that each layer keeps, i32[L B], or each of its heads, i32[L B K].
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `allocate_tokens`")

    def check(self, layer: MethodLayer) -> None:
        """Raises KvjaxError for other components of the method that this one cannot work with."""


class HeadBudgets:
    """Units that each key/value head of a layer keeps: the rule of the side store `PagedHeads`.

    A rule is a frozen dataclass with the method `allocate`, and `at(spec)` where it differs between layers.
    """

    def bind_budget(self, method: Method, budget: Budget, spec: LayerSpec) -> tuple[Selection | None, HeadBudgets]:
        """Returns the method's selection with the budget of this layer, and the rule in it; the base changes neither.

        A rule that also divides the budget among layers, before any prompt, gives the selection another budget.
        """
        return method.select, self

    def tokens_by_length(self, longest: int) -> np.ndarray | None:
        """i32[longest + 1, K]: tokens that each head keeps of prompts of 0..longest; None where the prompt decides."""
        return None

    def for_lengths(self, lengths: Array, longest: int) -> HeadBudgets:
        """The rule for prompts of i32[B] tokens, at most `longest`; a rule that goes by lengths looks them up here."""
        return self

    def num_other_heads(self, spec: LayerSpec) -> int:
        """Heads whose budgets one head may take in addition to its own: it bounds the slots of a head."""
        return spec.num_kv_heads - 1

    def allocate(self, scores: Array, allowed: Array, num_units: Array, num_always: Array) -> Array:
        """Divides the units of a layer among all its heads.

        Args:
          scores: f32[B K U], of every unit.
          allowed: bool[B U], units that a head may keep; no head gets more than there are.
          num_units: i32[B], units per head on average.
          num_always: i32[B], units that each head keeps in any case, in addition.

        Returns:
          i32[B K], the sum of a sequence K * num_units.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `allocate`")

    def allocate_local(self, scores: Array, allowed: Array, num_units: Array, num_always: Array) -> Array:
        """`allocate` for the heads on this device, whose scores are given."""
        # Heads compete across devices, so every device divides the budget of all heads and takes its own part.
        local_heads = scores.shape[1]
        all_heads = self.allocate(over_heads.gather(scores), allowed, num_units, num_always)
        return lax.dynamic_slice_in_dim(all_heads, over_heads.first_head(local_heads), local_heads, 1)


def match_total(parts: Array, total: Array, least: Array, most: Array) -> Array:
    """Moves the parts of each sequence by one common amount until they sum to its total.

    Args:
      parts: i32[n B].
      total: i32[B]; a total that the bounds cannot make is replaced by the nearest that they can.
      least: i32[B], lower bound of each part.
      most: i32[B], upper bound. Where a bound cuts a part off, the difference goes to the others.

    Returns:
      i32[n B]. Where an amount cannot be divided equally, the first parts take one more.
    """
    n = parts.shape[0]
    total = jnp.clip(total, n * least, n * most)

    # Each round divides what is missing among the parts that can still move. A part that hits its bound drops out, so
    # there are at most n rounds.
    def move(parts: Array) -> Array:
        amount = total - parts.sum(0, dtype=jnp.int32)
        free = jnp.where(amount > 0, parts < most[None], parts > least[None])
        num_free = jnp.maximum(free.sum(0, dtype=jnp.int32), 1)
        each, rest = jnp.abs(amount) // num_free, jnp.abs(amount) % num_free
        one_more = jnp.cumsum(free, 0, dtype=jnp.int32) <= rest[None]
        by = jnp.where(free, each[None] + one_more.astype(jnp.int32), 0)
        return jnp.clip(parts + jnp.sign(amount)[None] * by, least[None], most[None])

    start = jnp.clip(parts, least[None], most[None])
    return lax.while_loop(lambda parts: (parts.sum(0, dtype=jnp.int32) != total).any(), move, start)
