"""KIVI's codes read by one kernel, on NVIDIA GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.cache.codecs.group_quant import Kivi
from kvjax.cache.protocol import LayerState
from kvjax.cache.readers import fused_kernels
from kvjax.core.attention import attend_dense, combine
from kvjax.core.kernels import packed
from kvjax.core.types import Array, KVBlock, Partial

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer


def fits(k: Any, v: Any) -> bool:
    """Keys by channel and values by token, in equal bits, on the device."""
    both = isinstance(k, Kivi) and isinstance(v, Kivi)
    return both and k.bits == v.bits and k.packed == v.packed == "tokens" and (k.axis, v.axis) == ("channel", "token")


def read(layer: MethodLayer, state: LayerState, q: Array, q_pos: Array) -> Partial:
    """q [B K G T H] over all slots: what both hold as codes in the kernel, the newest R + 1 slots or so plainly."""
    k, v, window = layer.k, layer.v, layer.spec.window
    assert isinstance(k, Kivi) and isinstance(v, Kivi)
    settled = jnp.minimum(state.k.num_quantized, state.v.num_quantized)
    interpret = jax.default_backend() != "gpu"
    k_codes, v_codes = k.codes(state.k), v.codes(state.v)
    S = k_codes.words.shape[2] * k.per
    grow = max(S - state.pos.shape[2], 0)
    pos = jnp.pad(state.pos, [(0, 0), (0, 0), (0, grow)], constant_values=-1)[:, :, :S]
    body = packed.attend(q, k_codes, v_codes, pos, q_pos, settled, bits=k.bits, window=window, interpret=interpret)
    idx = settled[:, None, None] + jnp.arange(v.places, dtype=jnp.int32)[None, None]
    inside = idx < state.pos.shape[2]
    at = jnp.broadcast_to(jnp.minimum(idx, state.pos.shape[2] - 1), (*q.shape[:2], v.places))
    pos = jnp.where(inside, jnp.take_along_axis(state.pos, at[:, : state.pos.shape[1]], 2), -1)
    newest = KVBlock(k.gather(state.k, at), v.gather(state.v, at), pos)
    return combine(body, attend_dense(q, newest, q_pos, window))


fused_kernels.register("gpu", fused_kernels.Form(fits, read, queries=2))
