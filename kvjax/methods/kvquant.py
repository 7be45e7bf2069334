"""KVQuant: pre-RoPE keys by channel, values by token, at non-uniform levels, with outliers and first tokens exact."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv
from kvjax.cache.codecs.chunk_quant import ChunkCodec, ChunkCodes, ChunkState, compute_if
from kvjax.cache.codecs.outliers import ChannelOutliers, Outliers, TokenOutliers

NORMAL_FLOAT_BITS = (2, 3, 4, 8)


@kv.register_table_kind("levels")
class LevelTable(kv.TableKind):
    """The levels of each layer's keys and values, both f32[2 2^bits], ascending in a range of -1..1.

    The first row assigns codes: each number gets that of the nearest level. The second is what a code stands for, which
    is the same unless Q-Norm changes it. `fit_levels` and `normalize_levels` make them from a model's keys and values,
    weighted by the squares of their gradients (Fisher information), which kvjax does not compute.
    """

    bits = 4  # of the example

    def example(self, spec: kv.LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        arrays = {}
        for name in ("keys", "values"):
            x = np.clip(rng.normal(size=2000) / 3, -1, 1)
            levels = fit_levels(x, rng.exponential(size=x.shape), self.bits)
            arrays[name] = np.stack([levels, normalize_levels(x, levels)]).astype(np.float32)
        return arrays


def fit_levels(x: np.ndarray, weight: np.ndarray, bits: int, num_iterations: int = 50) -> np.ndarray:
    """Fits levels to numbers by weighted k-means, which starts at evenly spaced quantiles (KVQuant, section 3.3).

    Args:
      x: a layer's keys or values in -1..1, divided by their ranges, without outliers.
      weight: the square of each number's gradient.
      bits: bits of the codes.
      num_iterations: iterations of k-means.

    Returns:
      f64[2^bits], ascending.
    """
    count = 2**bits
    if x.size < count:
        raise kv.KvjaxError(f"{count} levels need {count} numbers or more, got {x.size}; give more of them")
    x, weight = x.ravel().astype(np.float64), weight.ravel().astype(np.float64)
    levels = np.quantile(x, (np.arange(count) + 0.5) / count)
    for _ in range(num_iterations):
        code = np.searchsorted((levels[1:] + levels[:-1]) / 2, x, side="right")
        total = np.bincount(code, weight, count)
        mean = np.bincount(code, weight * x, count) / np.where(total > 0, total, 1)
        levels = np.sort(np.where(total > 0, mean, levels))
    return levels


def normalize_levels(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Applies Q-Norm: moves the levels, f64[2^bits], so that restored numbers have the mean and deviation of x."""
    restored = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x.ravel(), side="right")]
    return (levels - restored.mean()) * x.std() / max(restored.std(), 1e-12) + x.mean()


@functools.cache
def normal_float_levels(bits: int) -> np.ndarray:
    """Returns NormalFloat, f32[2^bits]: evenly spaced quantiles of a normal distribution, scaled to -1..1.

    It has 2^(bits - 1) levels from -1 to 0, and as many above 0 up to 1. The outermost quantiles are 0.0323 and 0.9677
    for any number of bits, as in KVQuant's code; of 4 bits these are the levels of NF4 (Dettmers et al. 2023,
    2305.14314).
    """
    half, outermost = 2 ** (bits - 1), (1 / 32 + 1 / 30) / 2
    below = [NormalDist().inv_cdf(p) for p in np.linspace(outermost, 0.5, half)]
    above = [NormalDist().inv_cdf(p) for p in np.linspace(0.5, 1 - outermost, half + 1)]
    levels = [x / -below[0] for x in below] + [x / above[-1] for x in above[1:]]
    return np.array(levels, np.float32)


@dataclasses.dataclass(frozen=True)
class NonUniformCodec(ChunkCodec):
    """Rounds numbers to the nearest of 2^bits levels between the ends of their channel, or of their token.

    With middle = (max + min) / 2 and half = (max - min) / 2: x' = level[code] half + middle, where level[code] is the
    nearest to (x - middle) / half (KVQuant, 2401.18079).

    Args:
      axis: "channel", a range for each channel of a prompt, or of a chunk; "token", one for each token of a head.
      given: a file of `LevelTable`; without one, NormalFloat.
      of: "keys" or "values", the levels of the table to take.
      spec: the layer, set by `at`.
    """

    axis: str = "channel"
    given: kv.TableFile | None = None
    of: str = "keys"
    spec: kv.LayerSpec | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.given is None:
            kv.bit_packing.check_bits(self.bits, NORMAL_FLOAT_BITS)

    def at(self, spec: kv.LayerSpec) -> kv.Codec:
        bound = dataclasses.replace(kv.bind_fields(self, spec), spec=spec.without_index)
        bound._levels()  # a table that does not fit raises here, when the method is bound
        return bound

    def quantize(self, x: kv.Array) -> ChunkCodes:
        over, y = (2 if self.axis == "channel" else 3), x.astype(jnp.float32)
        least, most = y.min(over, keepdims=True), y.max(over, keepdims=True)
        # Halves first, so that the sum of two large numbers does not overflow.
        half, middle = ((most / 2 - least / 2).astype(x.dtype), (most / 2 + least / 2).astype(x.dtype))
        reach = half.astype(jnp.float32)
        normalized = (y - middle.astype(jnp.float32)) / jnp.where(reach > 0, reach, 1.0)
        nearest = self._levels()[0]
        boundaries = jnp.asarray((nearest[:-1] + nearest[1:]) / 2)
        codes = jnp.searchsorted(boundaries, normalized, side="right", method="compare_all").astype(jnp.uint32)
        ends = jnp.concatenate([half, middle], -1)
        return ChunkCodes(codes, None, ends) if self.axis == "channel" else ChunkCodes(codes, ends, None)

    def restore(self, codes: kv.Array, own: kv.Array | None, shared: kv.Array | None) -> kv.Array:
        ends = shared if self.axis == "channel" else own
        assert ends is not None
        half, middle = jnp.split(ends.astype(jnp.float32), 2, -1)
        level = jnp.asarray(self._levels()[1])[codes.astype(jnp.int32)]
        return (level * half + middle).astype(ends.dtype)

    def _levels(self) -> np.ndarray:
        """Returns the two rows of levels, f32[2 2^bits]: see `LevelTable`."""
        if self.given is None:
            return np.stack([normal_float_levels(self.bits)] * 2)
        assert self.spec is not None
        return self.given.layer_arrays(self.spec, **{self.of: (2, 2**self.bits)})[self.of]


@kv.pytree
class DenseAndSparseState:
    """The codes of all slots, and the outliers that replace some of the restored numbers."""

    codes: ChunkState
    outliers: Any


@dataclasses.dataclass(frozen=True)
class DenseAndSparse(kv.Codec):
    """Stores X as codes of (X - S) and exact outliers S (KVQuant, 2401.18079, dense-and-sparse quantization).

    Numbers far from the others come back exactly, and widen no range.

    Args:
      codes: the codec of all numbers that are no outliers.
      outliers: the rule that finds S.
      pre_rope: whether it stores keys before RoPE, whose channels have stable ranges.
    """

    codes: ChunkCodec
    outliers: Outliers
    pre_rope: bool = False

    sequential_writes = True  # tokens of a chunk share their ranges, and are exact until it is full

    def num_committed(self, stored: DenseAndSparseState, n: kv.Array) -> kv.Array:
        return self.codes.num_committed(stored.codes, n)

    def encode(self, x: kv.Array, pos: kv.Array) -> DenseAndSparseState:
        real = jnp.broadcast_to(pos >= 0, x.shape[:3])
        x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))
        is_outlier, without_outliers = self.outliers.find(x, real)
        outliers = self.outliers.init_state(x, is_outlier, self.codes.every)
        return DenseAndSparseState(self.codes.encode(without_outliers, pos), outliers)

    def append(self, stored: DenseAndSparseState, x: kv.Array, at: kv.Array) -> DenseAndSparseState:
        """Quantizes a chunk that is full, then stores x [B K 0|1 H] exactly, at slot at i32[B 1]."""
        is_due = self.codes.is_due(stored.codes, at)
        if self.codes.num_chunks(stored.codes.slots):
            stored = self._append_chunk(stored, is_due)
        return dataclasses.replace(stored, codes=self.codes.append_recent(stored.codes, x, at))

    def _append_chunk(self, stored: DenseAndSparseState, is_due: kv.Array) -> DenseAndSparseState:
        """Quantizes the full chunks of the sequences that are due, bool[B]."""

        def quantize(x: kv.Array) -> tuple[ChunkCodes, Any]:
            is_outlier, without_outliers = self.outliers.find(x, jnp.ones(x.shape[:3], bool))
            listed = None if stored.outliers is None else self.outliers.list_outliers(x, is_outlier)
            return self.codes.encode_chunk(without_outliers), listed

        codes, listed = compute_if(is_due.any(), quantize, self.codes.recent_chunk(stored.codes))
        at = stored.codes.num_quantized[:, None]
        return DenseAndSparseState(
            self.codes.append_chunk(stored.codes, codes, is_due),
            self.outliers.add(stored.outliers, listed, at, self.codes.chunk_index(stored.codes, at), is_due),
        )

    def decode(self, stored: DenseAndSparseState) -> kv.Array:
        return self._insert_outliers(stored, self.codes.decode(stored.codes), None)

    def gather(self, stored: DenseAndSparseState, idx: kv.Array) -> kv.Array:
        return self._insert_outliers(stored, self.codes.gather(stored.codes, idx), idx)

    def _insert_outliers(self, stored: DenseAndSparseState, x: kv.Array, idx: kv.Array | None) -> kv.Array:
        """Inserts the outliers into tokens x [B K n H] of slots idx i32[B K n], or None for all, in order.

        Tokens that are no codes have theirs.
        """
        whole = self.outliers.insert(stored.outliers, x, idx)
        slot = jnp.arange(x.shape[2], dtype=jnp.int32)[None, None] if idx is None else idx
        return jnp.where((slot < stored.codes.num_quantized[:, None, None])[..., None], whole, x)


class QuantileOutliers(Outliers):
    """Outliers beyond the quantiles share / 2 and 1 - share / 2 of a vector, which are at least its two ends."""

    mean_of_all = False

    def num_per_side(self, length: kv.IntOrArray) -> kv.IntOrArray:
        return super().num_per_side(length - 1) + 1 if self.share else super().num_per_side(length)


@dataclasses.dataclass(frozen=True)
class ChannelQuantileOutliers(QuantileOutliers, ChannelOutliers):
    """Outliers of each channel."""


@dataclasses.dataclass(frozen=True)
class TokenQuantileOutliers(QuantileOutliers, TokenOutliers):
    """Outliers of each token."""


@kv.register_method(family="quantization by channel and group", sized_by="bits")
def kvquant(
    bits: int = 4, outliers: kv.UnitFloat = 0.01, first: kv.NonNegativeInt = 1, every: int = 128, table: str = ""
) -> kv.Method:
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
    return kv.Method(
        k=kv.ExactPrefix(DenseAndSparse(keys, ChannelQuantileOutliers(outliers), pre_rope=True), first),
        v=kv.ExactPrefix(DenseAndSparse(values, TokenQuantileOutliers(outliers)), first),
    )
