"""E8 and D4: rotated keys and values at the nearest points of the densest lattices in eight and four dimensions."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp

from kvjax import method_api as kv

MAX_FLOAT16 = float(jnp.finfo(jnp.float16).max)
LatticeBits = Annotated[int, kv.OneOf((2, 3, 4, 8))]
"""Bits of a channel: with fewer than two no point but the origin lies in the range."""


@kv.exportable
class LatticeCodes(NamedTuple):
    """Vectors as points of a lattice, eight or four channels each."""

    codes: kv.Array  # uint32[... words]
    scale: kv.Array  # f16[... 1], the lattice's unit


@dataclasses.dataclass(frozen=True)
class E8Lattice(kv.Quantizer):
    """Rounds blocks of eight channels to points of E8, at exactly `bits` bits a channel and one scale a vector.

    The points have coordinates that are all whole, or all whole and a half; their sum is even. The whole parts n of
    such a point have an even sum, so that the last one's lowest bit follows from the other seven: the bit that tells
    halves lies in its place. The largest number of a vector has the coordinate 2^(bits - 1) - 1, from which no nearest
    point lies outside the codes.
    """

    bits: LatticeBits = 3

    __post_init__ = kv.check_fields

    def check(self, H: int) -> None:
        if H % 8:
            raise kv.KvjaxError(f"E8 has blocks of 8 channels, and heads have {H}; use `int4`, whose codes are single")
        kv.bit_packing.check_fills(H, self.bits)

    def encode(self, x: kv.Array) -> LatticeCodes:
        top = 2.0 ** (self.bits - 1) - 1
        y, scale = _scale_to(x, top)
        whole, half = nearest_point(kv.bit_packing.split_blocks(y, 8))
        codes = (whole + (top + 1)).astype(jnp.uint32)  # top + 1 is even, which changes no parity
        last = codes[..., 7:] & ~jnp.uint32(1) | half.astype(jnp.uint32)
        codes = jnp.concatenate([codes[..., :7], last], -1).reshape(x.shape)
        return LatticeCodes(kv.bit_packing.pack(codes, self.bits, -1), scale)

    def decode(self, coded: LatticeCodes) -> kv.Array:
        codes = kv.bit_packing.unpack(coded.codes, self.bits, -1)
        blocks = kv.bit_packing.split_blocks(codes, 8)
        half = blocks[..., 7:] & 1
        parity = blocks[..., :7].sum(-1, keepdims=True, dtype=jnp.uint32) & 1
        whole = jnp.concatenate([blocks[..., :7], blocks[..., 7:] & ~jnp.uint32(1) | parity], -1)
        offset = kv.bit_packing.codes_to_float(half) * 0.5 - 2.0 ** (self.bits - 1)
        points = kv.bit_packing.codes_to_float(whole) + offset
        return points.reshape(codes.shape) * coded.scale.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class D4Lattice(kv.Quantizer):
    """Rounds blocks of four channels to points of D4, at exactly `bits` bits a channel and one scale a vector.

    The points have whole coordinates whose sum is even. With coordinates of -R to R they are the digits of a number to
    the odd base 2 R + 1, which is even where the sum of its digits is; half of it is the code. R is the largest whose
    codes have 4 `bits` bits.
    """

    bits: LatticeBits = 3

    __post_init__ = kv.check_fields

    @property
    def top(self) -> int:
        """R, the coordinate of a vector's largest number."""
        return {2: 1, 3: 4, 4: 9, 8: 151}[self.bits]

    def check(self, H: int) -> None:
        if H % 4:
            raise kv.KvjaxError(f"D4 has blocks of 4 channels, and heads have {H}; use `int4`, whose codes are single")
        kv.bit_packing.check_fills(H, self.bits)

    def encode(self, x: kv.Array) -> LatticeCodes:
        y, scale = _scale_to(x, self.top)
        points = _nearest_even_sum(kv.bit_packing.split_blocks(y, 4))
        first, *others = jnp.split((points + self.top).astype(jnp.uint32), 4, -1)
        base = 2 * self.top + 1
        others = others[0] + base * (others[1] + base * others[2])
        code = self.top * others + (first + others) // 2  # half of first + base others, which may need 33 bits
        codes = code >> self._bit_offsets(code.ndim) & (2**self.bits - 1)
        return LatticeCodes(kv.bit_packing.pack(codes.reshape(x.shape), self.bits, -1), scale)

    def decode(self, coded: LatticeCodes) -> kv.Array:
        codes = kv.bit_packing.unpack(coded.codes, self.bits, -1)
        blocks = kv.bit_packing.split_blocks(codes, 4)
        code = (blocks << self._bit_offsets(blocks.ndim)).sum(-1, keepdims=True, dtype=jnp.uint32)
        base = 2 * self.top + 1
        rest = code % base * 2
        wraps = (rest >= base).astype(jnp.uint32)
        others = code // base * 2 + wraps
        digits = [rest - base * wraps, others % base, others // base % base, others // base**2]
        points = kv.bit_packing.codes_to_float(jnp.concatenate(digits, -1)) - self.top
        return points.reshape(codes.shape) * coded.scale.astype(jnp.float32)

    def _bit_offsets(self, ndim: int) -> kv.Array:
        """Where the bits of a block's four channels begin in its code; ranks are not promoted by themselves."""
        offsets = jnp.arange(4, dtype=jnp.uint32) * self.bits
        return jnp.expand_dims(offsets, tuple(range(ndim - 1)))


def _scale_to(x: kv.Array, top: float) -> tuple[kv.Array, kv.Array]:
    """Scales vectors x f32[.. H] so that the largest number of each is `top`; also returns the scale, f16[.. 1]."""
    scale = kv.step_size(jnp.abs(x).max(-1, keepdims=True), top)
    scale = jnp.minimum(scale, MAX_FLOAT16).astype(jnp.float16)
    # Rounding the scale down would put the largest number outside.
    return jnp.clip(x / scale.astype(jnp.float32), -top, top), scale


def nearest_point(y: kv.Array) -> tuple[kv.Array, kv.Array]:
    """Finds the nearest points of E8 (Conway and Sloane 1982, algorithm 5).

    Args:
      y: f32[.. 8].

    Returns:
      The whole parts f32[.. 8] of the coordinates, and bool[.. 1]: whether a half is added to each.
    """
    whole, halves = _nearest_even_sum(y), _nearest_even_sum(y - 0.5)
    distances = (jnp.square(y - point).sum(-1, keepdims=True) for point in (whole, halves + 0.5))
    half = jnp.greater(*distances)
    return jnp.where(half, halves, whole), half


def _nearest_even_sum(y: kv.Array) -> kv.Array:
    """The nearest whole numbers f32[.. n] whose sum is even (Conway and Sloane 1982, algorithm 4)."""
    rounded = jnp.round(y)
    gap = y - rounded
    # Where the sum is odd, the number farthest from its rounded one takes the neighbor on its other side; a number that
    # is whole itself moves towards zero, so that no coordinate grows beyond the largest.
    farthest = jax.nn.one_hot(jnp.argmax(jnp.abs(gap), -1), y.shape[-1], dtype=jnp.float32)
    step = jnp.where(gap != 0, jnp.sign(gap), jnp.where(rounded > 0, -1.0, 1.0))
    is_odd = rounded.sum(-1, keepdims=True) % 2 != 0
    return rounded + jnp.where(is_odd, farthest * step, 0.0)


@kv.register_method(example="e8:k_bits=4", family="quantization by token")
def e8(
    k_bits: LatticeBits = 3,
    v_bits: LatticeBits = 2,
    sinks: kv.NonNegativeInt = 0,
    lattice: Literal["e8", "d4"] = "e8",
) -> kv.Method:
    """Rounds blocks of rotated channels to points of the lattices E8 or D4, each token once, when it arrives.

    Their cells are rounder than cubes: at the same bits the squared error of a fine lattice is 14% (E8) or 8% (D4)
    below that of equal steps. Codes of D4 leave fewer points unused: of normal numbers its error is 15% below E8's in 3
    bits and 9% in 4, and above it in 2 and 8. Attention in the prompt is exact. A key or a value of head size H takes
    H bits / 8 + 2 bytes.

    Formula:
      y = x H / (sqrt(d) s), s = max |x H / sqrt(d)| / R; each block of 8 becomes the nearest point of
      {n or n + 1/2: n whole, sum n even}, R = 2^(bits - 1) - 1; with d4, each block of 4 that of {n: n whole, sum n
      even}, R the largest with (2 R + 1)^4 / 2 <= 2^(4 bits): 1, 4, 9 or 151

    Differs:
      The points are those of kakeyalattice (Apache-2.0), which clips what leaves the range, where here no point does;
      its range q_range is R. It stores a norm and a largest number in 16 bits each. nexusquant-kv lets halves have any
      sum, has no D4, and codes keys before RoPE.

    Args:
      k_bits: bits of a key's number (nexusquant-kv: 3).
      v_bits: bits of a value's number (nexusquant-kv: 2).
      sinks: first tokens that are stored exactly (both packages: none).
      lattice: "e8", or "d4" (kakeyalattice 1.4's).

    Reference:
      Conway and Sloane, Fast quantizing and decoding algorithms for lattice quantizers and codes, IEEE Trans. Inf.
      Theory 28(2), 1982; packages kakeyalattice and nexusquant-kv
    """

    def codec(bits: int) -> kv.Codec:
        by_token = kv.PerTokenCodec(E8Lattice(bits) if lattice == "e8" else D4Lattice(bits), "hadamard")
        return kv.ExactPrefix(by_token, sinks) if sinks else by_token

    return kv.Method(k=codec(k_bits), v=codec(v_bits))
