"""Merged heads: compresses several key/value heads of a layer into one."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from kvjax import method_api as kv


@kv.register_table_kind("merged_bases")
@dataclasses.dataclass(frozen=True)
class MergedBases(kv.JointBases):
    """The principal directions of `heads` adjacent heads together; see `Bases`."""

    heads: int = 2


@kv.register_method(family="fewer numbers per vector")
def merged_heads(heads: Annotated[int, kv.Within("[2, inf)")] = 2, table: str = "shipped") -> kv.Method:
    """Stores neighboring key/value heads as one head, along the principal directions of their caches.

    Keys are stored without RoPE. Attention in the prompt is exact.

    Formula:
      heads h..h+g of a group: c = U_r^T ([k_h .. k_h+g] - mean), r as many channels as one head has, keys before RoPE;
      k_h' = RoPE(U_r[h] c + mean)

    Differs:
      Unverified: there is no public code. The matrices are separate from the model's weights, not fused into them, and
      the weights are not trained further; the principal directions are centered.

    Args:
      heads: key/value heads that are merged into one (the paper: 2 or 4); it divides the heads of a layer.
      table: the file of `kvjax calibrate merged_bases:heads=4` and the like; "shipped" for those of two heads that ship
        with kvjax.

    Reference:
      Effectively Compress KV Heads for LLM, Yu et al. 2024, arXiv 2406.07056, section 3
    """
    bases, share = MergedBases.table_file(table), 1 / heads
    return kv.Method(
        k=kv.CalibratedLowRank(heads, table=bases, of="bare_keys", share=share),
        v=kv.CalibratedLowRank(heads, table=bases, share=share),
    )
