"""Keys and values as floating-point numbers of 8 bits, each token's vector of a head by itself."""

from __future__ import annotations

from typing import Literal

from kvjax import method_api as kv
from kvjax.cache.codecs import per_token_kernel  # noqa: F401 (registers the kernel for these codes)


@kv.register_method(family="quantization by token")
def fp8(kind: Literal["e4m3", "e5m2"] = "e4m3", scaled: bool = True) -> kv.Method:
    """Quantizes every token's key and value of a head to 8-bit floats with a scale of its own, once, when it arrives.

    Attention in the prompt is exact. A key or a value of head size H takes H + 4 bytes, H without the scale.

    Formula:
      s = max |x| / 448, x' = e4m3(x / s) s

    Differs:
      The scale divides, where vLLM's kernel multiplies by its reciprocal: the last bit may differ.

    Args:
      kind: "e4m3", with three bits of mantissa (vLLM), or "e5m2", with two (SGLang offers both).
      scaled: whether a scale maps the largest number of a vector to the format's largest, 448 or 57,344. Without it
        numbers are cast as they are and saturate (vLLM's plain `fp8` with its default scale of 1).

    Reference:
      vLLM, kv_cache_dtype fp8_per_token_head, and fp8; the formats: Micikevicius et al. 2022, arXiv 2209.05433
    """
    codec = kv.PerTokenCodec(kv.Fp8(kind, scaled))
    return kv.Method(k=codec, v=codec)
