"""Rows in even steps around a whole number of steps: asymmetric codes with an integer zero point."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs.quantizers import Quantizer, step_size
from kvjax.core.types import Array, exportable

FARTHEST = 2.0**14
"""So many steps at most lie between zero and a row's codes: a zero point fits into 16 bits, and its scale is larger."""


@exportable
class Stepped(NamedTuple):
    """A row in even steps."""

    codes: Array  # uint32[... words]
    scale: Array  # bf16[... 1], the size of a step
    zero: Array  # i16[... 1], the code that stands for zero; it may lie outside of the codes


@dataclasses.dataclass(frozen=True)
class ZeroPointQuantizer(Quantizer):
    """From a row's least to its greatest number in equal steps, zero a whole number of steps away (RotateKV's code).

    With top = 2^bits - 1: scale = (clip max - clip min) / top, zero = round(-clip min / scale), code = round(x / scale)
    + zero, limited to 0..top, halves to even; x' = (code - zero) scale. clip: the share of min and of max that the
    codes span; of a row of one sign both ends so move towards zero. Takes 4 bytes beside the codes.
    """

    bits: int = 4
    clip: float = 1.0

    def __post_init__(self):
        quant.check_bits(self.bits, quant.ROW_BITS)
        quant.check_clip(self.clip)

    def check(self, H: int) -> None:
        quant.check_fills(H, self.bits)

    def encode(self, x: Array) -> Stepped:
        top = float(2**self.bits - 1)
        least, most = x.min(-1, keepdims=True) * self.clip, x.max(-1, keepdims=True) * self.clip
        size = jnp.maximum(jnp.abs(least), jnp.abs(most))
        scale = jnp.maximum(step_size(most - least, top, 1e-30), size / FARTHEST).astype(jnp.bfloat16)
        step = scale.astype(jnp.float32)
        zero = jnp.round(-least / step)
        codes = jnp.clip(jnp.round(x / step) + zero, 0.0, top).astype(jnp.uint32)
        return Stepped(quant.pack(codes, self.bits, -1), scale, zero.astype(jnp.int16))

    def decode(self, coded: Stepped) -> Array:
        steps = quant.codes_to_float(quant.unpack(coded.codes, self.bits, -1)) - coded.zero.astype(jnp.float32)
        return steps * coded.scale.astype(jnp.float32)
