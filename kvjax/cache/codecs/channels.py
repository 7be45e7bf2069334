"""Quantisation by channel: one minimum and one scale for each channel of a prompt, or of a chunk."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs.chunk_quant import ChunkCodec, Coded
from kvjax.core.types import Array


@dataclasses.dataclass(frozen=True)
class Channels(ChunkCodec):
    """Each channel of a head spans the least to the greatest value that its tokens have (ZipCache's keys, 2405.14256).

    Of H channels, two numbers each; nothing per token. A channel that is constant comes back exactly.
    """

    def quantize(self, x: Array) -> Coded:
        codes, scale, lo = quant.quantize(x.swapaxes(2, 3), self.bits)
        return Coded(codes.swapaxes(2, 3), None, jnp.concatenate([scale, lo], 2).swapaxes(2, 3))

    def restore(self, codes: Array, own: Array | None, shared: Array) -> Array:
        scale, lo = jnp.split(shared, 2, -1)
        return quant.dequantize(codes, scale, lo)
