"""KVMerger: neighbours with similar keys become one token, weighted by a Gaussian around the most attended of them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache.eviction.merging import evicted_mask, fold_into_kept, gather_at_slots, scatter_add, unit_vectors
from kvjax.cache.eviction.scorers import (
    AccumulatedAttention,
    Scorer,
    Scores,
    head_scores,
    pre_window_mask,
    rank_below_others,
)
from kvjax.cache.eviction.selection import SelectedSlots, make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core import memory
from kvjax.core.attention_mass import Observation
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@dataclasses.dataclass(frozen=True)
class Sets:
    """Each head's tokens in `budget` sets of consecutive tokens (Wang et al. 2024, arXiv 2407.08454).

    The last `recent` tokens, and of the others the `heavy` most attended, are sets by themselves. Between all others,
    the pairs of neighbours with the highest cosines of keys are joined until there are no more sets than the budget:
    so the threshold of the paper follows from the budget, for each head.
    """

    budget: int
    heavy: int
    recent: int

    def __post_init__(self):
        least = 2 * self.heavy + self.recent + 1  # between any two heavy hitters something may be left
        if min(self.heavy, self.recent) < 0 or self.budget < least:
            raise KvjaxError(
                f"KVMerger with heavy={self.heavy} and recent={self.recent} (0 or more) needs a budget of at least "
                f"2 heavy + recent + 1, got budget={self.budget}; raise it to {max(least, 1)} or protect fewer"
            )

    def of(self, block: KVBlock, scores: Array) -> Array:
        """i32[B K T]: the set of each token, counted from its row's first, T in empty slots; scores f32[B K T]."""
        T = scores.shape[2]
        real, old = block.pos >= 0, pre_window_mask(block, self.recent)
        heavy = top_k_mask(scores, old, jnp.full(scores.shape[:1], self.heavy, jnp.int32))
        free = old & ~heavy
        towards = unit_vectors(block.clean().k)
        cosine = _shifted((towards[:, :, 1:] * towards[:, :, :-1]).sum(-1))
        excess = real.sum(2, dtype=jnp.int32) - self.budget
        joined = top_k_mask(cosine, free & _shifted(free[:, :, :-1]), jnp.maximum(excess, 0))
        return jnp.where(real, jnp.cumsum(~joined, 2, dtype=jnp.int32) - 1, T)

    def pivots(self, block: KVBlock, scores: Array) -> Array:
        """bool[B K T]: the most attended token of each set, of equals the first."""
        sets, T = self.of(block, scores), scores.shape[2]
        place = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None, None], sets.shape)
        index = (*_heads(sets), sets)
        highest = jnp.full(sets.shape, -jnp.inf).at[index].max(scores, mode="drop")
        best = scores == gather_at_slots(highest, sets)
        first = jnp.full(sets.shape, T).at[index].min(jnp.where(best, place, T), mode="drop")
        return place == first.at[index].get(mode="fill", fill_value=-1)


def _shifted(x: Array) -> Array:
    """[B K T - 1] -> [B K T]: one place later, 0 in the first."""
    return jnp.pad(x, [(0, 0), (0, 0), (1, 0)])


def _heads(x: Array) -> tuple[Array, Array]:
    """The indices of rows and heads of x [B K ...], to stand before one of slots."""
    return jnp.arange(x.shape[0])[:, None, None], jnp.arange(x.shape[1])[None, :, None]


@dataclasses.dataclass(frozen=True)
class Pivots(Scorer):
    """Attention summed over the prompt, with what is no pivot of its set below all pivots."""

    sets: Sets
    num_queries: ClassVar[int | None] = None

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        found = AccumulatedAttention().scores(block, observation, spec)
        others = (block.pos >= 0) & ~self.sets.pivots(block, found.per_kv_head)
        return head_scores(
            rank_below_others(found.per_query_head, others[:, :, None]),
            rank_below_others(found.per_kv_head, others),
            block,
        )


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """Each lost token goes into the kept one of its set, by exp(-d^2 / 2 sigma^2) of the distance d of their keys.

    sigma: 0, the root mean square of the distances of a set, the pivot's own 0 among them; or one for all sets. count:
    the slot's bias is the logarithm of how many tokens it stands for.
    """

    sets: Sets
    sigma: float = 0.0
    count: bool = False

    def __post_init__(self):
        if self.sigma < 0:
            raise KvjaxError(f"sigma of KVMerger must be 0 (each set's own) or positive, got {self.sigma}; use 0")

    def __call__(self, block: KVBlock, kept: KVBlock, choice: SelectedSlots, spec: LayerSpec) -> KVBlock:
        block, kept = block.clean(), kept.clean()
        slot, n = self._slots(block, kept, choice), kept.k.shape[2]
        number = scatter_add(jnp.ones(slot.shape), slot, n)
        pivot = memory.take(kept.k, jnp.minimum(slot, n - 1)).astype(jnp.float32)
        distance = jnp.square(block.k.astype(jnp.float32) - pivot).sum(-1)
        variance = jnp.full(number.shape, self.sigma**2)
        if not self.sigma:
            variance = scatter_add(distance, slot, n) / (1.0 + number)
        by = jnp.exp(-distance / jnp.maximum(2 * gather_at_slots(variance, slot), 1e-12))
        whole = 1.0 + scatter_add(by, slot, n)
        k, v = (fold_into_kept(x, 1.0, y, by, slot, whole) for x, y in ((kept.k, block.k), (kept.v, block.v)))
        return dataclasses.replace(kept, k=k, v=v, bias=jnp.log1p(number) if self.count else kept.bias)

    def _slots(self, block: KVBlock, kept: KVBlock, choice: SelectedSlots) -> Array:
        """i32[B K T]: the slot that each lost token goes into, n for none."""
        # Heavy hitters are pivots, so these scores say the same of them as the attention did.
        sets, n = self.sets.of(block, choice.scores.per_kv_head), kept.k.shape[2]
        held = jnp.broadcast_to(choice.slots, kept.k.shape[:3])
        of_kept = jnp.where(held >= 0, jnp.take_along_axis(sets, jnp.maximum(held, 0), 2), sets.shape[2])
        place = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None, None], held.shape)
        slot = jnp.full(sets.shape, n).at[(*_heads(sets), of_kept)].min(place, mode="drop")
        return jnp.where(evicted_mask(block, choice), jnp.take_along_axis(slot, sets, 2, mode="clip"), n)


@register_method(example="kvmerger:budget=512", family="merging")
def kvmerger(budget: int = 1024, heavy: int = 64, recent: int = 64, sigma: float = 0.0, count: bool = False) -> Method:
    """Merges runs of neighboring tokens with similar keys until no more than the budget are left.

    Formula:
      g_i = exp(-|k_p - k_i|^2 / 2 sigma^2), p: the most attended token of a set of neighbors; x <- sum of g_i x_i / sum
      of g_i, for keys and values

    Differs:
      The paper has no public code. It joins neighbors whose cosine reaches a threshold (0.75); here each head has the
      threshold that its budget asks for. Unverified: sigma (as in public ports, the root mean square distance of the
      set), how many tokens are left out of merging, and a factor on merged values, which `count` replaces. No layer is
      spared.

    Args:
      budget: prompt tokens kept per head, at least 2 heavy + recent + 1.
      heavy: most attended tokens, which are not merged (in the paper; their number is unverified).
      recent: last tokens, which are not merged (in the paper; their number is unverified).
      sigma: width of the Gaussian, 0 for each set's own; see `Gaussian`.
      count: whether a slot's attention weight is multiplied by the number of tokens that it stands for.

    Reference:
      KVMerger, Wang et al. 2024, arXiv 2407.08454
    """
    sets = Sets(budget, heavy, recent)
    return Method(select=make_selection(Pivots(sets), budget, recent=recent), merge=Gaussian(sets, sigma, count))
