"""A codec that quantizes every token of every head by itself, so that tokens can be evicted and overwritten freely."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.codecs import bit_packing, blockwise
from kvjax.cache.codecs.quantizers import MinMax, Quantizer
from kvjax.cache.storage import Codec
from kvjax.core import memory
from kvjax.core.gradients import refuse_gradient
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError
from kvjax.utils.parameter_types import NonNegativeInt, check_fields


@pytree
class QuantizedTokens:
    """The token vectors of all slots, as a `PerTokenCodec` stores them."""

    parts: Any  # the quantizer's arrays: a pytree of buffers [B K S w]
    H: int = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})  # of the keys or values


@dataclasses.dataclass(frozen=True)
class PerTokenCodec(Codec):
    """Quantizes each token vector by itself, once, in float32.

    Args:
      quantizer: how one token vector is quantized.
      rotate: "", or "hadamard": vectors are first multiplied by Sylvester's Hadamard matrix over sqrt(H), which spreads
        an outlier over all channels (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456). They are stored rotated.
      rotated_block: neighboring channels of a head that are rotated together; 0 for all.
    """

    quantizer: Quantizer = MinMax()
    rotate: Literal["", "hadamard"] = ""
    rotated_block: NonNegativeInt = 0

    def __post_init__(self):
        check_fields(self)
        if not isinstance(self.quantizer, Quantizer):
            name = getattr(self.quantizer, "__name__", "")
            remedy = f"; give a value of it, {name}(..)" if name else ", as MinMax(bits=4)"
            raise KvjaxError(f"the quantizer of PerTokenCodec is a Quantizer, got {self.quantizer!r:.80}{remedy}")

    def count_rotated_channels(self, H: int) -> int:
        """Returns the number of neighboring channels of a head that are rotated together; 0 for none."""
        return (self.rotated_block or H) if self.rotate else 0

    def encode(self, x: Array, pos: Array) -> QuantizedTokens:
        H = x.shape[3]
        self.quantizer.check(H)
        width = self.count_rotated_channels(H)
        if width & (width - 1):
            raise KvjaxError(
                f"Hadamard's matrix exists here for powers of two, and {width} channels of a head of {H} would be "
                "rotated together; use rotate=false, which quantizes the vectors as they are"
            )
        # An empty slot is mixed with weight 0, and 0 times an infinity that padding may hold would be NaN.
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        coded = self._quantize(x)
        self._check_coded(coded, x.shape)
        return QuantizedTokens(jax.tree.map(memory.pack, coded), H, x.dtype.name)

    def decode(self, stored: QuantizedTokens) -> Array:
        return self._dequantize(memory.map_buffers(memory.unpack, stored.parts), stored.dtype)

    def append(self, stored: QuantizedTokens, x: Array, at: Array) -> QuantizedTokens:
        parts = memory.map_buffers(lambda buffer, new: memory.append(buffer, new, at), stored.parts, self._quantize(x))
        return dataclasses.replace(stored, parts=parts)

    def gather(self, stored: QuantizedTokens, idx: Array) -> Array:
        return self._dequantize(
            memory.map_buffers(lambda buffer: memory.gather_tokens(buffer, idx), stored.parts), stored.dtype
        )

    def scores(self, q: Array, stored: QuantizedTokens) -> Array:
        size, slots, decode = self._tiles(stored)
        # An orthogonal rotation of queries and keys changes no dot product, so the keys stay rotated.
        return blockwise.scores(self.apply_rotation(q), slots, size, decode)

    def mix(self, p: Array, stored: QuantizedTokens) -> Array:
        size, _, decode = self._tiles(stored)
        # The rotation is linear: one sum is rotated back instead of every value.
        return self.apply_rotation(blockwise.mix(p, stored.H, size, decode))

    def _quantize(self, x: Array) -> Any:
        """[B K T H] -> the quantizer's arrays [B K T w]."""
        x = refuse_gradient(x, f"codes of {type(self.quantizer).__name__}")
        return self.quantizer.encode(self.apply_rotation(x))

    def _check_coded(self, coded: Any, shape: tuple[int, ...]) -> None:
        """Raises KvjaxError where the quantizer's author returned other arrays than a codec can store and restore."""
        name = type(self.quantizer).__name__
        for array in jax.tree.leaves(coded):
            if jnp.shape(array)[:-1] != shape[:-1]:
                raise KvjaxError(
                    f"{name}.encode must return arrays [.. w] for vectors [.. H], here {[*shape[:-1], 'w']}, and "
                    f"returned one of shape {list(jnp.shape(array))}; keep an axis of 1 for one number of a vector "
                    "(keepdims=True), and constants in fields"
                )
        if 0 in shape:  # as in a cache whose tokens are all in pages: nothing of it is ever decoded
            return
        restored = jax.eval_shape(self.quantizer.decode, coded)
        if getattr(restored, "shape", None) != shape:
            returned = list(restored.shape) if hasattr(restored, "shape") else type(restored).__name__
            raise KvjaxError(
                f"{name}.decode must return the vectors [.. H], here {list(shape)}, and returned {returned}"
            )

    def _dequantize(self, coded: Any, dtype: str) -> Array:
        return self.apply_rotation(self.quantizer.decode(coded)).astype(dtype)

    def _tiles(self, stored: QuantizedTokens) -> tuple[blockwise.TileSize, int, blockwise.DecodeTile]:
        """The size of a tile, the number of slots, and the function that decodes a tile, still rotated."""
        B, K, S, _ = jax.tree.leaves(stored.parts)[0].shape

        def decode_tile(head: Array, num_heads: int, start: Array | int, count: int) -> Array:
            tile = memory.map_buffers(
                lambda buffer: memory.slice_tokens(buffer, head, num_heads, start, count), stored.parts
            )
            return self.quantizer.decode(tile)

        return blockwise.tile_size(B * K, S, stored.H), S, decode_tile

    def apply_rotation(self, x: Array) -> Array:
        """Rotates x [... H], in float32; the rotation is its own inverse."""
        x, width = x.astype(jnp.float32), self.count_rotated_channels(x.shape[-1])
        if not width:
            return x
        blocks = bit_packing.split_blocks(x, width)
        rotated = jnp.einsum("...h,hj->...j", blocks, jnp.asarray(hadamard(width)), precision=lax.Precision.HIGHEST)
        return rotated.reshape(x.shape)


def hadamard(H: int) -> np.ndarray:
    """f32[H H]: Sylvester's matrix over sqrt(H), for H a power of two: H_1 = 1, H_2n = [[H_n, H_n], [H_n, -H_n]].

    Raises:
      KvjaxError: for another H.
    """
    if H & (H - 1):
        raise KvjaxError(
            f"Hadamard's matrix exists here for powers of two, and heads have {H} channels; use `kivi`, which does not "
            "rotate"
        )
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < H:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.float32), matrix)
    return matrix / np.float32(np.sqrt(H))
