"""Codes whose levels lie in uneven steps: close together where numbers are many, or where they matter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from statistics import NormalDist

import jax.numpy as jnp
import numpy as np

from kvjax.cache.binding import bind_fields
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.calibration.table_kinds import TableKind, register_table_kind
from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs.base import Codec
from kvjax.cache.codecs.chunk_quant import ChunkCodec, ChunkCodes
from kvjax.cache.protocol import LayerSpec
from kvjax.core.types import Array
from kvjax.errors import KvjaxError

NORMAL_BITS = (2, 3, 4, 8)


@register_table_kind("levels")
class LevelTable(TableKind):
    """Of each layer the levels of keys and of values, both f32[2 2^bits], in a range of -1..1 and ascending.

    The first row says which numbers have the same code, those that are nearest to one level; the second, what a code
    stands for, which is the same unless Q-Norm changes it. `fit_levels` and `normalize_levels` make them from a
    model's keys and values, weighted by the squares of their gradients (Fisher information), which kvjax does not
    compute.
    """

    bits = 4  # of the example

    def example(self, spec: LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        found = {}
        for name in ("keys", "values"):
            x = np.clip(rng.normal(size=2000) / 3, -1, 1)
            levels = fit_levels(x, rng.exponential(size=x.shape), self.bits)
            found[name] = np.stack([levels, normalize_levels(x, levels)]).astype(np.float32)
        return found


@dataclasses.dataclass(frozen=True)
class NonUniformCodec(ChunkCodec):
    """Numbers at the nearest of 2^bits levels between the ends of a channel, or of a token (KVQuant, 2401.18079).

    With middle = (max + min) / 2 and half = (max - min) / 2: x' = level[code] half + middle, where level[code] is the
    nearest to (x - middle) / half. axis: "channel", a range for each channel of a prompt, or of a chunk; "token", one
    for each token's row of a head. given: a table of `LevelTable`, of which those of `of`; without one, NormalFloat.
    """

    axis: str = "channel"
    given: TableFile | None = None
    of: str = "keys"
    spec: LayerSpec | None = None  # of the layer, from `at`

    def __post_init__(self):
        super().__post_init__()
        if self.given is None:
            quant.check_bits(self.bits, NORMAL_BITS)

    def at(self, spec: LayerSpec) -> Codec:
        bound = dataclasses.replace(bind_fields(self, spec), spec=spec.without_index)
        bound._levels()  # a table that does not fit is told when the method is bound
        return bound

    def quantize(self, x: Array) -> ChunkCodes:
        over, y = (2 if self.axis == "channel" else 3), x.astype(jnp.float32)
        least, most = y.min(over, keepdims=True), y.max(over, keepdims=True)
        # Halves first, so that the sum of two large numbers stays one.
        half, middle = ((most / 2 - least / 2).astype(x.dtype), (most / 2 + least / 2).astype(x.dtype))
        reach = half.astype(jnp.float32)
        place = (y - middle.astype(jnp.float32)) / jnp.where(reach > 0, reach, 1.0)
        nearest = self._levels()[0]
        between = jnp.asarray((nearest[:-1] + nearest[1:]) / 2)
        codes = jnp.searchsorted(between, place, side="right", method="compare_all").astype(jnp.uint32)
        ends = jnp.concatenate([half, middle], -1)
        return ChunkCodes(codes, None, ends) if self.axis == "channel" else ChunkCodes(codes, ends, None)

    def restore(self, codes: Array, own: Array | None, shared: Array | None) -> Array:
        ends = shared if self.axis == "channel" else own
        assert ends is not None
        half, middle = jnp.split(ends.astype(jnp.float32), 2, -1)
        level = jnp.asarray(self._levels()[1])[codes.astype(jnp.int32)]
        return (level * half + middle).astype(ends.dtype)

    def _levels(self) -> np.ndarray:
        """f32[2 2^bits]: see `LevelTable`."""
        if self.given is None:
            return np.stack([normal_float_levels(self.bits)] * 2)
        assert self.spec is not None
        return self.given.layer_arrays(self.spec, **{self.of: (2, 2**self.bits)})[self.of]


@functools.cache
def normal_float_levels(bits: int) -> np.ndarray:
    """f32[2^bits]: NormalFloat, evenly spaced quantiles of a normal distribution, scaled to -1..1; 0 is one of them.

    2^(bits - 1) levels from -1 to 0 and as many behind these up to 1. The outermost quantiles are 0.0323 and 0.9677 for
    any number of bits, as in KVQuant's code; of 4 bits these are the levels of NF4 (Dettmers et al. 2023, 2305.14314).
    """
    half, outermost = 2 ** (bits - 1), (1 / 32 + 1 / 30) / 2
    below = [NormalDist().inv_cdf(p) for p in np.linspace(outermost, 0.5, half)]
    above = [NormalDist().inv_cdf(p) for p in np.linspace(0.5, 1 - outermost, half + 1)]
    levels = [x / -below[0] for x in below] + [x / above[-1] for x in above[1:]]
    return np.array(levels, np.float32)


def fit_levels(x: np.ndarray, weight: np.ndarray, bits: int, rounds: int = 50) -> np.ndarray:
    """f64[2^bits], ascending: levels for numbers x in -1..1 that matter by their weight, by rounds of k-means.

    KVQuant, section 3.3: x are a layer's keys or values over their ranges, without outliers, and the weights the
    squares of the gradients. The levels begin at evenly spaced quantiles of x.
    """
    count = 2**bits
    if x.size < count:
        raise KvjaxError(f"{count} levels need {count} numbers or more, got {x.size}; give more of them")
    x, weight = x.ravel().astype(np.float64), weight.ravel().astype(np.float64)
    levels = np.quantile(x, (np.arange(count) + 0.5) / count)
    for _ in range(rounds):
        code = np.searchsorted((levels[1:] + levels[:-1]) / 2, x, side="right")
        total = np.bincount(code, weight, count)
        mean = np.bincount(code, weight * x, count) / np.where(total > 0, total, 1)
        levels = np.sort(np.where(total > 0, mean, levels))
    return levels


def normalize_levels(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """f64[2^bits]: what codes stand for by Q-Norm, so that mean and deviation of what is held are those of x."""
    held = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x.ravel(), side="right")]
    return (levels - held.mean()) * x.std() / max(held.std(), 1e-12) + x.mean()
