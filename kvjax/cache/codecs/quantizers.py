"""Quantizers of one token vector at a time: integer codes, floats of 8 and 4 bits, blocks that share an exponent."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.codecs import bit_packing
from kvjax.core.types import Array, exportable
from kvjax.utils.abstract import abstract
from kvjax.utils.parameter_types import OneOf, PositiveFloat, PositiveInt, Within, check_fields

FP8_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


class Quantizer:
    """Quantizes each token vector by itself; a frozen dataclass with `encode` and `decode`.

    `PerTokenCodec` stores keys or values by it.
    """

    @abstract
    def encode(self, x: Array) -> Any:
        """Quantizes x f32[... H] to a pytree of arrays [... w], each of its own width."""
        ...

    @abstract
    def decode(self, coded: Any) -> Array:
        """Restores f32[... H]."""
        ...

    def check(self, H: int) -> None:
        """Raises KvjaxError for a head size that it cannot quantize."""


def step_size(span: Array, num_steps: float, least: float = 1e-6) -> Array:
    """`span` divided into `num_steps` equal steps; each is at least `least`."""
    # XLA replaces a division by a bare constant with a product by its rounded reciprocal, which changes last bits.
    return jnp.maximum(span / jnp.where(span > 0, num_steps, 1.0), least)


@exportable
class IntegerCodes(NamedTuple):
    """A token vector as integer codes."""

    codes: Array  # uint32[... H/per], packed along the vector
    scale: Array  # uint32[... 1], the bits of a float32 scale; `MinMax` puts its zero point into the lowest ones


@dataclasses.dataclass(frozen=True)
class MinMax(Quantizer):
    """Quantizes between the vector's minimum and maximum in equal steps, with zero among the levels.

    With top = 2^bits - 1: scale = max((max - min) / top, 1e-6), zero = -min / scale, code = x / scale + zero, both
    rounded half away from zero and clipped to 0..top; x' = (code - zero) * scale. This is vLLM's `int4_per_token_head`,
    except that the range of a vector of one sign is extended to zero (QuaRot), where vLLM's formula would clip it.

    Args:
      bits: 1, 2, 3, 4 or 8.
      clip: fraction of min and of max that the codes span, in (0, 1]; numbers outside take the nearest code (QuaRot).
    """

    bits: bit_packing.RowBits = 4
    clip: Annotated[float, Within("(0, 1]")] = 1.0

    __post_init__ = check_fields

    def check(self, H: int) -> None:
        bit_packing.check_fills(H, self.bits)

    def encode(self, x: Array) -> IntegerCodes:
        top = float(2**self.bits - 1)
        # Zero is a level, so that a channel without signal, and padding, are restored as zero.
        lo = jnp.minimum(x.min(-1, keepdims=True), 0.0) * self.clip
        hi = jnp.maximum(x.max(-1, keepdims=True), 0.0) * self.clip
        scale = step_size(hi - lo, top)
        zero = jnp.clip(_round_half_away(-lo / scale), 0.0, top)
        codes = jnp.clip(_round_half_away(x / scale + zero), 0.0, top).astype(jnp.uint32)
        # As in vLLM, the zero point replaces the scale's lowest bits: 4 bytes per vector in all, and the scale changes
        # by less than 2^(bits - 23) of itself.
        scale_bits = lax.bitcast_convert_type(scale, jnp.uint32) & ~self._zero_mask
        return IntegerCodes(bit_packing.pack(codes, self.bits, -1), scale_bits | zero.astype(jnp.uint32))

    def decode(self, coded: IntegerCodes) -> Array:
        zero = bit_packing.codes_to_float(coded.scale & self._zero_mask)
        scale = lax.bitcast_convert_type(coded.scale & ~self._zero_mask, jnp.float32)
        return (bit_packing.codes_to_float(bit_packing.unpack(coded.codes, self.bits, -1)) - zero) * scale

    @property
    def _zero_mask(self) -> Array:
        return jnp.uint32(2**self.bits - 1)


def _round_half_away(x: Array) -> Array:
    return jnp.sign(x) * jnp.floor(jnp.abs(x) + 0.5)


@dataclasses.dataclass(frozen=True)
class Absmax(Quantizer):
    """Quantizes to 8 bits symmetrically around zero: scale = max(max |x| / 127, 1e-6), code = x / scale.

    Codes are rounded half to even. This is vLLM's `int8_per_token_head`.
    """

    def check(self, H: int) -> None:
        bit_packing.check_fills(H, 8)

    def encode(self, x: Array) -> IntegerCodes:
        scale = step_size(jnp.abs(x).max(-1, keepdims=True), 127.0)
        # Offset by 128, because words hold unsigned codes.
        codes = jnp.clip(jnp.round(x / scale), -128.0, 127.0) + 128.0
        return IntegerCodes(
            bit_packing.pack(codes.astype(jnp.uint32), 8, -1), lax.bitcast_convert_type(scale, jnp.uint32)
        )

    def decode(self, coded: IntegerCodes) -> Array:
        scale = lax.bitcast_convert_type(coded.scale, jnp.float32)
        return (bit_packing.codes_to_float(bit_packing.unpack(coded.codes, 8, -1)) - 128.0) * scale


@exportable
class Fp8Numbers(NamedTuple):
    """A token vector as 8-bit floats."""

    bits: Array  # uint8[... H]
    scale: Array | None  # f32[... 1]


@dataclasses.dataclass(frozen=True)
class Fp8(Quantizer):
    """Rounds to 8-bit floats (Micikevicius et al. 2022, arXiv 2209.05433; vLLM's fp8 caches).

    Numbers beyond the format's largest are clipped to it.

    Args:
      kind: "e4m3", 4 bits of exponent and 3 of mantissa, up to 448; or "e5m2", up to 57,344.
      scaled: whether each vector is divided by max(max |x| / 448, 1e-6), which costs 4 bytes and makes its largest
        number that of the format.
    """

    kind: Literal["e4m3", "e5m2"] = "e4m3"
    scaled: bool = True

    __post_init__ = check_fields

    def encode(self, x: Array) -> Fp8Numbers:
        dtype = FP8_DTYPES[self.kind]
        largest = float(jnp.finfo(dtype).max)
        scale = step_size(jnp.abs(x).max(-1, keepdims=True), largest) if self.scaled else None
        x = x if scale is None else x / scale
        # Clipped first: e4m3 has no infinity, and the conversion would give NaN.
        return Fp8Numbers(lax.bitcast_convert_type(jnp.clip(x, -largest, largest).astype(dtype), jnp.uint8), scale)

    def decode(self, coded: Fp8Numbers) -> Array:
        x = lax.bitcast_convert_type(coded.bits, FP8_DTYPES[self.kind]).astype(jnp.float32)
        return x if coded.scale is None else x * coded.scale


@exportable
class BlockFloatNumbers(NamedTuple):
    """A token vector as blocks of mantissas with one exponent each."""

    mantissas: Array  # uint32[... words], packed, offset by the largest mantissa so that none is negative
    exponents: Array  # uint8[... H/block], biased by 127; 0 for a block of zeros


@dataclasses.dataclass(frozen=True)
class BlockFloat(Quantizer):
    """Blocks of neighboring numbers share a power of two (block floating point).

    The power 2^e is the smallest that covers the block's largest number, the scale rounded up (Soloveychik et al. 2022,
    arXiv 2210.05470): with top = 2^(bits - 1) - 1, max |x| <= top 2^e. x' = round(x / 2^e) 2^e, half to even.

    Args:
      bits: of each mantissa, sign included. The exponent of a block takes 8.
      block: channels that share an exponent.
    """

    bits: Annotated[int, OneOf(bit_packing.ROW_BITS[1:])] = 4
    block: PositiveInt = 32

    __post_init__ = check_fields

    def check(self, H: int) -> None:
        bit_packing.check_fills(H, self.bits)
        bit_packing.check_divides("block", self.block, H)

    @property
    def top(self) -> int:
        """The largest mantissa."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, x: Array) -> BlockFloatNumbers:
        blocks = bit_packing.split_blocks(x, self.block)
        fraction, exponent = jnp.frexp(jnp.abs(blocks).max(-1, keepdims=True))  # fraction in [1/2, 1)
        # `frexp` gives the power above the number; a fraction within the largest mantissa needs one less.
        fits = fraction <= self.top / 2 ** (self.bits - 1)
        exponent = exponent - (self.bits - 1) + jnp.where(fits, 0, 1)
        # 0 marks a block of zeros, and 255 would be infinity: `_power_of_two` reads the exponent as a float32's.
        biased = jnp.where(fraction > 0, jnp.clip(exponent + 127, 0, 254), 0).astype(jnp.uint8)
        power = jnp.where(biased > 0, _power_of_two(biased), 1.0)
        mantissas = jnp.clip(jnp.round(blocks / power), -self.top, self.top) + self.top
        words = bit_packing.pack(mantissas.astype(jnp.uint32).reshape(x.shape), self.bits, -1)
        return BlockFloatNumbers(words, biased[..., 0])

    def decode(self, coded: BlockFloatNumbers) -> Array:
        mantissas = bit_packing.codes_to_float(bit_packing.unpack(coded.mantissas, self.bits, -1)) - self.top
        return (bit_packing.split_blocks(mantissas, self.block) * _power_of_two(coded.exponents[..., None])).reshape(
            mantissas.shape
        )


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
"""The magnitudes of 4-bit floats with 2 bits of exponent and 1 of mantissa; code i has number i, and 8 is the sign."""


@exportable
class Fp4Numbers(NamedTuple):
    """A token vector as blocks of 4-bit floats with one scale each."""

    codes: Array  # uint32[... H/8], packed along the vector
    scales: Array  # uint8[... H/block], the bits of 8-bit floats


@dataclasses.dataclass(frozen=True)
class Fp4(Quantizer):
    """Blocks of neighboring numbers as 4-bit floats e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) with a scale of 8 bits.

    Args:
      block: channels that share a scale.
      scale: "e8m0", the least power of two with max |x| <= 6 scale, from 2^-127 on; or "e4m3", max |x| / 6 over `unit`
        as a float of 4 bits of exponent and 3 of mantissa. Numbers beyond 6 scales take that value.
      ties: of two codes that are equally near, "away" takes that of the larger magnitude, "even" the even code.
      unit: what scales are multiples of.
    """

    block: PositiveInt = 32
    scale: Literal["e8m0", "e4m3"] = "e8m0"
    ties: Literal["away", "even"] = "away"
    unit: PositiveFloat = 1.0

    __post_init__ = check_fields

    def check(self, H: int) -> None:
        bit_packing.check_fills(H, 4)
        bit_packing.check_divides("block", self.block, H)

    def encode(self, x: Array) -> Fp4Numbers:
        blocks = bit_packing.split_blocks(x, self.block)
        # Not by a bare constant, see `step_size`.
        largest = step_size(jnp.abs(blocks).max(-1, keepdims=True), 6.0, 0.0)
        if self.scale == "e8m0":
            fraction, exponent = jnp.frexp(largest)  # fraction in [1/2, 1)
            power = exponent - (fraction == 0.5).astype(jnp.int32)
            scales = jnp.where(fraction > 0, jnp.clip(power + 127, 0, 254), 0).astype(jnp.uint8)
        else:
            # Clipped first: e4m3 has no infinity, and the conversion would give NaN.
            dtype = FP8_DTYPES["e4m3"]
            stored = jnp.minimum(largest / self.unit, float(jnp.finfo(dtype).max)).astype(dtype)
            scales = lax.bitcast_convert_type(stored, jnp.uint8)
        step = self._step(scales)
        magnitude = jnp.where(step > 0, jnp.abs(blocks) / jnp.where(step > 0, step, 1.0), 0.0)
        # A tie between codes i and i + 1 goes up where i + 1 is what `ties` prefers.
        middles = (E2M1[1:] + E2M1[:-1]) / 2
        is_even = np.arange(1, 8) % 2 == 0
        bounds = middles if self.ties == "away" else np.where(is_even, middles, np.nextafter(middles, np.float32(7)))
        codes = jnp.searchsorted(jnp.asarray(bounds), magnitude, side="right", method="compare_all").astype(jnp.uint32)
        codes = codes | jnp.where(blocks < 0, jnp.uint32(8), jnp.uint32(0))
        return Fp4Numbers(bit_packing.pack(codes.reshape(x.shape), 4, -1), scales[..., 0])

    def decode(self, coded: Fp4Numbers) -> Array:
        numbers = jnp.asarray(np.concatenate([E2M1, -E2M1]))[bit_packing.unpack(coded.codes, 4, -1)]
        blocks = bit_packing.split_blocks(numbers, self.block)
        return (blocks * self._step(coded.scales[..., None])).reshape(numbers.shape)

    def _step(self, scales: Array) -> Array:
        """The float32 numbers that codes are multiples of."""
        if self.scale == "e8m0":
            return _power_of_two(scales)
        return lax.bitcast_convert_type(scales, FP8_DTYPES["e4m3"]).astype(jnp.float32) * self.unit


def _power_of_two(biased: Array) -> Array:
    """f32 powers of two: a biased exponent is the exponent field of that float32 number."""
    return lax.bitcast_convert_type(biased.astype(jnp.uint32) << 23, jnp.float32)


@functools.cache
def lloyd_max_levels(H: int, bits: int) -> np.ndarray:
    """Computes the Lloyd-Max levels of N(0, 1/H), f32[2^bits], ascending, by vLLM's rule.

    They start in the middles of equal cells between -3.5 and 3.5 standard deviations. Then each moves to the mean of
    its cell, which ends half-way to its neighbors, or at 10.5 deviations; means are integrals over 200 trapezoids. It
    stops when no level moves by 1e-10, or after 200 rounds.
    """
    far = 3.5 / np.sqrt(H)
    level = far * ((2 * np.arange(2**bits) + 1) / 2**bits - 1)
    trapezoid_weight = np.ones(201)
    trapezoid_weight[[0, -1]] = 0.5
    for _ in range(200):
        edges = np.concatenate([[-3 * far], (level[:-1] + level[1:]) / 2, [3 * far]])
        x = np.linspace(edges[:-1], edges[1:], 201)
        density = trapezoid_weight[:, None] * np.exp(-(x**2) * H / 2)
        mean = (x * density).sum(0) / density.sum(0)
        if np.abs(mean - level).max() < 1e-10:
            break
        level = mean
    return level.astype(np.float32)
