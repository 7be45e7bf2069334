"""The exact cache in host memory."""

from __future__ import annotations

from kvjax.cache.codecs.base import Host, Plain
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _bytes(x: Sizes) -> Bytes:
    return Bytes(x.positions(x.S) + x.per_row(), 2 * x.rows(x.S))


@recipe(
    "FlexGen, Sheng et al. 2023, arXiv 2303.06865; what transformers calls the offloaded cache",
    Trial("offload", "offload", _bytes),
    formula="out = softmax(q_t k_s / sqrt(H)) v_s over all s <= t, with k and v brought from the host layer by layer",
    family="exact",
)
def offload() -> Method:
    """All keys and values in pinned host memory, brought back layer by layer: exact, and slow by the bus."""
    return Method(k=Host(Plain()), v=Host(Plain()))
