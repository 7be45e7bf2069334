"""Rows in small floating-point formats: numbers of eight bits, and blocks of numbers that share an exponent."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs.per_token import Quantizer, step_size
from kvjax.core.types import Array, exportable
from kvjax.errors import KvjaxError

EIGHT_BITS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@exportable
class Small(NamedTuple):
    """A row of numbers of eight bits each."""

    bits: Array  # uint8[... H]
    scale: Array | None  # f32[... 1]


@dataclasses.dataclass(frozen=True)
class Fp8(Quantizer):
    """Floating-point numbers of eight bits (Micikevicius et al. 2022, arXiv 2209.05433; vLLM's fp8 caches).

    kind: "e4m3", four bits of exponent and three of mantissa, up to 448; or "e5m2", up to 57,344. scaled: each row is
    divided by max(max |x| / 448, 1e-6), so that its largest number is the format's, and the scale takes 4 bytes;
    without it numbers are taken as they are. What exceeds the format takes its largest number.
    """

    kind: str = "e4m3"
    scaled: bool = True

    def __post_init__(self):
        if self.kind not in EIGHT_BITS:
            raise KvjaxError(f"kind must be one of {', '.join(EIGHT_BITS)}, got {self.kind!r}; vLLM's default is e4m3")

    def encode(self, x: Array) -> Small:
        dtype = EIGHT_BITS[self.kind]
        most = float(jnp.finfo(dtype).max)
        scale = step_size(jnp.abs(x).max(-1, keepdims=True), most) if self.scaled else None
        x = x if scale is None else x / scale
        return Small(lax.bitcast_convert_type(jnp.clip(x, -most, most).astype(dtype), jnp.uint8), scale)

    def decode(self, coded: Small) -> Array:
        x = lax.bitcast_convert_type(coded.bits, EIGHT_BITS[self.kind]).astype(jnp.float32)
        return x if coded.scale is None else x * coded.scale


@exportable
class Blocks(NamedTuple):
    """A row as blocks of mantissas."""

    mantissas: Array  # uint32[... words], each above the least one
    exponents: Array  # uint8[... H/block], biased by 127; 0 for a block of zeros


@dataclasses.dataclass(frozen=True)
class BlockFloat(Quantizer):
    """Blocks of neighbouring numbers share a power of two; each number has a mantissa of `bits` bits, sign included.

    The power 2^e is the least that lets the block's largest number in, the scale rounded up (Soloveychik et al. 2022,
    arXiv 2210.05470): with top = 2^(bits - 1) - 1, max |x| <= top 2^e. x' = round(x / 2^e) 2^e, halves to even. The
    exponent e takes 8 bits.
    """

    bits: int = 4
    block: int = 32

    def __post_init__(self):
        quant.check_bits(self.bits, quant.ROW_BITS[1:])
        if self.block < 1:
            raise KvjaxError(f"a block has at least 1 channel, got block={self.block}; the paper uses 32 and 64")

    def check(self, H: int) -> None:
        quant.check_fills(H, self.bits)
        if H % self.block:
            fits = [n for n in range(1, H + 1) if H % n == 0]
            near = min(fits, key=lambda n: abs(n - self.block))
            raise KvjaxError(f"block {self.block} does not divide the head size {H}; the nearest that does is {near}")

    @property
    def top(self) -> int:
        """The largest mantissa."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, x: Array) -> Blocks:
        blocks = self._split(x)
        part, exponent = jnp.frexp(jnp.abs(blocks).max(-1, keepdims=True))  # part 2^exponent, part in [1/2, 1)
        fits = part <= self.top / 2 ** (self.bits - 1)
        exponent = exponent - (self.bits - 1) + jnp.where(fits, 0, 1)
        stored = jnp.where(part > 0, jnp.clip(exponent + 127, 0, 254), 0).astype(jnp.uint8)
        power = jnp.where(stored > 0, _power(stored), 1.0)
        mantissas = jnp.clip(jnp.round(blocks / power), -self.top, self.top) + self.top
        words = quant.pack(mantissas.astype(jnp.uint32).reshape(x.shape), self.bits, -1)
        return Blocks(words, stored[..., 0])

    def decode(self, coded: Blocks) -> Array:
        mantissas = quant.number(quant.unpack(coded.mantissas, self.bits, -1)) - self.top
        return (self._split(mantissas) * _power(coded.exponents[..., None])).reshape(mantissas.shape)

    def _split(self, x: Array) -> Array:
        """[... H] -> [... H/block block]."""
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.block, self.block)


def _power(stored: Array) -> Array:
    """Stored exponents as powers of two, f32: they are the exponent's bits of a float32 number."""
    return lax.bitcast_convert_type(stored.astype(jnp.uint32) << 23, jnp.float32)
