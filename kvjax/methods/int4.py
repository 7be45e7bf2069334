"""Keys and values in 4 bits, each token's vector of a head by itself."""

from __future__ import annotations

from kvjax import method_api as kv
from kvjax.cache.codecs import per_token_kernel  # noqa: F401 (registers the kernel for these codes)


@kv.register_method(family="quantization by token")
def int4(rotate: bool = True, clip: float = 1.0) -> kv.Method:
    """Quantizes every token's key and value of a head to 4 bits with a scale of its own, once, when it arrives.

    Attention in the prompt is exact. A key or a value of head size H takes H / 2 + 4 bytes.

    Formula:
      x = x0 M / sqrt(d) for a token vector x0 and the Hadamard matrix M; s = (max x - min x) / 15, z = round(-min x /
      s), code = round(x / s + z), x' = (code - z) s

    Differs:
      The range of a vector of one sign is extended to zero, as in QuaRot; vLLM's formula would clip it.

    Args:
      rotate: whether vectors are multiplied by a Hadamard matrix first, which spreads outliers (vLLM, QuaRot).
      clip: fraction of a vector's smallest and largest number that its codes span; numbers outside take the nearest
        code (QuaRot's clip ratio: 1 by default, which clips nothing).

    Reference:
      vLLM, kv_cache_dtype int4_per_token_head; rotation: QuaRot, Ashkboos et al. 2024, arXiv 2404.00456, section 3
    """
    codec = kv.PerTokenCodec(kv.MinMax(4, clip), "hadamard" if rotate else "")
    return kv.Method(k=codec, v=codec)
