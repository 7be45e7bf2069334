"""Keys and values in 8 bits, each token's vector of a head by itself."""

from __future__ import annotations

from kvjax import method_api as kv
from kvjax.cache.codecs import per_token_kernel  # noqa: F401 (registers the kernel for these codes)
from kvjax.cache.codecs.quantizers import Absmax


@kv.register_method(family="quantization by token")
def int8() -> kv.Method:
    """Quantizes every token's key and value of a head to 8 bits with a scale of its own, once, when it arrives.

    Attention in the prompt is exact. A key or a value of head size H takes H + 4 bytes.

    Formula:
      s = max |x| / 127, code = round(x / s), x' = code s

    Differs:
      No difference from vLLM's int8_per_token_head is known.

    Reference:
      vLLM, kv_cache_dtype int8_per_token_head
    """
    codec = kv.PerTokenCodec(Absmax())
    return kv.Method(k=codec, v=codec)
