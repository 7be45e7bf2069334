"""Quantisation by token: one minimum and one scale for each token of a head, or for each group of its channels."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs.chunk_quant import ChunkCodec, Coded
from kvjax.core.types import Array
from kvjax.errors import KvjaxError


@dataclasses.dataclass(frozen=True)
class Tokens(ChunkCodec):
    """A token's row of a head spans its own least to greatest number (KCVT's values, in GEAR, 2403.05527; MiKV).

    group: so many neighbouring channels span their own; 0: the whole row. Two numbers per group.
    """

    group: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.group < 0:
            raise KvjaxError(f"group must be 1 or more channels, or 0 for a whole row, got {self.group}")

    def quantize(self, x: Array) -> Coded:
        codes, scale, lo = quant.quantize(self._in_groups(x), self.bits)
        return Coded(codes.reshape(x.shape), jnp.concatenate([scale[..., 0], lo[..., 0]], -1), None)

    def restore(self, codes: Array, own: Array, shared: None) -> Array:
        scale, lo = jnp.split(own[..., None], 2, 3)
        return quant.dequantize(self._in_groups(codes), scale, lo).reshape(codes.shape)

    def _in_groups(self, x: Array) -> Array:
        """[B K T H] -> [B K T H/group group]."""
        H = x.shape[3]
        group = self.group or H
        if H % group:
            near = min((n for n in range(1, H + 1) if H % n == 0), key=lambda n: abs(n - group))
            raise KvjaxError(f"group {group} does not divide the head size {H}; the nearest that does is {near}")
        return x.reshape(*x.shape[:3], H // group, group)
