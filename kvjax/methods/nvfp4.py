"""Keys and values as floats of 4 bits in blocks of 16 that share a float of 8 bits (NVIDIA's format NVFP4)."""

from __future__ import annotations

from kvjax import method_api as kv


@kv.register_method(example="nvfp4:block=8", family="quantization by token")
def nvfp4(
    block: int = 16, k_unit: kv.PositiveFloat = 1.0, v_unit: kv.PositiveFloat = 1.0, rotate: bool = False
) -> kv.Method:
    """Quantizes blocks of channels to 4-bit floats with a scale of 8 bits, each token once, when it arrives.

    Attention in the prompt is exact. A key or a value of head size H takes H / 2 + H / block bytes.

    Formula:
      s = e4m3(max |x| / (6 u)) u over a block, x' = s e2m1(x / s), where e2m1 rounds to 0, 0.5, 1, 1.5, 2, 3, 4 or 6
      with a sign, and a tie to the even code; u is `k_unit` or `v_unit`

    Differs:
      From vLLM's nvfp4 and SGLang's in last bits: their kernels multiply by reciprocals. Numbers beyond 2,688 u take
      that value; a block whose largest is below 0.006 u is restored as zero.

    Args:
      block: channels that share a scale. NVFP4's are 16, and smaller ones serve heads that 16 does not divide.
      k_unit: what scales of keys are multiples of, the engines' scale of a layer's keys. Without a calibrated one
        theirs is 1 as well, and blocks with max |x| from 0.1 to 2,688 have their full precision.
      v_unit: the same of values.
      rotate: whether each block is multiplied by Hadamard's matrix over sqrt(block) first, which spreads outliers.

    Reference:
      vLLM, kv_cache_dtype nvfp4, and SGLang; the format: Pretraining Large Language Models with NVFP4, NVIDIA 2025,
      arXiv 2509.25149, section 2
    """

    def codec(unit: float) -> kv.Codec:
        fp4 = kv.Fp4(block, "e4m3", "even", unit)
        return kv.PerTokenCodec(fp4, "hadamard" if rotate else "", block if rotate else 0)

    return kv.Method(k=codec(k_unit), v=codec(v_unit))
