"""The exact cache in host memory."""

from __future__ import annotations

from kvjax import method_api as kv


@kv.register_method(family="exact")
def offload() -> kv.Method:
    """Stores all keys and values in pinned host memory and fetches them layer by layer: exact, and bound by the bus.

    Formula:
      out = softmax(q_t k_s / sqrt(H)) v_s over all s <= t, with k and v fetched from the host layer by layer

    Differs:
      FlexGen also schedules weights and activations and can quantize the cache; here the cache alone is offloaded.

    Reference:
      FlexGen, Sheng et al. 2023, arXiv 2303.06865; what transformers calls the offloaded cache
    """
    return kv.Method(k=kv.Host(kv.Plain()), v=kv.Host(kv.Plain()))
