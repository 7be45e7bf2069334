"""CSKV: a low-rank copy of all heads' keys and values together, beside an exact window."""

from __future__ import annotations

from kvjax.cache.calibration.bases import JointBases
from kvjax.cache.codecs.low_rank import CalibratedLowRank
from kvjax.cache.codecs.recent import ExactWindow
from kvjax.cache.method import Method
from kvjax.methods.registry import register_method


@register_method(family="fewer numbers per vector")
def cskv(keys: float = 0.5, values: float = 0.5, window: int = 32, table: str = "shipped") -> Method:
    """Stores all tokens as coordinates in a basis that the heads of a layer share; the newest tokens are also exact.

    Keys are stored without RoPE. Attention in the prompt is exact.

    Formula:
      stored: c = A (k - mean), k before RoPE and of all heads; k' = RoPE(A^T c + mean), values likewise; the last 32
      tokens exact

    Differs:
      The authors train A and B on the hidden states, from a decomposition of the weights; here B = A^T is an
      orthonormal basis of the keys themselves, as `kvjax calibrate` finds it. Their code drops the exact tokens 32 at a
      time, here one leaves per step. Their quantization is left out.

    Args:
      keys: directions stored of a key, as a fraction of all heads' channels together (the authors' code: half).
      values: directions stored of a value, likewise.
      window: last tokens that are read exactly, the newest included (the authors: 32).
      table: the file of `kvjax calibrate joint_bases`; "shipped" for the tables that ship with kvjax.

    Reference:
      CSKV, Wang et al. 2024, arXiv 2409.10593, section 2; constants of its authors' code
    """
    bases = JointBases.table_file(table)
    k, v = (
        CalibratedLowRank(0, table=bases, of="bare_keys", share=keys),
        CalibratedLowRank(0, table=bases, share=values),
    )
    return Method(k=ExactWindow(k, window), v=ExactWindow(v, window))
