"""CSKV: a low-rank copy of all heads' keys and values together, beside an exact window."""

from __future__ import annotations

from kvjax.cache.calibration.bases import JointBases
from kvjax.cache.codecs.low_rank import FromTable
from kvjax.cache.codecs.recent import ExactWindow
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _bytes(x: Sizes) -> Bytes:
    """Half of all channels for keys, a quarter for values; an exact window of 3, and a place for the next token."""
    channels = x.K * x.H // 2 + x.K * x.H // 4
    rows = x.B * x.S * channels * x.itemsize
    bases = 4 * x.K * x.H * (channels + 2)
    window = 2 * x.rows(3 + 1) + 2 * x.per_row()
    return Bytes(rows + bases + window + x.positions(x.S) + x.per_row())


@recipe(
    "CSKV, Wang et al. 2024, arXiv 2409.10593, section 2; constants of its authors' code",
    Trial("cskv:keys=0.5,values=0.25,window=3", "cskv:keys=1,values=1,window=3", _bytes),
    formula="held: c = A (k - mean), k before RoPE and of all heads; k' = RoPE(A^T c + mean), values likewise; the "
    "last 32 tokens exact",
    differs="The authors train A and B on the hidden states, from a decomposition of the weights; here B = A^T is an "
    "orthonormal basis of the keys themselves, as `kvjax calibrate` finds it. Their code forgets the exact tokens 32 "
    "at a time, here each leaves by itself. Without their quantisation.",
    example="cskv",
    family="fewer numbers per vector",
)
def cskv(keys: float = 0.5, values: float = 0.5, window: int = 32, table: str = "shipped") -> Method:
    """All tokens as coordinates that the heads of a layer have in common; the newest tokens are exact as well.

    keys, values: directions that are held, a share of all heads' channels together (the authors' code: half). window:
    so many last tokens are read exactly, the newest included (32). table: the file of `kvjax calibrate joint_bases`, by
    default those that ship with kvjax. Keys are held without their rotation. A prompt attends
    exactly.
    """
    bases = JointBases.given(table)
    k, v = FromTable(0, table=bases, of="bare_keys", share=keys), FromTable(0, table=bases, share=values)
    return Method(k=ExactWindow(k, window), v=ExactWindow(v, window))
