"""The exact cache in host memory."""

from __future__ import annotations

from kvjax.cache.codecs.plain import Host, Plain
from kvjax.cache.method import Method
from kvjax.registry.registration import register_method


@register_method(family="exact")
def offload() -> Method:
    """Stores all keys and values in pinned host memory and fetches them layer by layer: exact, and bound by the bus.

    Formula:
      out = softmax(q_t k_s / sqrt(H)) v_s over all s <= t, with k and v fetched from the host layer by layer

    Differs:
      FlexGen also schedules weights and activations and can quantize the cache; here the cache alone is offloaded.

    Reference:
      FlexGen, Sheng et al. 2023, arXiv 2303.06865; what transformers calls the offloaded cache
    """
    return Method(k=Host(Plain()), v=Host(Plain()))
