"""EMS: keeps the best tokens, merges the next best into those they resemble, and evicts the others."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.eviction.merging import MIN_KEY_NORM, unit_vectors


@dataclasses.dataclass(frozen=True)
class GlobalLocalAttention(kv.Scorer):
    """Adds the attention from all queries and from the last ones, each over its sum (Li et al. 2024, arXiv 2412.08521).

    The global part is a mean over the queries that see a token, because a sum would favor old tokens.
    """

    window: kv.PositiveInt = 32
    num_queries: ClassVar[int | None] = None

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        observation = self.require_observation(observation)
        total, num_queries = kv.attention_mass(block, observation, jnp.ones(observation.pos.shape), spec.rule)
        local_queries = kv.window_query_mask(observation, self.window).astype(jnp.float32)
        local, _ = kv.attention_mass(block, observation, local_queries, spec.rule)
        global_mean = total / jnp.maximum(num_queries, 1.0)[:, :, None]
        global_part, local_part = (x / jnp.maximum(x.sum(-1, keepdims=True), 1e-30) for x in (global_mean, local))
        heads = global_part + local_part
        return kv.head_scores(heads, heads.mean(2), block)


@dataclasses.dataclass(frozen=True)
class CenterMerge:
    """Merges the best of each head's evicted tokens into the nearest kept one, unless the zero class is nearer.

    The zero class is a center that any key resembles by `threshold`; tokens that join it are evicted, so each head
    finds its own balance of merged and evicted tokens. A merged value is the mean by scores. A merged key has the
    direction of the mean of unit keys by scores, and the mean of their norms.

    Args:
      band: how many tokens may merge, by their scores, as a multiple of the tokens that stay.
      threshold: cosine of the zero class.
    """

    band: kv.NonNegativeFloat = 1.0
    threshold: kv.UnitFloat = 0.6

    __post_init__ = kv.check_fields

    def __call__(self, block: kv.KVBlock, kept: kv.KVBlock, choice: kv.SelectedSlots, spec: kv.LayerSpec) -> kv.KVBlock:
        block, kept = block.clean(), kept.clean()
        lost, n = kv.match_evicted(block, kept, choice), kept.k.shape[2]
        # The band: the evicted tokens of the highest scores, in proportion to the tokens that the head keeps.
        num_kept = (jnp.broadcast_to(choice.slots, kept.k.shape[:3]) >= 0).sum(-1, dtype=jnp.int32)
        in_band = kv.top_k_mask(choice.scores.per_kv_head, lost.mask, kv.fraction_of(self.band, num_kept))
        joins = in_band & (lost.cosine >= self.threshold)
        slot = jnp.where(joins, lost.slot, n)
        weight = jnp.maximum(jnp.where(lost.mask, choice.scores.per_kv_head, 0.0), MIN_KEY_NORM)
        own_weight = jnp.maximum(kv.scores_of_kept(kept, choice), MIN_KEY_NORM)
        total = own_weight + kv.scatter_add(weight, slot, n)

        def average(own: kv.Array, evicted: kv.Array) -> kv.Array:
            return kv.fold_into_kept(own, own_weight[..., None], evicted, weight, slot, total)

        direction = average(unit_vectors(kept.k), unit_vectors(block.k))
        own_norm, evicted_norm = (
            jnp.linalg.norm(keys.astype(jnp.float32), axis=-1, keepdims=True) for keys in (kept.k, block.k)
        )
        norm = average(own_norm, evicted_norm)
        # A key that nothing was merged into keeps its bits, which a product of direction and norm would round.
        is_merged = kv.scatter_add(jnp.ones(slot.shape), slot, n)[..., None] > 0
        k = jnp.where(is_merged, (unit_vectors(direction) * norm).astype(kept.k.dtype), kept.k)
        return dataclasses.replace(kept, k=k, v=average(kept.v, block.v))


@kv.register_method(example="ems:budget=512", family="merging")
def ems(
    budget: kv.TokenBudget = 256, window: int = 32, band: float = 1.0, threshold: float = 0.6, sinks: int = 0
) -> kv.Method:
    """Keeps each head's best tokens by global and local attention, merges the next best into them, and evicts the rest.

    Formula:
      score = G / sum G + L / sum L; of the next best tokens those with max cos(k_e, k_center) >= threshold: v <- sum of
      s v / sum of s, k likewise in direction and in norm

    Differs:
      The paper has no public code. Unverified: that all heads have the same budget and band, that the two scores are
      added as fractions, the width of the band, the threshold, the window, the sinks, and that norms are averaged.
      Merging happens once, when the prompt ends.

    Args:
      budget: as in `make_selection`; the window is included (256 in the paper's main table).
      window: last queries of the prompt, whose attention is the local one, and whose tokens stay.
      band: tokens that may merge, as a multiple of the kept ones.
      threshold: lowest cosine of two keys that merge.
      sinks: as in `make_selection`.

    Reference:
      EMS, Li et al. 2024, arXiv 2412.08521
    """
    select = kv.make_selection(GlobalLocalAttention(window), budget, sinks, window)
    return kv.Method(select=select, merge=CenterMerge(band, threshold))
