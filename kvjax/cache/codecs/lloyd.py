"""Rows by their length and their direction, whose numbers take the best levels for a normal distribution."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs.quantizers import Quantizer
from kvjax.core.types import Array, exportable


@exportable
class Direction(NamedTuple):
    """A row as the codes of its direction, and its length."""

    codes: Array  # uint32[... words]
    length: Array  # f16[... 1]


@dataclasses.dataclass(frozen=True)
class LloydMax(Quantizer):
    """A row over its length, each number at the nearest of 2^bits levels (TurboQuant, arXiv 2504.19874; vLLM's code).

    The levels are those of Lloyd and Max for N(0, 1/H), which the numbers of a rotated row of length 1 come near to.
    correct: the levels of a row are scaled to length 1 before they are multiplied by the row's own, so that a row keeps
    its length (vLLM's presets `_nc`). The length is a float16: 2 bytes beside the codes.
    """

    bits: int = 4
    correct: bool = True

    def __post_init__(self):
        quant.check_bits(self.bits, quant.ROW_BITS)

    def check(self, H: int) -> None:
        quant.check_fills(H, self.bits)

    def encode(self, x: Array) -> Direction:
        level = lloyd_max_levels(x.shape[-1], self.bits)
        between = jnp.asarray((level[:-1] + level[1:]) / 2)
        length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
        x = x / jnp.where(length > 0, length, 1.0)
        codes = jnp.searchsorted(between, x, side="right", method="compare_all").astype(jnp.uint32)
        most = float(jnp.finfo(jnp.float16).max)
        return Direction(quant.pack(codes, self.bits, -1), jnp.minimum(length, most).astype(jnp.float16))

    def decode(self, coded: Direction) -> Array:
        codes = quant.unpack(coded.codes, self.bits, -1)
        x = jnp.asarray(lloyd_max_levels(codes.shape[-1], self.bits))[codes.astype(jnp.int32)]
        if self.correct:
            x = x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-16)
        return x * coded.length.astype(jnp.float32)


@functools.cache
def lloyd_max_levels(H: int, bits: int) -> np.ndarray:
    """f32[2^bits], ascending: the levels of Lloyd and Max for N(0, 1/H), by vLLM's rule.

    They begin in the middles of equal cells between -3.5 and 3.5 standard deviations. Then each moves to the mean of
    its cell, which ends half-way to its neighbours, or at 10.5 deviations; over 200 trapezoids, until none moves by
    1e-10, at most 200 times.
    """
    far = 3.5 / np.sqrt(H)
    level = far * ((2 * np.arange(2**bits) + 1) / 2**bits - 1)
    share = np.ones(201)
    share[[0, -1]] = 0.5
    for _ in range(200):
        edges = np.concatenate([[-3 * far], (level[:-1] + level[1:]) / 2, [3 * far]])
        x = np.linspace(edges[:-1], edges[1:], 201)
        density = share[:, None] * np.exp(-(x**2) * H / 2)
        mean = (x * density).sum(0) / density.sum(0)
        if np.abs(mean - level).max() < 1e-10:
            break
        level = mean
    return level.astype(np.float32)
