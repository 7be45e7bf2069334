"""The exact cache, against which all others are held."""

from __future__ import annotations

from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Trial, everything


@recipe(
    "Vaswani et al. 2017, arXiv 1706.03762; Pope et al. 2022, arXiv 2211.05102",
    Trial("full", "full", everything),
    formula="out = softmax(q_t k_s / sqrt(H)) v_s over all s <= t",
    family="exact",
)
def full() -> Method:
    """All keys and values on the device, all of them read: the exact reference."""
    return Method()
