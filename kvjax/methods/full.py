"""The exact cache, against which all others are held."""

from __future__ import annotations

from kvjax import method_api as kv


@kv.register_method(family="exact")
def full() -> kv.Method:
    """Stores all keys and values on the device and reads them all: the exact reference.

    Formula:
      out = softmax(q_t k_s / sqrt(H)) v_s over all s <= t

    Differs:
      None; it is exact attention.

    Reference:
      Vaswani et al. 2017, arXiv 1706.03762; Pope et al. 2022, arXiv 2211.05102
    """
    return kv.Method()
