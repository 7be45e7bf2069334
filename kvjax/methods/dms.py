"""DMS: every head keeps the tokens whose score reaches a threshold, few or many."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from kvjax import method_api as kv
from kvjax.methods.attention_gate import ThresholdBudgets


@kv.register_method(example="kvzap:budget=512 + dms:threshold=-4", family="component over a selection")
def dms(threshold: Annotated[float, kv.Within("(-inf, inf)")] = -4.0, page: int = 16) -> kv.Method:
    """Lets each head keep the tokens whose score is at least a threshold, up to the selection's budget.

    Use it as in 'kvzap:budget=50%,recent=128 + dms:threshold=-4'; the selection's `recent` is the sliding window in
    which no token is evicted, and `budget=100%` leaves the threshold alone to decide.

    Formula:
      head h keeps the token s of a prompt of T tokens if score_hs >= threshold or s >= T - recent

    Differs:
      This is kvpress' `DMSPress`, dense attention of the prompt and eviction after it; the paper trains the model to
      evict. A threshold gives no number of tokens, and shapes must be known beforehand: memory is reserved for the
      budget, and if the heads of a layer together have more tokens above the threshold, the best of them all stay.
      Decoded tokens all stay, where `decoding=True` of kvpress evicts those that leave the window: no hidden states,
      by which KVzap scores, come to a method while decoding.

    Args:
      threshold: on the scale of the selection's scores (-4 with KVzap's, which are logarithms).
      page: slots of a page, in which heads of unequal length are stored.

    Reference:
      Dynamic Memory Sparsification, Lancucki et al. 2025, arXiv 2506.05345; its public code, NVIDIA/kvpress
    """
    above = float(np.nextafter(np.float32(threshold), np.float32(-np.inf)))  # the next number below, which leaves
    return kv.Method(side_store=kv.PagedHeads(ThresholdBudgets(above), page))
