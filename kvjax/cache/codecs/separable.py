"""Quantisation by token, after each channel has been divided by the root of its largest value."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs.chunk_quant import ChunkCodec, Coded
from kvjax.core.types import Array


@dataclasses.dataclass(frozen=True)
class SeparableTokenwise(ChunkCodec):
    """Channel-separable tokenwise quantisation (ZipCache, He et al. 2024, arXiv 2405.14256, its values).

    A channel is divided by the root of its greatest absolute value over the tokens; then each token of a head spans its
    own least to greatest number; what comes back is multiplied again. Two numbers per token, one per channel. A channel
    that is zero everywhere is not divided, and comes back as zero (the public code divides by it).
    """

    def quantize(self, x: Array) -> Coded:
        largest = jnp.abs(x.astype(jnp.float32)).max(2, keepdims=True)
        root = jnp.sqrt(largest).astype(x.dtype)
        codes, scale, lo = quant.quantize(x / jnp.where(root > 0, root, jnp.ones((), x.dtype)), self.bits)
        return Coded(codes, jnp.concatenate([scale, lo], -1), root)

    def restore(self, codes: Array, own: Array, shared: Array) -> Array:
        scale, lo = own[..., :1], own[..., 1:]
        return quant.dequantize(codes, scale, lo) * shared
