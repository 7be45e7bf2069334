"""Keys and values in 8 bits, each token's vector of a head by itself."""

from __future__ import annotations

from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.quantizers import Absmax
from kvjax.cache.method import Method
from kvjax.registry.registration import register_method


@register_method(family="quantization by token")
def int8() -> Method:
    """Quantizes every token's key and value of a head to 8 bits with a scale of its own, once, when it arrives.

    Attention in the prompt is exact. A key or a value of head size H takes H + 4 bytes.

    Formula:
      s = max |x| / 127, code = round(x / s), x' = code s

    Differs:
      No difference from vLLM's int8_per_token_head is known.

    Reference:
      vLLM, kv_cache_dtype int8_per_token_head
    """
    codec = PerTokenCodec(Absmax())
    return Method(k=codec, v=codec)
