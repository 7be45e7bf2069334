"""Rows in few bits: every token's row of a head is coded by itself as it comes, so it can go to any slot, or leave."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs import blockwise
from kvjax.cache.codecs.base import Codec
from kvjax.core import memory
from kvjax.core.gradients import refuse_gradient
from kvjax.core.types import Array, exportable, pytree
from kvjax.errors import KvjaxError


class Quantizer:
    """One row of numbers as a few short arrays. A quantiser is a frozen dataclass with `encode` and `decode`."""

    def encode(self, x: Array) -> Any:
        """x f32[... H] -> a tree of arrays [... w], each of a width of its own."""
        raise NotImplementedError

    def decode(self, coded: Any) -> Array:
        """What `encode` gave -> f32[... H]."""
        raise NotImplementedError

    def check(self, H: int) -> None:
        """Raises KvjaxError for a head size that it cannot code."""


@exportable
class Words(NamedTuple):
    """A row as integer codes."""

    codes: Array  # uint32[... H/per], words along the row
    scale: Array  # uint32[... 1], a float32 scale; its lowest bits may be used for more


@dataclasses.dataclass(frozen=True)
class MinMax(Quantizer):
    """From the row's least to its greatest number in equal steps, of which zero is one; vLLM's `int4_per_token_head`.

    With top = 2^bits - 1: scale = max((max - min) / top, 1e-6), zero = -min / scale, code = x / scale + zero, both
    rounded, halves away from zero, and clipped to 0..top; x' = (code - zero) * scale. A row of one sign has zero taken
    into its range (QuaRot), where vLLM's formula would clip it. As there, `zero` lies in the lowest bits of the stored
    scale, which is so changed by less than 2^(bits - 23) of itself: 4 bytes beside the codes. clip: the share of min
    and of max that the codes span, in (0, 1]; what lies outside takes the nearest code (QuaRot).
    """

    bits: int = 4
    clip: float = 1.0

    def __post_init__(self):
        quant.check_bits(self.bits, quant.ROW_BITS)
        quant.check_clip(self.clip)

    def check(self, H: int) -> None:
        quant.check_fills(H, self.bits)

    def encode(self, x: Array) -> Words:
        top = float(2**self.bits - 1)
        least = jnp.minimum(x.min(-1, keepdims=True), 0.0) * self.clip
        most = jnp.maximum(x.max(-1, keepdims=True), 0.0) * self.clip
        scale = step_size(most - least, top)
        zero = jnp.clip(_rounded(-least / scale), 0.0, top)
        codes = jnp.clip(_rounded(x / scale + zero), 0.0, top).astype(jnp.uint32)
        word = lax.bitcast_convert_type(scale, jnp.uint32) & ~self._low
        return Words(quant.pack(codes, self.bits, -1), word | zero.astype(jnp.uint32))

    def decode(self, coded: Words) -> Array:
        zero = quant.number(coded.scale & self._low)
        scale = lax.bitcast_convert_type(coded.scale & ~self._low, jnp.float32)
        return (quant.number(quant.unpack(coded.codes, self.bits, -1)) - zero) * scale

    @property
    def _low(self) -> Array:
        """The bits of the stored scale where `zero` lies."""
        return jnp.uint32(2**self.bits - 1)


@dataclasses.dataclass(frozen=True)
class Absmax(Quantizer):
    """Eight bits on either side of zero: scale = max(max |x| / 127, 1e-6), code = x / scale rounded half to even.

    vLLM's `int8_per_token_head`.
    """

    def check(self, H: int) -> None:
        quant.check_fills(H, 8)

    def encode(self, x: Array) -> Words:
        scale = step_size(jnp.abs(x).max(-1, keepdims=True), 127.0)
        codes = jnp.clip(jnp.round(x / scale), -128.0, 127.0) + 128.0
        return Words(quant.pack(codes.astype(jnp.uint32), 8, -1), lax.bitcast_convert_type(scale, jnp.uint32))

    def decode(self, coded: Words) -> Array:
        scale = lax.bitcast_convert_type(coded.scale, jnp.float32)
        return (quant.number(quant.unpack(coded.codes, 8, -1)) - 128.0) * scale


@pytree
class Coded:
    """The rows of all slots."""

    parts: Any  # what the quantiser makes of them: a tree of buffers [B K S w]
    H: int = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})  # that the rows came in


@dataclasses.dataclass(frozen=True)
class Rows(Codec):
    """Each row coded by itself in float32, once, when it comes.

    rotate: "", or "hadamard": rows are first multiplied by Sylvester's Hadamard matrix over the root of H, which
    spreads a large number over the whole row (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456). Rows stay as they are
    held where attention reads them: the query is turned instead of the keys, and the mix of values is turned back.
    """

    quantizer: Quantizer = MinMax()
    rotate: str = ""

    def __post_init__(self):
        if self.rotate not in ("", "hadamard"):
            raise KvjaxError(f"rotate must be '' or 'hadamard', got {self.rotate!r}")

    def encode(self, x: Array, pos: Array) -> Coded:
        self._check_head_dim(x.shape[3])
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        return Coded(jax.tree.map(memory.pack, self._coded(x)), x.shape[3], x.dtype.name)

    def decode(self, stored: Coded) -> Array:
        return self._plain(memory.map_buffers(memory.unpack, stored.parts), stored.dtype)

    def append(self, stored: Coded, x: Array, at: Array) -> Coded:
        parts = memory.map_buffers(lambda held, new: memory.append(held, new, at), stored.parts, self._coded(x))
        return dataclasses.replace(stored, parts=parts)

    def gather(self, stored: Coded, idx: Array) -> Array:
        return self._plain(memory.map_buffers(lambda held: memory.gather_tokens(held, idx), stored.parts), stored.dtype)

    def scores(self, q: Array, stored: Coded) -> Array:
        """A piece of heads and slots at a time, the query rotated once."""
        rows, slots = _rows_and_slots(stored)
        size = blockwise.size_of(rows, slots, stored.H)
        return blockwise.scores(self._turned(q), slots, size, self._piece_of(stored))

    def mix(self, p: Array, stored: Coded) -> Array:
        """A piece of heads and slots at a time, the mix rotated back once."""
        size = blockwise.size_of(*_rows_and_slots(stored), stored.H)
        return self._turned(blockwise.mix(p, stored.H, size, self._piece_of(stored)))

    def num_quantized(self, n: Array) -> Array:
        return n

    def _coded(self, x: Array) -> Any:
        """x [B K T H] -> the quantiser's arrays [B K T w]."""
        return self.quantizer.encode(self._turned(refuse_gradient(x, f"codes of {type(self.quantizer).__name__}")))

    def _plain(self, coded: Any, dtype: str) -> Array:
        """The quantiser's arrays -> the rows, as they came."""
        return self._turned(self.quantizer.decode(coded)).astype(dtype)

    def _piece_of(self, stored: Coded) -> blockwise.Decode:
        def piece(row: Array, rows: int, start: Array | int, count: int) -> Array:
            return self.quantizer.decode(
                memory.map_buffers(lambda held: memory.slice_tokens(held, row, rows, start, count), stored.parts)
            )

        return piece

    def _turned(self, x: Array) -> Array:
        """x [... H] rotated, float32; the rotation is its own inverse."""
        x = x.astype(jnp.float32)
        if not self.rotate:
            return x
        return jnp.einsum("...h,hj->...j", x, jnp.asarray(hadamard(x.shape[-1])), precision=lax.Precision.HIGHEST)

    def _check_head_dim(self, H: int) -> None:
        self.quantizer.check(H)
        if self.rotate and H & (H - 1):
            raise KvjaxError(
                f"Hadamard's matrix exists here for powers of two, and the head size is {H}; use rotate=false, which "
                "codes the rows as they are"
            )


def hadamard(H: int) -> np.ndarray:
    """f32[H H]: Sylvester's matrix, H_1 = 1 and H_2n = [[H_n, H_n], [H_n, -H_n]], over the root of H; H = 2^n."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < H:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.float32), matrix)
    return matrix / np.float32(np.sqrt(H))


def step_size(span: Array, steps: float, least: float = 1e-6) -> Array:
    """The size of one of so many steps, and not less than `least`."""
    # By a bare constant XLA would not divide, but multiply by its rounded reciprocal.
    return jnp.maximum(span / jnp.where(span > 0, steps, 1.0), least)


def _rounded(x: Array) -> Array:
    """To the nearest whole number, halves away from zero."""
    return jnp.sign(x) * jnp.floor(jnp.abs(x) + 0.5)


def _rows_and_slots(stored: Coded) -> tuple[int, int]:
    """B * K and S."""
    B, K, S, _ = jax.tree.leaves(stored.parts)[0].shape
    return B * K, S
