"""Group quantization to 1, 2, 4 or 8 bits, and the packing of codes into 32-bit words."""

from __future__ import annotations

import functools
import math
from typing import Annotated

import jax.numpy as jnp
from jax import lax

from kvjax.core.types import Array
from kvjax.errors import KvjaxError
from kvjax.utils.parameter_types import OneOf

BITS = (1, 2, 4, 8)
"""Widths of codes that lie side by side in a word."""

ROW_BITS = (1, 2, 3, 4, 8)
"""Widths of codes that are packed along a whole axis, which can split codes of 3 bits between words."""

RowBits = Annotated[int, OneOf(ROW_BITS)]
"""Such a width, as the type of a field."""


def quantize(x: Array, bits: int, one_bit: str = "improved") -> tuple[Array, Array, Array]:
    """Quantizes groups of numbers to evenly spaced levels between each group's minimum and maximum.

    KIVI's rule (Liu et al. 2024, arXiv 2402.02750, section 3.2): lo = min, scale = (max - min) / (2^bits - 1), and the
    code is the clamped quotient, rounded half to even. A constant group has codes 0 and is restored exactly.

    Args:
      x: [... g], one group per last axis. Every operation is rounded to its dtype, as in the authors' code.
      bits: 1, 2, 4 or 8.
      one_bit: levels of 1-bit codes. "improved": the midpoints of the lower and upper half of [min, max]; the bit says
        in which half x lies (SpeCache, eq. 3, as its text describes it: the formula taken literally rounds a maximum to
        code 2). "original": KIVI's rule, with the levels min and max.

    Returns:
      codes uint32[... g], scale [... 1] and lo [... 1]; `dequantize` computes codes * scale + lo.
    """
    round_ = _make_rounder(x.dtype)
    # Computed in float32 and rounded after each step: XLA may keep a chain of 16-bit operations in float32 on one
    # backend and not on another, and codes would differ by one at ties.
    y = x.astype(jnp.float32)
    lo, hi = y.min(-1, keepdims=True), y.max(-1, keepdims=True)
    # max - min can overflow the dtype to infinity, and the group would be restored as NaN.
    span = round_(jnp.minimum(hi - lo, float(jnp.finfo(x.dtype).max)))
    if bits == 1 and one_bit == "improved":
        codes = (y >= round_(round_(lo + hi) * 0.5)) & (span > 0)
        scale, lo = round_(span * 0.5), round_(round_(round_(lo + lo + lo) + hi) * 0.25)
        # A constant group: 3/4 lo + 1/4 hi is rounded, and would not restore the number itself.
        lo = jnp.where(span > 0, lo, hi)
    else:
        top = 2**bits - 1
        # XLA replaces a division by a bare constant with a product by its rounded reciprocal, which changes last bits.
        scale = round_(span / jnp.where(span > 0, float(top), 1.0))
        safe = jnp.where(scale > 0, scale, 1.0)
        codes = jnp.where(scale > 0, jnp.round(jnp.clip(round_(round_(y - lo) / safe), 0.0, top)), 0.0)
    return codes.astype(jnp.uint32), scale.astype(x.dtype), lo.astype(x.dtype)


def dequantize(codes: Array, scale: Array, lo: Array) -> Array:
    """codes uint32[... g], scale and lo [... 1|g] -> [... g] in scale's dtype, rounded after each operation."""
    round_ = _make_rounder(scale.dtype)
    # The maximum changes no value, but stops XLA from fusing product and sum into one operation that rounds only once.
    product = jnp.maximum(round_(codes_to_float(codes) * scale.astype(jnp.float32)), 0.0)
    return round_(product + lo.astype(jnp.float32)).astype(scale.dtype)


def _make_rounder(dtype):
    """Returns the rounding of a float32 result to `dtype`: it then equals that of the narrower operation itself."""
    info = jnp.finfo(dtype)
    reduce = functools.partial(lax.reduce_precision, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if info.nexp == 8:
        return reduce
    # Below its smallest normal number float16 continues in equal steps, where `reduce_precision` gives zero.
    step, normal = float(info.smallest_subnormal), float(info.smallest_normal)
    return lambda x: jnp.where(jnp.abs(x) < normal, jnp.round(x / step) * step, reduce(x))


def codes_to_float(codes: Array) -> Array:
    """uint32 codes as float32."""
    # Processors convert signed integers faster, and no code has the sign bit.
    return lax.bitcast_convert_type(codes, jnp.int32).astype(jnp.float32)


def split_blocks(x: Array, size: int) -> Array:
    """Splits vectors x [... H] into blocks [... H/size size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)  # no -1, which an empty x leaves undetermined


def pack(codes: Array, bits: int, axis: int) -> Array:
    """Packs uint32 codes into words along `axis`: code j of a word begins at bit bits * j.

    3-bit codes become the words of all their low two bits, followed by the words of all their high bits.
    """
    per_word = 32 // bits
    axis %= codes.ndim
    if bits == 3:
        return jnp.concatenate([pack(codes & 3, 2, axis), pack(codes >> 2, 1, axis)], axis)
    # The sum is an `or`: shifted codes have no bit in common.
    split = codes.reshape(*codes.shape[:axis], codes.shape[axis] // per_word, per_word, *codes.shape[axis + 1 :])
    return (split << _bit_offsets(bits, axis + 1, split.ndim)).sum(axis + 1, dtype=jnp.uint32)


def unpack(words: Array, bits: int, axis: int) -> Array:
    """Unpacks the words of `pack`: uint32 codes."""
    axis %= words.ndim
    if bits == 3:
        low, high = jnp.split(words, [words.shape[axis] * 2 // 3], axis)
        return unpack(low, 2, axis) | unpack(high, 1, axis) << 2
    # All codes of a word by one broadcast shift: XLA fuses it with the arithmetic that reads them.
    wide = jnp.expand_dims(words, axis + 1)
    codes = (wide >> _bit_offsets(bits, axis + 1, wide.ndim)) & jnp.uint32(2**bits - 1)
    return codes.reshape(*words.shape[:axis], words.shape[axis] * (32 // bits), *words.shape[axis + 1 :])


def _bit_offsets(bits: int, axis: int, ndim: int) -> Array:
    """The bit at which each code of a word begins, along `axis` of `ndim` axes."""
    shape = [1] * ndim
    shape[axis] = 32 // bits
    return (jnp.arange(32 // bits, dtype=jnp.uint32) * bits).reshape(shape)


def codes_in_whole_words(bits: int) -> int:
    """The smallest number of codes that fills whole words."""
    return math.lcm(bits, 32) // bits


def check_bits(bits: int, known: tuple[int, ...]) -> None:
    """Raises KvjaxError for an unknown width of codes."""
    if bits not in known:
        near = min(known, key=lambda b: abs(b - bits))
        raise KvjaxError(f"bits must be one of {', '.join(map(str, known))}, got {bits}; the nearest is {near}")


def check_fills(H: int, bits: int) -> None:
    """Raises KvjaxError where H codes do not fill whole words."""
    num_codes = codes_in_whole_words(bits)
    if H % num_codes:
        raise KvjaxError(
            f"{bits}-bit codes fill 32-bit words {num_codes} at a time, and the head size {H} is no multiple of that; "
            "use more bits, or `kivi`, which packs along the tokens"
        )


def check_divides(name: str, size: int, H: int) -> None:
    """Raises KvjaxError where groups of `size` channels do not divide the head size; `name` is the parameter's."""
    if H % size:
        near = min((n for n in range(1, H + 1) if H % n == 0), key=lambda n: abs(n - size))
        raise KvjaxError(f"{name} {size} does not divide the head size {H}; the nearest that does is {near}")
