"""Group quantisation to 1, 2, 4 or 8 bits, and codes packed into 32-bit words."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from kvjax.core.types import Array
from kvjax.errors import KvjaxError

BITS = (1, 2, 4, 8)
ROW_BITS = (1, 2, 3, 4, 8)
"""Of codes that are packed along the whole of an axis: of 3 bits they do not lie side by side in a word."""

ONE_BIT = ("improved", "original")


def quantize(x: Array, bits: int, one_bit: str = "improved") -> tuple[Array, Array, Array]:
    """x [... g], a group per last axis -> (codes uint32[... g], scale [... 1], lo [... 1]); x' = code * scale + lo.

    KIVI's rule (Liu et al. 2024, arXiv 2402.02750, section 3.2): lo the minimum, scale = (max - min) / (2^bits - 1),
    the clamped quotient rounded half to even, every operation rounded to x's dtype. One bit, "improved": the levels
    are the midpoints of the lower and the upper half of [min, max] (SpeCache, eq. 3); the bit says in which half x
    lies, as the paper's text has it: its formula taken literally rounds a maximum to code 2. "original": KIVI's rule,
    with the levels min and max. A constant group has codes 0 and comes back exactly.
    """
    half = _rounder(x.dtype)
    y = x.astype(jnp.float32)
    lo, hi = y.min(-1, keepdims=True), y.max(-1, keepdims=True)
    span = half(jnp.minimum(hi - lo, float(jnp.finfo(x.dtype).max)))
    if bits == 1 and one_bit == "improved":
        codes = (y >= half(half(lo + hi) * 0.5)) & (span > 0)
        scale, lo = half(span * 0.5), half(half(half(lo + lo + lo) + hi) * 0.25)
        lo = jnp.where(span > 0, lo, hi)
    else:
        top = 2**bits - 1
        # By a bare constant XLA would not divide, but multiply by its rounded reciprocal.
        scale = half(span / jnp.where(span > 0, float(top), 1.0))
        safe = jnp.where(scale > 0, scale, 1.0)
        codes = jnp.where(scale > 0, jnp.round(jnp.clip(half(half(y - lo) / safe), 0.0, top)), 0.0)
    return codes.astype(jnp.uint32), scale.astype(x.dtype), lo.astype(x.dtype)


def dequantize(codes: Array, scale: Array, lo: Array) -> Array:
    """codes uint32[... g], scale and lo [... 1] or [... g] -> [... g] in scale's dtype, rounded per operation."""
    half = _rounder(scale.dtype)
    # The maximum changes nothing, but keeps product and sum from becoming one operation that rounds only once.
    product = jnp.maximum(half(number(codes) * scale.astype(jnp.float32)), 0.0)
    return half(product + lo.astype(jnp.float32)).astype(scale.dtype)


def number(codes: Array) -> Array:
    """uint32 codes as float32; through int32, which processors convert faster."""
    return lax.bitcast_convert_type(codes, jnp.int32).astype(jnp.float32)


def fill(bits: int) -> int:
    """The fewest codes that fill whole words."""
    return math.lcm(bits, 32) // bits


def check_clip(clip: float) -> None:
    """Raises KvjaxError for a share of a row's range that codes cannot span."""
    if not 0 < clip <= 1:
        raise KvjaxError(f"clip must lie in (0, 1], got {clip}; 1 lets all numbers of a row in")


def check_bits(bits: int, known: tuple[int, ...]) -> None:
    """Raises KvjaxError for a width of codes that is not known."""
    if bits not in known:
        near = min(known, key=lambda b: abs(b - bits))
        raise KvjaxError(f"bits must be one of {', '.join(map(str, known))}, got {bits}; the nearest is {near}")


def check_fills(H: int, bits: int) -> None:
    """Raises KvjaxError where a row of H codes does not fill whole words."""
    if H % fill(bits):
        raise KvjaxError(
            f"{bits}-bit codes fill 32-bit words {fill(bits)} at a time, and the head size {H} is no multiple of "
            "that; use more bits, or `kivi`, which packs along the tokens"
        )


def pack(codes: Array, bits: int, axis: int) -> Array:
    """uint32 codes -> words along `axis`: code j of a word at bit bits * j.

    Codes of 3 bits come as the words of all their lower two bits, and behind these the words of all their highest.
    """
    per = 32 // bits
    axis %= codes.ndim
    if bits == 3:
        return jnp.concatenate([pack(codes & 3, 2, axis), pack(codes >> 2, 1, axis)], axis)
    split = codes.reshape(*codes.shape[:axis], codes.shape[axis] // per, per, *codes.shape[axis + 1 :])
    return (split << _shifts(bits, axis + 1, split.ndim)).sum(axis + 1, dtype=jnp.uint32)


def unpack(words: Array, bits: int, axis: int) -> Array:
    """The codes of `pack`, uint32."""
    axis %= words.ndim
    if bits == 3:
        low, high = jnp.split(words, [words.shape[axis] * 2 // 3], axis)
        return unpack(low, 2, axis) | unpack(high, 1, axis) << 2
    wide = jnp.expand_dims(words, axis + 1)
    codes = (wide >> _shifts(bits, axis + 1, wide.ndim)) & jnp.uint32(2**bits - 1)
    return codes.reshape(*words.shape[:axis], -1, *words.shape[axis + 1 :])


def _shifts(bits: int, axis: int, ndim: int) -> Array:
    """Bit offsets within a word, along `axis` of `ndim`."""
    shape = [1] * ndim
    shape[axis] = 32 // bits
    return (jnp.arange(32 // bits, dtype=jnp.uint32) * bits).reshape(shape)


def _rounder(dtype):
    """Rounds a float32 result to a narrower dtype and back: one float32 operation so rounded is that dtype's own."""
    info = jnp.finfo(dtype)

    def narrow(x):
        return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)

    if info.nexp == 8:
        return narrow
    # Below the smallest normal number float16 goes on in equal steps, where reduce_precision gives zero.
    step, normal = float(info.smallest_subnormal), float(info.smallest_normal)
    return lambda x: jnp.where(jnp.abs(x) < normal, jnp.round(x / step) * step, narrow(x))
