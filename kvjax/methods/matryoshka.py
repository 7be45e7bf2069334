"""MatryoshkaKV: the coordinates of keys and values along the first directions of given bases."""

from __future__ import annotations

from typing import Annotated

from kvjax import method_api as kv


@kv.register_method(family="fewer numbers per vector")
def matryoshka(
    keys: Annotated[float, kv.Within("(0, 1]")] = 0.4,
    values: Annotated[float, kv.Within("(0, 1]")] = 0.4,
    table: str = "shipped",
) -> kv.Method:
    """Stores each head's keys and values as coordinates along the first directions of given orthonormal bases.

    A query is projected once, and so is the weighted sum of values; nothing is expanded. Attention in the prompt is
    exact.

    Formula:
      stored: c = U_r^T (k - mean) and d = W_s^T (v - mean); q k' = (U_r^T q) c + q mean, sum p v' = W_s sum p d + mean
      sum p

    Differs:
      One rank serves all heads and layers, where the authors search one for each. `kvjax calibrate` gives the principal
      directions with which their training begins; a trained orthogonal basis is passed in the same way.

    Args:
      keys: directions stored of a key, as a fraction of the head size, rounded down, at least one (in the paper 40 % of
        the cache keep over 90 % of the quality).
      values: directions stored of a value, likewise.
      table: the file of `kvjax calibrate bases`; "shipped" for the tables that ship with kvjax.

    Reference:
      MatryoshkaKV, Lin et al. 2024, arXiv 2410.14731, section 3; keys after RoPE and centered, as in its authors' code
    """
    bases = kv.Bases.table_file(table)
    return kv.Method(
        k=kv.CalibratedLowRank(table=bases, of="keys", share=keys), v=kv.CalibratedLowRank(table=bases, share=values)
    )
