"""Merged heads: compresses several key/value heads of a layer into one."""

from __future__ import annotations

import dataclasses

from kvjax.cache.calibration.bases import JointBases
from kvjax.cache.calibration.table_kinds import register_table_kind as register
from kvjax.cache.codecs.low_rank import CalibratedLowRank
from kvjax.cache.method import Method
from kvjax.errors import KvjaxError
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


@register("merged_bases")
@dataclasses.dataclass(frozen=True)
class MergedBases(JointBases):
    """The principal directions of `heads` adjacent heads together; see `Bases`."""

    heads: int = 2


def _bytes(x: Sizes) -> Bytes:
    """One head in the place of two, for keys and for values, and the directions of each in both heads' channels."""
    rows = 2 * x.B * x.S * (x.K // 2) * x.H * x.itemsize
    bases = 2 * 4 * x.K * x.H * (x.H + 1)
    return Bytes(rows + bases + x.positions(x.S) + x.per_row())


@recipe(
    "Effectively Compress KV Heads for LLM, Yu et al. 2024, arXiv 2406.07056, section 3",
    Trial("merged_heads:heads=2", "", _bytes),
    formula="heads h..h+g of a group: c = U_r^T ([k_h .. k_h+g] - mean), r as many channels as one head has, keys "
    "before RoPE; k_h' = RoPE(U_r[h] c + mean)",
    differs="Unverified: there is no public code. The matrices are read beside the model and not fused into its "
    "weights, which are not trained further; the principal directions are centred.",
    example="merged_heads",
    family="fewer numbers per vector",
)
def merged_heads(heads: int = 2, table: str = "shipped") -> Method:
    """Neighbouring key/value heads are held as one head, made by the principal directions of their caches.

    heads: so many become one (the paper: 2 or 4); it divides the heads of a layer. table: the file of `kvjax calibrate
    merged_bases:heads=4` and the like, by default those of two heads that ship with kvjax. Keys are held without their
    rotation. A prompt attends exactly.
    """
    if heads < 2:
        raise KvjaxError(f"at least 2 heads become one, got heads={heads}; the paper uses 2 and 4")
    bases, share = MergedBases.table_file(table), 1 / heads
    k, v = (
        CalibratedLowRank(heads, table=bases, of="bare_keys", share=share),
        CalibratedLowRank(heads, table=bases, share=share),
    )
    return Method(k=k, v=v)
