"""KVQuant: bare keys by channel and values by token, at uneven levels, with outliers and first tokens exact."""

from __future__ import annotations

import dataclasses

from kvjax.cache.codecs.exact_prefix import FirstExact
from kvjax.cache.codecs.nonuniform import LevelTable, NonUniformCodec
from kvjax.cache.codecs.outliers import ByChannel, ByToken, Outliers
from kvjax.cache.codecs.sparse import DenseAndSparse
from kvjax.cache.eviction.representatives import Count
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


class QuantileOutliers(Outliers):
    """What does not lie between the quantiles share / 2 and 1 - share / 2 of a vector: at least its two ends."""

    mean_of_all = False

    def on_a_side(self, length: Count) -> Count:
        return super().on_a_side(length - 1) + 1 if self.share else super().on_a_side(length)


@dataclasses.dataclass(frozen=True)
class ChannelQuantileOutliers(QuantileOutliers, ByChannel):
    """Outliers of each channel."""


@dataclasses.dataclass(frozen=True)
class TokenQuantileOutliers(QuantileOutliers, ByToken):
    """Outliers of each token."""


def _bytes(x: Sizes) -> Bytes:
    """Four bits a number; two outliers of every channel, of the prompt and of chunks of 4, and of every token."""
    chunks = 1 + x.S // 4
    codes = 2 * (x.B * x.K * x.S * x.H // 2 + x.rows(4) + 2 * x.per_row())
    keys = x.rows(2 * chunks) + x.B * x.K * 2 * chunks * x.H * (4 + x.itemsize)
    values = x.B * x.K * x.S * (2 * x.itemsize + 2 * (1 + x.itemsize))
    return Bytes(codes + keys + values + 2 * x.rows(1) + x.positions(x.S) + x.per_row())


@recipe(
    "KVQuant, Hooper et al. 2024, arXiv 2401.18079, section 3; constants of its authors' code",
    Trial("kvquant:every=4", "kvquant:every=4,first=100", _bytes),
    formula="per channel of K before RoPE, per token of V: outliers beyond the quantiles (1 -+ 0.99) / 2 exact; "
    "of the rest x' = level[code] h + m, h = (max - min) / 2, m = (max + min) / 2, code = the level nearest to "
    "(x - m) / h",
    differs="Ranges are those of each prompt and of chunks behind it, which wait as they came until they are full: the "
    "authors calibrate those of keys. A token's values are taken by head, not all heads together.",
    example="kvquant",
    sized_by="bits",
    family="quantization by channel and group",
)
def kvquant(bits: int = 4, outliers: float = 0.01, first: int = 1, every: int = 128, table: str = "") -> Method:
    """Uneven levels for what is common, and what is rare as it was: no number far from the others costs them precision.

    bits: 2, 3 or 4 (the authors'; also 8). outliers: the share that is held exactly, of each channel of the keys and of
    each token of the values, and never less than the two ends (0.01; with 0 there are none). first: so many first
    tokens are exact (1). every: decoded tokens stay as they came until so many are there, and get ranges of their own
    (unverified: no paper's). table: a file of levels that are made with kvjax.cache.codecs.nonuniform, for keys and
    values of each layer; without one they are those of NormalFloat (authors: by Fisher information). An outlier takes
    4 bytes beside itself in a key, and 1 in a value. Attention in the prompt is exact.
    """
    levels = LevelTable.given(table) if table else None
    keys = NonUniformCodec(bits, every, "channel", levels, "keys")
    values = NonUniformCodec(bits, every, "token", levels, "values")
    return Method(
        k=FirstExact(DenseAndSparse(keys, ChannelQuantileOutliers(outliers), pre_rope=True), first),
        v=FirstExact(DenseAndSparse(values, TokenQuantileOutliers(outliers)), first),
    )
