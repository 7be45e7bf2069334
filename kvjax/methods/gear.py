"""GEAR: few bits, and the error of the codes as outliers and a matrix of low rank."""

from __future__ import annotations

from kvjax.cache.codecs.chunk_quant import Channelwise, Tokenwise
from kvjax.cache.codecs.outliers import ChannelOutliers, TokenOutliers
from kvjax.cache.codecs.residual import LowRankResidual
from kvjax.cache.method import Method
from kvjax.methods.registry import register_method


@register_method(example="gear:bits=2", family="quantization by channel and group")
def gear(bits: int = 4, rank: int = 4, later: int = 2, share: float = 0.02, every: int = 20) -> Method:
    """Quantizes keys by channel and values by token, and adds their error as a low-rank matrix and exact outliers.

    Attention in the prompt is exact.

    Formula:
      X' = Q(X - S) + S + L; S: the 1 % largest and 1 % smallest of each channel of keys and each token of values; Q:
      min/max codes of the same vectors; L: the best matrix of rank r for X - Q - S, of each head

    Differs:
      L comes from eigenvectors of the error's products, not from power iteration on random numbers, and outliers are
      restored exactly, where the public code adds L to them too; values have outliers and scales for each head, not for
      all heads of a token; codes have 2^bits levels, where the code passes bits^2 - 1 steps. KIVI's groups are left
      out.

    Args:
      bits: bits of the codes (the paper: 4 or 2).
      rank: rank of the error's matrix for the prompt (the paper: 4).
      later: rank for each chunk of decoded tokens (the paper: 2).
      share: fraction of all numbers that are outliers (the paper: 2 %); a vector of fewer than 2 / share numbers has
        none.
      every: decoded tokens that stay exact until they fill a chunk and are quantized together (the paper's buffer: 20).

    Reference:
      GEAR, Kang et al. 2024, arXiv 2403.05527, section 4; its variant KCVT
    """
    return Method(
        k=LowRankResidual(Channelwise(bits, every), ChannelOutliers(share), rank, later),
        v=LowRankResidual(Tokenwise(bits, every), TokenOutliers(share), rank, later),
    )
