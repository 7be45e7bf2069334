"""D2O: merges evicted tokens into the kept ones that they resemble, keys and values both."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv

COSINE_TOLERANCE = 1e-6  # below the threshold, so that cosines which differ by rounding are treated alike


@dataclasses.dataclass(frozen=True)
class D2O:
    """Merges an evicted token into the kept one with the nearest key, if their cosine u reaches a threshold.

    Args:
      rule: "authors", as in the public code: the threshold is the mean of u over all heads and evicted tokens of a
        layer; the evicted tokens of all heads are compared rank by rank, and those of one rank are merged in all heads
        or in none, by the mean of their u; a merged key or value is the mean of the kept one and of u times each
        evicted one. "paper": each head has its own threshold and decides token by token; the kept one weighs
        e / (e + sum of e^u), an evicted one e^u / (e + sum of e^u).
      count: whether the slot's bias is the logarithm of how many tokens it stands for.
    """

    rule: Literal["authors", "paper"] = "authors"
    count: bool = False

    __post_init__ = kv.check_fields

    def __call__(self, block: kv.KVBlock, kept: kv.KVBlock, choice: kv.SelectedSlots, spec: kv.LayerSpec) -> kv.KVBlock:
        block, kept = block.clean(), kept.clean()
        lost, n, T = kv.match_evicted(block, kept, choice), kept.k.shape[2], block.k.shape[2]
        if self.rule == "authors":
            # The evicted tokens of one rank, the i-th of each head, are merged in all heads or in none.
            rank = jnp.cumsum(lost.mask, 2, dtype=jnp.int32) - 1
            at = jnp.where(lost.mask, rank, T)
            total, heads = (
                kv.over_heads.sum(kv.scatter_add(x, at, T)) for x in (lost.cosine, lost.mask.astype(jnp.float32))
            )
            mean = total.sum(2, keepdims=True) / jnp.maximum(heads.sum(2, keepdims=True), 1.0)
            enough = jnp.broadcast_to(total >= heads * (mean - COSINE_TOLERANCE), lost.mask.shape)
            joins = lost.mask & jnp.take_along_axis(enough, jnp.maximum(rank, 0), 2)
            own, weight = 1.0, lost.cosine
        else:
            num_evicted = lost.mask.sum(2, keepdims=True, dtype=jnp.int32).astype(jnp.float32)
            mean = lost.cosine.sum(2, keepdims=True) / jnp.maximum(num_evicted, 1.0)
            joins = lost.mask & (lost.cosine >= mean - COSINE_TOLERANCE)
            own, weight = np.float32(np.e), jnp.exp(lost.cosine)
        slot = jnp.where(joins, lost.slot, n)
        number = kv.scatter_add(jnp.ones(slot.shape), slot, n)
        # The authors divide by the number of tokens although a cosine weighs less than 1: merged vectors shrink.
        total_weight = own + (number if self.rule == "authors" else kv.scatter_add(weight, slot, n))
        k, v = (
            kv.fold_into_kept(x, own, y, weight, slot, total_weight) for x, y in ((kept.k, block.k), (kept.v, block.v))
        )
        return dataclasses.replace(kept, k=k, v=v, bias=jnp.log1p(number) if self.count else kept.bias)


@kv.register_method(example="accumulated:budget=256,recent=64,sinks=4 + d2o", family="component over a selection")
def d2o(rule: Literal["authors", "paper"] = "authors", count: bool = False) -> kv.Method:
    """Merges each evicted token that resembles a kept one into it, keys and values both.

    Use it as in 'accumulated:budget=256,recent=64,sinks=4 + d2o', which are D2O's own scores with its four sinks. The
    threshold is the mean similarity in the prompt.

    Formula:
      u_e = max cos(k_e, k_kept); where u_e >= mean u: x <- mean of x and of all u_e x_e (authors), or (e x + sum of
      e^u_e x_e) / (e + sum of e^u_e) (paper)

    Differs:
      D2O's budgets by layer are left out: the paper gives layers of dense attention more, and spares layers 0, 1 and
      the last; here all layers keep the same number. The default follows the public code, whose mean shrinks the merged
      vectors; the paper's weights are rule=paper. Merging happens once, when the prompt ends, so the moving average of
      thresholds has no use.

    Args:
      rule: "authors", the public code's mean, or "paper", its exponential weights; see `D2O`.
      count: whether a slot's attention weight is multiplied by the number of tokens that it stands for (neither source
        does; with it, equal tokens merge exactly).

    Reference:
      D2O, Wan et al. 2024, arXiv 2406.13035; the merge of its authors' code
    """
    return kv.Method(merge=D2O(rule, count))
