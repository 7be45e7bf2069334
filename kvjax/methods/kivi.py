"""KIVI: keys and values in groups of few bits."""

from __future__ import annotations

from typing import Literal

from kvjax import method_api as kv
from kvjax.cache.codecs import group_quant_kernel  # noqa: F401 (registers the kernel for these codes)


@kv.register_method(example="kivi:bits=2", family="quantization by channel and group")
def kivi(
    bits: int = 2,
    group: int = 32,
    residual: int = 128,
    one_bit: Literal["improved", "original"] = "improved",
    kernel: Literal["auto", "xla", "pallas"] = "auto",
    sinks: kv.NonNegativeInt = 0,
) -> kv.Method:
    """Quantizes keys in groups of tokens per channel and values in groups of channels per token, to 1, 2, 4 or 8 bits.

    Attention in the prompt is exact; a residual as long as prompt and answer makes all of it exact. Where heads keep
    unequal numbers of tokens, as in 'snapkv:budget=256 + adakv:page=32 + kivi', the prompt lies in pages, `group`
    divides a page, and all tokens of the prompt are quantized: the residual is of decoded tokens alone.

    Formula:
      code = round((x - min) / s), s = (max - min) / (2^bits - 1), x' = code s + min; a group is `group` tokens of a
      channel (keys) or `group` channels of a token (values)

    Differs:
      Every group consists of real tokens of its own sequence, never of padding; a residual is a multiple of a group.

    Args:
      bits: bits of a code (the paper: 2 or 4).
      group: elements that share a scale and a minimum (the paper: 32).
      residual: recent tokens in full precision (the paper: 128).
      one_bit: levels of one-bit codes, "improved" (SpeCache, eq. 3) or "original" (KIVI's rule).
      kernel: "auto", "xla" or "pallas", see `kvjax.method_api.Full`.
      sinks: first tokens that are stored exactly as well (the paper: none).

    Reference:
      KIVI, Liu et al. 2024, arXiv 2402.02750; one bit: SpeCache, arXiv 2503.16163, section 3.4
    """
    keys: kv.Codec = kv.Kivi(bits, group, "channel", residual, one_bit)
    values: kv.Codec = kv.Kivi(bits, group, "token", residual, one_bit)
    if sinks:
        keys, values = kv.ExactPrefix(keys, sinks), kv.ExactPrefix(values, sinks)
    return kv.Method(k=keys, v=values, read=kv.Full(kernel))
