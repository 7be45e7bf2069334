"""MatryoshkaKV: the coordinates of keys and values along the first directions of given bases."""

from __future__ import annotations

from kvjax.cache.calibration.bases import Bases
from kvjax.cache.codecs.low_rank import CalibratedLowRank
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _bytes(x: Sizes) -> Bytes:
    """A quarter of the channels for keys, half of them for values; a basis and a mean of each, in float32."""
    channels = x.H // 4 + x.H // 2
    rows = x.B * x.K * x.S * channels * x.itemsize
    bases = 4 * x.K * x.H * (channels + 2)
    return Bytes(rows + bases + x.positions(x.S) + x.per_row())


@recipe(
    "MatryoshkaKV, Lin et al. 2024, arXiv 2410.14731, section 3; keys after RoPE and centred, as in its authors' code",
    Trial("matryoshka:keys=0.25,values=0.5", "matryoshka:keys=1,values=1", _bytes),
    formula="held: c = U_r^T (k - mean) and d = W_s^T (v - mean); q k' = (U_r^T q) c + q mean, "
    "sum p v' = W_s sum p d + mean sum p",
    differs="One rank for all heads and layers, where the authors search one for each; `kvjax calibrate` gives the "
    "principal directions with which their training begins, and a trained orthogonal basis is given in the same way.",
    example="matryoshka",
    family="fewer numbers per vector",
)
def matryoshka(keys: float = 0.4, values: float = 0.4, table: str = "shipped") -> Method:
    """Each head's keys and values as coordinates along the first directions of orthonormal bases, which are given.

    keys, values: directions that are held, a share of the head size, rounded down, at least one (the paper: 40 % of the
    cache keep over 90 % of the quality). table: the file of `kvjax calibrate bases`, by default those that ship with
    kvjax. A query is projected once, and so is the mix of values; nothing is expanded. A prompt attends exactly.
    """
    bases = Bases.table_file(table)
    return Method(
        k=CalibratedLowRank(table=bases, of="keys", share=keys), v=CalibratedLowRank(table=bases, share=values)
    )
