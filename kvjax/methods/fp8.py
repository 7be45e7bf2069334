"""Keys and values as floating-point numbers of 8 bits, each token's row of a head by itself."""

from __future__ import annotations

from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.quantizers import Fp8
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _bytes(x: Sizes) -> Bytes:
    numbers_and_scale = x.H + 4
    return Bytes(2 * x.B * x.K * x.S * numbers_and_scale + x.positions(x.S) + x.per_row())


@recipe(
    "vLLM, kv_cache_dtype fp8_per_token_head, and fp8; the formats: Micikevicius et al. 2022, arXiv 2209.05433",
    Trial("fp8", "", _bytes),
    formula="s = max |x| / 448, x' = e4m3(x / s) s",
    differs="The scale divides, where vLLM's kernel multiplies by its reciprocal: the last bit may differ.",
    example="fp8",
    family="quantization by token",
)
def fp8(kind: str = "e4m3", scaled: bool = True) -> Method:
    """Every token's key and value of a head in numbers of 8 bits with a scale of its own, coded once, when it comes.

    kind: "e4m3", with three bits of mantissa (vLLM), or "e5m2", with two (SGLang offers both). scaled: the scale lets a
    row's largest number be the format's largest, 448 or 57,344; without it numbers are taken as they are, and what
    exceeds the format takes its largest number (vLLM's plain `fp8` with its default scale of 1). Attention in the
    prompt is exact. Takes H + 4 bytes, or H, per token, head, and each of key and value, for a head size of H.
    """
    rows = PerTokenCodec(Fp8(kind, scaled))
    return Method(k=rows, v=rows)
