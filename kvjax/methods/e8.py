"""E8: rotated keys and values at the nearest points of the densest lattice in eight dimensions."""

from __future__ import annotations

import dataclasses
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from kvjax import method_api as kv

MAX_FLOAT16 = float(jnp.finfo(jnp.float16).max)
LatticeBits = Annotated[int, kv.OneOf((2, 3, 4, 8))]
"""Bits of a channel: with fewer than two no point but the origin lies in the range."""


@kv.exportable
class LatticeCodes(NamedTuple):
    """Vectors as points of the lattice, eight channels each."""

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
        scale = kv.step_size(jnp.abs(x).max(-1, keepdims=True), top)
        scale = jnp.minimum(scale, MAX_FLOAT16).astype(jnp.float16)
        # Rounding the scale down would put the largest number outside.
        y = jnp.clip(x / scale.astype(jnp.float32), -top, top)
        whole, half = nearest_point(y.reshape(*y.shape[:-1], -1, 8))
        codes = (whole + (top + 1)).astype(jnp.uint32)  # top + 1 is even, which changes no parity
        last = codes[..., 7:] & ~jnp.uint32(1) | half.astype(jnp.uint32)
        codes = jnp.concatenate([codes[..., :7], last], -1).reshape(x.shape)
        return LatticeCodes(kv.bit_packing.pack(codes, self.bits, -1), scale)

    def decode(self, coded: LatticeCodes) -> kv.Array:
        codes = kv.bit_packing.unpack(coded.codes, self.bits, -1)
        blocks = codes.reshape(*codes.shape[:-1], -1, 8)
        half = blocks[..., 7:] & 1
        parity = blocks[..., :7].sum(-1, keepdims=True, dtype=jnp.uint32) & 1
        whole = jnp.concatenate([blocks[..., :7], blocks[..., 7:] & ~jnp.uint32(1) | parity], -1)
        offset = kv.bit_packing.codes_to_float(half) * 0.5 - 2.0 ** (self.bits - 1)
        points = kv.bit_packing.codes_to_float(whole) + offset
        return points.reshape(codes.shape) * coded.scale.astype(jnp.float32)


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
    """The nearest whole numbers f32[.. 8] whose sum is even."""
    rounded = jnp.round(y)
    gap = y - rounded
    # Where the sum is odd, the number farthest from its rounded one takes the neighbor on its other side; a number that
    # is whole itself moves towards zero, so that no coordinate grows beyond the largest.
    farthest = jax.nn.one_hot(jnp.argmax(jnp.abs(gap), -1), 8, dtype=jnp.float32)
    step = jnp.where(gap != 0, jnp.sign(gap), jnp.where(rounded > 0, -1.0, 1.0))
    is_odd = rounded.sum(-1, keepdims=True) % 2 != 0
    return rounded + jnp.where(is_odd, farthest * step, 0.0)


@kv.register_method(example="e8:k_bits=4", family="quantization by token")
def e8(k_bits: LatticeBits = 3, v_bits: LatticeBits = 2, sinks: kv.NonNegativeInt = 0) -> kv.Method:
    """Rounds blocks of eight rotated channels to the lattice E8, each token once, when it arrives.

    Its cells are rounder than cubes: at the same bits the squared error of a fine lattice is 14% below that of equal
    steps. Attention in the prompt is exact. A key or a value of head size H takes H bits / 8 + 2 bytes.

    Formula:
      y = x H / (sqrt(d) s), s = max |x H / sqrt(d)| / (2^(bits - 1) - 1); each block of 8 becomes the nearest point of
      {n or n + 1/2: n whole, sum n even}

    Differs:
      The points are those of kakeyalattice (Apache-2.0), which clips what leaves the range, where here no point does;
      its range q_range is 2^(bits - 1) - 1. It stores a norm and a largest number in 16 bits each. nexusquant-kv lets
      halves have any sum, and codes keys before RoPE.

    Args:
      k_bits: bits of a key's number (nexusquant-kv: 3).
      v_bits: bits of a value's number (nexusquant-kv: 2).
      sinks: first tokens that are stored exactly (both packages: none).

    Reference:
      Conway and Sloane, Fast quantizing and decoding algorithms for lattice quantizers and codes, IEEE Trans. Inf.
      Theory 28(2), 1982; packages kakeyalattice and nexusquant-kv
    """

    def codec(bits: int) -> kv.Codec:
        by_token = kv.PerTokenCodec(E8Lattice(bits), "hadamard")
        return kv.ExactPrefix(by_token, sinks) if sinks else by_token

    return kv.Method(k=codec(k_bits), v=codec(v_bits))
