"""Accurate Block Quantization: keys and values in block floating point, the channels of keys sorted by their size."""

from __future__ import annotations

from kvjax.cache.codecs.ordered import SortedChannels
from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.quantizers import BlockFloat
from kvjax.cache.method import Method
from kvjax.methods.registry import register_method


@register_method(example="bfp:block=8", family="quantization by token")
def bfp(bits: int = 4, block: int = 32, sort: bool = True) -> Method:
    """Quantizes blocks of channels with a shared exponent; sorting the key channels puts outliers into common blocks.

    Attention in the prompt is exact. A token takes H bits / 8 + H / block bytes per head for a key and as many for a
    value, and the channel order 4 H bytes per head.

    Formula:
      channels of K in the order of |K_c| over the prompt; 2^e = the least power of two with max |x| <= (2^(bits - 1) -
      1) 2^e over a block, x' = round(x / 2^e) 2^e

    Differs:
      The order comes from the prompt's keys after RoPE, for each text and head; in the paper it comes once, from the
      norms of the rows of W_k. Unverified, as no public code is known: how the paper stores values (here in the same
      format, unsorted), and that mantissas round half to even.

    Args:
      bits: bits of each mantissa with its sign: 2, 3, 4 or 8 (the paper's BFP12: 4, with an exponent of 8).
      block: channels that share an exponent (in the paper 32 and 64 gain by sorting; 128, the whole head there, does
        not).
      sort: whether key channels are sorted.

    Reference:
      Accurate Block Quantization in LLMs with Outliers, Trukhanov & Soloveychik 2024, arXiv 2403.20137
    """
    rows = PerTokenCodec(BlockFloat(bits, block))
    return Method(k=SortedChannels(rows) if sort else rows, v=rows)
