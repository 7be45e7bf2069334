"""Keys and values as floats of 4 bits in blocks that share a power of two (the OCP format MXFP4)."""

from __future__ import annotations

from kvjax import method_api as kv


@kv.register_method(example="mxfp4:block=8", family="quantization by token")
def mxfp4(block: int = 32, rotate: bool = False) -> kv.Method:
    """Quantizes blocks of channels to 4-bit floats that share a power of two, each token once, when it arrives.

    Attention in the prompt is exact. A key or a value of head size H takes H / 2 + H / block bytes.

    Formula:
      s = 2^ceil(log2(max |x| / 6)) over a block, x' = s e2m1(x / s), where e2m1 rounds to 0, 0.5, 1, 1.5, 2, 3, 4 or 6
      with a sign, and a tie to the larger of the two

    Differs:
      From SGLang's fp4_e2m1 in the logarithm, which is exact here and rounded to float32 there, and in `block`, which
      is 16 there. The OCP standard rounds the power down, so that numbers between 6 and 8 scales take the value 6.

    Args:
      block: channels that share a power of two (OCP: 32).
      rotate: whether each block is multiplied by Hadamard's matrix over sqrt(block) first, which spreads outliers.

    Reference:
      OCP Microscaling Formats (MX) Specification 1.0; Rouhani et al. 2023, arXiv 2310.10537; SGLang, kv_cache_dtype
      fp4_e2m1
    """
    codec = kv.PerTokenCodec(kv.Fp4(block), "hadamard" if rotate else "", block if rotate else 0)
    return kv.Method(k=codec, v=codec)
