"""KVQuant: bare keys by channel and values by token, at uneven levels, with outliers and first tokens exact."""

from __future__ import annotations

import dataclasses

from kvjax.cache.codecs.exact_prefix import ExactPrefix
from kvjax.cache.codecs.nonuniform import LevelTable, NonUniformCodec
from kvjax.cache.codecs.outliers import ChannelOutliers, Outliers, TokenOutliers
from kvjax.cache.codecs.sparse import DenseAndSparse
from kvjax.cache.eviction.representatives import IntOrArray
from kvjax.cache.method import Method
from kvjax.methods.registry import register_method


class QuantileOutliers(Outliers):
    """What does not lie between the quantiles share / 2 and 1 - share / 2 of a vector: at least its two ends."""

    mean_of_all = False

    def num_per_side(self, length: IntOrArray) -> IntOrArray:
        return super().num_per_side(length - 1) + 1 if self.share else super().num_per_side(length)


@dataclasses.dataclass(frozen=True)
class ChannelQuantileOutliers(QuantileOutliers, ChannelOutliers):
    """Outliers of each channel."""


@dataclasses.dataclass(frozen=True)
class TokenQuantileOutliers(QuantileOutliers, TokenOutliers):
    """Outliers of each token."""


@register_method(family="quantization by channel and group", sized_by="bits")
def kvquant(bits: int = 4, outliers: float = 0.01, first: int = 1, every: int = 128, table: str = "") -> Method:
    """Quantizes to non-uniform levels, and stores outliers and the first tokens exactly.

    Keys are quantized by channel before RoPE, values by token. Attention in the prompt is exact. An outlier takes 4
    bytes besides its number in a key, and 1 in a value.

    Formula:
      per channel of K before RoPE, per token of V: outliers beyond the quantiles (1 -+ 0.99) / 2 exact; of the rest x'
      = level[code] h + m, h = (max - min) / 2, m = (max + min) / 2, code = the level nearest to (x - m) / h

    Differs:
      Ranges are those of each prompt and of chunks of decoded tokens, which stay exact until they are full, where the
      authors calibrate those of keys. A token's values are quantized by head, not all heads together.

    Args:
      bits: 2, 3 or 4 (the authors'; also 8).
      outliers: fraction stored exactly of each channel of the keys and of each token of the values, never less than the
        two extremes (the authors: 0.01; 0 for none).
      first: first tokens that are exact (the authors: 1).
      every: decoded tokens that stay exact until they fill a chunk with ranges of its own (unverified: in no paper).
      table: a file of kind `levels`, for keys and values of each layer; without one the levels are those of NormalFloat
        (the authors': by Fisher information).

    Reference:
      KVQuant, Hooper et al. 2024, arXiv 2401.18079, section 3; constants of its authors' code
    """
    levels = LevelTable.table_file(table) if table else None
    keys = NonUniformCodec(bits, every, "channel", levels, "keys")
    values = NonUniformCodec(bits, every, "token", levels, "values")
    return Method(
        k=ExactPrefix(DenseAndSparse(keys, ChannelQuantileOutliers(outliers), pre_rope=True), first),
        v=ExactPrefix(DenseAndSparse(values, TokenQuantileOutliers(outliers)), first),
    )
