"""Keys and values in 8 bits, each token's row of a head by itself."""

from __future__ import annotations

from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.quantizers import Absmax
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _bytes(x: Sizes) -> Bytes:
    codes_and_scale = x.H + 4
    return Bytes(2 * x.B * x.K * x.S * codes_and_scale + x.positions(x.S) + x.per_row())


@recipe(
    "vLLM, kv_cache_dtype int8_per_token_head",
    Trial("int8", "", _bytes),
    formula="s = max |x| / 127, code = round(x / s), x' = code s",
    example="int8",
    family="quantization by token",
)
def int8() -> Method:
    """Every token's key and value of a head in 8 bits with a scale of its own, and coded only once, when it comes.

    Attention in the prompt is exact. Takes H + 4 bytes per token, head, and each of key and value, of head size H.
    """
    return Method(k=PerTokenCodec(Absmax()), v=PerTokenCodec(Absmax()))
