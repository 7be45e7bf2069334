"""KIVI: keys and values in groups of few bits."""

from __future__ import annotations

from kvjax.cache.hold import groups_fused  # noqa: F401 (registers the kernel for these codes)
from kvjax.cache.hold.groups import Kivi
from kvjax.cache.method import Method
from kvjax.cache.read.full import Full
from kvjax.methods.catalogue import recipe


@recipe("KIVI, Liu et al. 2024, arXiv 2402.02750; one bit: SpeCache, arXiv 2503.16163, section 3.4")
def kivi(
    bits: int = 2, group: int = 32, residual: int = 128, one_bit: str = "improved", kernel: str = "auto"
) -> Method:
    """Keys in groups of tokens per channel and values in groups of channels per token, in 1, 2, 4 or 8 bits.

    group: elements that share a scale and a minimum (the paper: 32). residual: recent tokens in full precision (the
    paper: 128). one_bit: levels of one-bit codes, "improved" (SpeCache, eq. 3) or "original" (KIVI's rule). Attention
    in the prompt is exact; a residual as long as prompt and answer makes all of it exact. kernel: "auto", "xla" or
    "pallas", see `readers.Full`.
    """
    low = lambda axis: Kivi(bits, group, axis, residual, one_bit)  # noqa: E731
    return Method(k=low("channel"), v=low("token"), read=Full(kernel))
