"""Rows in even steps between their least and their greatest number, both held in half precision."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs.quantizers import Quantizer, step_size
from kvjax.core.types import Array, exportable


@exportable
class Even(NamedTuple):
    """A row in even steps."""

    codes: Array  # uint32[... words]
    ends: Array  # f16[... 2], the size of a step, and the least number


@dataclasses.dataclass(frozen=True)
class UniformQuantizer(Quantizer):
    """From a row's least to its greatest number in equal steps, both held in float16 (vLLM's values of TurboQuant).

    scale = max((max - min) / (2^bits - 1), 1e-8), code = floor((x - min) / scale + 1/2), x' = code * scale + min.
    """

    bits: int = 4

    def __post_init__(self):
        quant.check_bits(self.bits, quant.ROW_BITS)

    def check(self, H: int) -> None:
        quant.check_fills(H, self.bits)

    def encode(self, x: Array) -> Even:
        top = float(2**self.bits - 1)
        least = x.min(-1, keepdims=True)
        scale = step_size(x.max(-1, keepdims=True) - least, top, 1e-8)
        codes = jnp.clip(jnp.floor((x - least) / scale + 0.5), 0.0, top).astype(jnp.uint32)
        most = float(jnp.finfo(jnp.float16).max)
        ends = jnp.clip(jnp.concatenate([scale, least], -1), -most, most)
        return Even(quant.pack(codes, self.bits, -1), ends.astype(jnp.float16))

    def decode(self, coded: Even) -> Array:
        ends = coded.ends.astype(jnp.float32)
        return quant.codes_to_float(quant.unpack(coded.codes, self.bits, -1)) * ends[..., :1] + ends[..., 1:]
