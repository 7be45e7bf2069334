"""Attention to keys and values in codes of single tokens by one kernel, on NVIDIA GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs.per_token import PerTokenCodec, QuantizedTokens
from kvjax.cache.codecs.quantizers import FP8_DTYPES, Absmax, Fp8, MinMax
from kvjax.cache.protocol import LayerState
from kvjax.cache.readers.fused_kernels import FusedKernel, register_kernel
from kvjax.cache.storage import Codec, KVStorage
from kvjax.core import memory
from kvjax.core.kernels import token_attention
from kvjax.core.kernels.token_attention import TokenCodes
from kvjax.core.types import Array, Partial

MAX_QUERIES = 4
"""Queries of a head in one call. More, as of a chunk, are read faster by products with all numbers decoded once."""


def fits(storage: KVStorage) -> bool:
    """Whether keys and values are codes of single tokens that the kernel knows, in heads of a tile.

    The kernel knows windows, but neither a soft cap nor keys that are rotated when they are read.
    """
    k, v, spec = storage.k, storage.v, storage.spec
    bits = _num_bits(k), _num_bits(v)
    are_tiles = spec.head_dim == spec.value_dim and all(x and token_attention.fits(spec.head_dim, x) for x in bits)
    return are_tiles and spec.rule.soft_cap is None and storage.indexed_by is None


def read(storage: KVStorage, state: LayerState, q: Array, q_pos: Array) -> Partial:
    """Attends q [B K G T H] to all slots."""
    k, v = storage.k, storage.v
    assert isinstance(k, PerTokenCodec) and isinstance(v, PerTokenCodec)
    part = token_attention.attend(
        # An orthogonal rotation of queries and keys changes no dot product, so the keys stay rotated.
        k.apply_rotation(q).astype(q.dtype) if k.rotate else q,
        _codes(k, state.k),
        _codes(v, state.v),
        state.pos,
        q_pos,
        bits=(_num_bits(k), _num_bits(v)),
        window=storage.spec.rule.window,
        interpret=jax.default_backend() != "gpu",
    )
    return part._replace(o=v.apply_rotation(part.o)) if v.rotate else part


def _num_bits(codec: Codec) -> int:
    """Bits of a code; 0 where the kernel does not know the codec's codes."""
    quantizer = codec.quantizer if isinstance(codec, PerTokenCodec) else None
    if isinstance(quantizer, MinMax):
        return quantizer.bits
    return 8 if isinstance(quantizer, (Absmax, Fp8)) else 0


def _codes(codec: PerTokenCodec, stored: QuantizedTokens) -> TokenCodes:
    """The arrays that the kernel reads."""
    parts, quantizer = memory.map_buffers(memory.read_data, stored.parts), codec.quantizer
    if isinstance(quantizer, Fp8):
        data = lax.bitcast_convert_type(parts.bits, FP8_DTYPES[quantizer.kind])
        scale = jnp.ones(data.shape[:3], jnp.float32) if parts.scale is None else parts.scale[..., 0]
        return TokenCodes(data, scale, None)
    # Words hold codes from their lowest bits on, so that their bytes are in the order of the codes.
    data = lax.bitcast_convert_type(parts.codes, jnp.uint8)
    data, scale = data.reshape(*data.shape[:3], -1), parts.scale[..., 0]
    if isinstance(quantizer, Absmax):
        return TokenCodes(data, lax.bitcast_convert_type(scale, jnp.float32), None)
    assert isinstance(quantizer, MinMax)
    zero = jnp.uint32(2**quantizer.bits - 1)
    return TokenCodes(
        data, lax.bitcast_convert_type(scale & ~zero, jnp.float32), (scale & zero).astype(jnp.int32).astype(jnp.float32)
    )


register_kernel("gpu", FusedKernel(fits, read, MAX_QUERIES, reads_more=False))
