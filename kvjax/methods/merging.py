"""Merging on eviction: adds the value of an evicted token to that of the kept one with the nearest key."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.eviction.merging import MIN_KEY_NORM


@dataclasses.dataclass(frozen=True)
class ValueMerge:
    """Merges values of evicted tokens into kept ones, weighted by cosine and norm; keys stay (kvpress' MergingPress).

    The fields are the arguments of `merging`.
    """

    threshold: kv.UnitFloat = 0.0
    fraction: Annotated[float, kv.Within("(0, 1]")] = 1.0

    __post_init__ = kv.check_fields

    def __call__(self, block: kv.KVBlock, kept: kv.KVBlock, choice: kv.SelectedSlots, spec: kv.LayerSpec) -> kv.KVBlock:
        block, kept = block.clean(), kept.clean()
        lost, n = kv.match_evicted(block, kept, choice), kept.k.shape[2]
        joins = lost.mask & (lost.cosine >= self.threshold)
        if self.fraction < 1:
            # Where no cosines are equal, these are the ones that reach the quantile 1 - fraction.
            number = 1 + kv.fraction_of(self.fraction, lost.mask.sum(-1, dtype=jnp.int32) - 1)
            joins &= kv.top_k_mask(lost.cosine, lost.mask, number)
        evicted_norm, kept_norm = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (block.v, kept.v))
        kept_norm = jnp.take_along_axis(kept_norm, jnp.minimum(lost.slot, n - 1), 2)
        weight = jnp.maximum(lost.cosine, 0.0) * (evicted_norm / (evicted_norm + kept_norm + MIN_KEY_NORM))
        slot = jnp.where(joins, lost.slot, n)
        v = kv.fold_into_kept(kept.v, 1.0, block.v, weight, slot, 1.0 + kv.scatter_add(weight, slot, n))
        return dataclasses.replace(kept, v=v)


@kv.register_method(example="snapkv:budget=256 + merging", family="component over a selection")
def merging(threshold: float = 0.0, fraction: float = 1.0) -> kv.Method:
    """Merges the value of each evicted token into that of the kept token with the most similar key.

    Use it as in 'snapkv:budget=256 + merging'. Keys stay as they are.

    Formula:
      u_e = max cos(k_e, k_kept), w_e = max(u_e, 0) |v_e| / (|v_e| + |v|); v <- (v + sum of w_e v_e) / (1 + sum of w_e)

    Differs:
      Of evicted tokens with equal cosines at the quantile of `fraction` the earlier ones merge, not all.

    Args:
      threshold: lowest cosine of the two keys.
      fraction: fraction of each head's evicted tokens that may merge, the most similar ones (kvpress: 1 for retrieval,
        0.75 for extraction).

    Reference:
      MergingPress of kvpress, after Token Merging (Bolya et al. 2022, arXiv 2210.09461) and D2O (arXiv 2406.13035)
    """
    return kv.Method(merge=ValueMerge(threshold, fraction))
