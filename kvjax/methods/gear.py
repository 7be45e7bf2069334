"""GEAR: few bits, and the error of the codes as outliers and a matrix of low rank."""

from __future__ import annotations

from kvjax.cache.codecs.channels import Channels
from kvjax.cache.codecs.outliers import ByChannel, ByToken
from kvjax.cache.codecs.residual import LowRankResidual
from kvjax.cache.codecs.tokens import Tokens
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _bytes(x: Sizes) -> Bytes:
    """In 2 bits with ranks 2 and 1, an eighth of all numbers outliers on either side, chunks of 3 decoded tokens."""
    heads, number, chunks = x.B * x.K, x.itemsize, x.S // 3
    codes = 2 * heads * x.S * x.H * 2 // 8
    scales_and_minima = 2 * heads * number * (x.H * (1 + chunks) + x.S)  # of channels of keys, of tokens of values
    recent = 2 * heads * 3 * x.H * number
    coordinates_and_directions = 2 * heads * number * (x.S * 2 + x.H * 2 + chunks * x.H * 1)
    of_channels = heads * x.H * 2 * (x.S // 8) * (number + 4)  # a chunk of 3 tokens has none
    of_tokens = heads * x.S * 2 * (x.H // 8) * (number + 1)
    counts = 5 * x.per_row()  # slots in use; of keys and of values, those of the prompt and those in codes
    held = codes + scales_and_minima + recent + coordinates_and_directions + of_channels + of_tokens
    return Bytes(held + x.positions(x.S) + counts)


@recipe(
    "GEAR, Kang et al. 2024, arXiv 2403.05527, section 4; its variant KCVT",
    Trial("gear:bits=2,rank=2,later=1,share=0.25,every=3", "gear:bits=8,rank=32,later=32,every=3", _bytes),
    formula="X' = Q(X - S) + S + L; S: the 1 % largest and 1 % smallest of each channel of keys and each token of "
    "values; Q: min/max codes of the same vectors; L: the best matrix of rank r for X - Q - S, of each head",
    differs="L comes from eigenvectors of the error's products, not from power iteration on random numbers, and "
    "outliers come back as they were, where the public code adds L to them too; values have outliers and scales for "
    "each head, not for all heads of a token; codes have 2^bits levels, where the code passes bits^2 - 1 steps. KIVI's "
    "groups are left out.",
    example="gear:bits=2",
    family="quantization by channel and group",
)
def gear(bits: int = 4, rank: int = 4, later: int = 2, share: float = 0.02, every: int = 20) -> Method:
    """Keys by channel and values by token in few bits, what these miss as a matrix of low rank, and exact outliers.

    bits: of the codes (the paper: 4 or 2). rank, later: of the matrix for the prompt, and for each chunk of what is
    decoded (4 and 2). share: of all numbers, the outliers (2 %); a vector of fewer than 2 / share numbers has none.
    every: what is decoded stays exact until so many tokens have come, which become one chunk (the paper's buffer: 20).
    Attention in the prompt is exact.
    """
    return Method(
        k=LowRankResidual(Channels(bits, every), ByChannel(share), rank, later),
        v=LowRankResidual(Tokens(bits, every), ByToken(share), rank, later),
    )
