"""KIVI: keys and values in groups of few bits."""

from __future__ import annotations

import math

from kvjax.cache.codecs import group_quant_kernel  # noqa: F401 (registers the kernel for these codes)
from kvjax.cache.codecs.group_quant import Kivi
from kvjax.cache.method import Method
from kvjax.cache.readers.full import Full
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def codes_bytes(x: Sizes, bits: int, group: int, residual: int) -> int:
    """Bytes of keys and values: words of codes, a scale and a minimum per group, and the recent tokens as they came.

    Codes have room for all whole residuals, in whole words and groups. A value stays recent one step longer than a key.
    Each of both counts its tokens in codes, per row.
    """
    whole = math.lcm(32 // bits, group)
    slots = max(-(-(x.S // residual * residual) // whole), 1) * whole
    numbers = x.B * x.K * slots * x.H
    recent = x.rows(residual) + x.rows(residual + 1)
    return 2 * (numbers * bits // 8 + 2 * (numbers // group) * x.itemsize + x.per_row()) + recent


def _trial(bits: int, group: int, residual: int, name: str = "") -> Trial:
    def count(x: Sizes) -> Bytes:
        return Bytes(codes_bytes(x, bits, group, residual) + x.positions(x.S) + x.per_row())

    text = f"kivi:bits={bits},group={group},residual="
    return Trial(f"{text}{residual}", f"{text}24", count, name=name)


def _bytes_in_pages(x: Sizes) -> Bytes:
    """Of six tokens a head in the mean, pages of 4 with 4 bits and groups of 4; what is decoded behind them."""
    pages = x.B * x.K * -(-(x.K * (6 + 3) // 4) // x.K)
    numbers = pages * 4 * x.H
    store = 2 * (numbers // 2 + 2 * (numbers // 4) * x.itemsize) + pages * (4 * 4 + 4)  # each slot's position, an owner
    decoded = x._replace(S=x.left(0))
    return Bytes(store + codes_bytes(decoded, 4, 4, 4) + x.positions(decoded.S) + x.per_row())


@recipe(
    "KIVI, Liu et al. 2024, arXiv 2402.02750; one bit: SpeCache, arXiv 2503.16163, section 3.4",
    _trial(4, 4, 4),
    _trial(2, 8, 8, "2 bits"),
    _trial(1, 4, 4, "1 bit"),
    Trial(
        "snapkv:budget=6,window=2,kernel=3 + adakv:page=4 + kivi:bits=4,group=4,residual=4",
        "",
        _bytes_in_pages,
        name="in pages",
    ),
    formula="code = round((x - min) / s), s = (max - min) / (2^bits - 1), x' = code s + min; a group is `group` "
    "tokens of a channel (keys) or `group` channels of a token (values)",
    differs="Every group is made of real tokens of its own row, never of padding; a residual is a multiple of a group.",
    example="kivi:bits=2",
    family="quantization by channel and group",
)
def kivi(
    bits: int = 2, group: int = 32, residual: int = 128, one_bit: str = "improved", kernel: str = "auto"
) -> Method:
    """Keys in groups of tokens per channel and values in groups of channels per token, in 1, 2, 4 or 8 bits.

    bits: of a code (the paper: 2 or 4). group: elements that share a scale and a minimum (the paper: 32). residual:
    recent tokens in full precision (the paper: 128). one_bit: levels of one-bit codes, "improved" (SpeCache, eq. 3) or
    "original" (KIVI's rule). kernel: "auto", "xla" or "pallas", see `kvjax.method_api.Full`. Attention in the prompt is
    exact; a residual as long as prompt and answer makes all of it exact. Where heads keep unequal numbers of tokens, as
    in 'snapkv:budget=256 + adakv:page=32 + kivi', the prompt lies in pages, `group` divides a page, and all of the
    prompt's tokens are codes: the residual is that of decoded tokens alone.
    """

    def low(axis):
        return Kivi(bits, group, axis, residual, one_bit)

    return Method(k=low("channel"), v=low("token"), read=Full(kernel))
