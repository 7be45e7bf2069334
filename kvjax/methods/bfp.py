"""Accurate Block Quantization: keys and values in block floating point, the channels of keys sorted by their size."""

from __future__ import annotations

from kvjax.cache.codecs.ordered import SortedChannels
from kvjax.cache.codecs.per_token import Rows
from kvjax.cache.codecs.quantizers import BlockFloat
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _bytes(x: Sizes) -> Bytes:
    """With 4 bits a number, and an exponent for each block of 8."""
    mantissas_and_exponents = x.H // 2 + x.H // 8
    order = 4 * x.B * x.K * x.H
    return Bytes(2 * x.B * x.K * x.S * mantissas_and_exponents + order + x.positions(x.S) + x.per_row())


@recipe(
    "Accurate Block Quantization in LLMs with Outliers, Trukhanov & Soloveychik 2024, arXiv 2403.20137",
    Trial("bfp:block=8", "", _bytes),
    formula="channels of K in the order of |K_c| over the prompt; 2^e = the least power of two with "
    "max |x| <= (2^(bits - 1) - 1) 2^e over a block, x' = round(x / 2^e) 2^e",
    differs="The order comes from the prompt's keys after RoPE, for each text and head; in the paper it comes from the "
    "norms of the rows of W_k, once. Unverified, as no public code is known to us: how the paper holds values (here in "
    "the same format, unsorted), and that mantissas round halves to even.",
    example="bfp:block=8",
    family="quantization by token",
)
def bfp(bits: int = 4, block: int = 32, sort: bool = True) -> Method:
    """Blocks of channels share an exponent, and sorted channels of keys let outliers share it with their like.

    bits: of each mantissa with its sign, 2, 3, 4 or 8 (the paper's BFP12: 4, and 8 of the exponent). block: channels
    that share an exponent (the paper: 32 and 64 gain by sorting, and 128, which is the whole head there, does not).
    sort: whether keys are sorted. Attention in the prompt is exact. Takes H bits / 8 + H / block bytes per token, head,
    and each of key and value, and 4 H for the order of a head of size H.
    """
    rows = Rows(BlockFloat(bits, block))
    return Method(k=SortedChannels(rows) if sort else rows, v=rows)
