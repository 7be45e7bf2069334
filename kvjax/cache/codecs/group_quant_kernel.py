"""Attention to KIVI's keys and values by one kernel, on NVIDIA GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.cache.codecs.group_quant import Kivi
from kvjax.cache.protocol import LayerState
from kvjax.cache.readers.fused_kernels import FusedKernel, register_kernel
from kvjax.cache.storage import KVStorage
from kvjax.core.attention import attend_dense, combine
from kvjax.core.kernels import packed_attention
from kvjax.core.types import Array, KVBlock, Partial


def fits(storage: KVStorage) -> bool:
    """Whether keys are quantized per channel and values per token, in equal bits, on the device, in heads of a tile.

    The kernel knows windows, but neither a soft cap nor values of another width than keys.
    """
    k, v, spec = storage.k, storage.v, storage.spec
    if not (isinstance(k, Kivi) and isinstance(v, Kivi)):
        return False
    is_tile = spec.head_dim == spec.value_dim and spec.head_dim in packed_attention.HEAD_DIMS
    are_codes = k.bits == v.bits and k.packed == v.packed == "tokens" and (k.axis, v.axis) == ("channel", "token")
    return is_tile and are_codes and spec.rule.soft_cap is None


def read(storage: KVStorage, state: LayerState, q: Array, q_pos: Array) -> Partial:
    """Attends q [B K G T H] to all slots: by the kernel where keys and values are both codes, else in plain JAX."""
    k, v, rule = storage.k, storage.v, storage.spec.rule
    assert isinstance(k, Kivi) and isinstance(v, Kivi)
    num_quantized = jnp.minimum(state.k.num_quantized, state.v.num_quantized)
    k_codes, v_codes = k.packed_codes(state.k), v.packed_codes(state.v)
    # Codes fill whole words and groups, so there may be more of them than slots, or fewer.
    S, num_codes = state.pos.shape[2], k_codes.words.shape[2] * k.per
    pos = jnp.pad(state.pos, [(0, 0), (0, 0), (0, max(num_codes - S, 0))], constant_values=-1)[:, :, :num_codes]
    interpret = jax.default_backend() != "gpu"
    body = packed_attention.attend(
        q, k_codes, v_codes, pos, q_pos, num_quantized, bits=k.bits, window=rule.window, interpret=interpret
    )
    # At most R + 1 tokens follow that are not codes in both, which is the size of the values' residual.
    slot = num_quantized[:, None, None] + jnp.arange(v.num_recent, dtype=jnp.int32)[None, None]
    idx = jnp.broadcast_to(jnp.minimum(slot, S - 1), (*q.shape[:2], v.num_recent))
    pos = jnp.where(slot < S, jnp.take_along_axis(state.pos, idx[:, : state.pos.shape[1]], 2), -1)
    newest = KVBlock(k.gather(state.k, idx), v.gather(state.v, idx), pos)
    return combine(body, attend_dense(q, newest, q_pos, rule))


register_kernel("gpu", FusedKernel(fits, read, max_queries=2))
