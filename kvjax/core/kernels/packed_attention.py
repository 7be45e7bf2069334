"""Decode attention straight from packed low-bit keys and values: a kernel for NVIDIA GPUs, and its reference.

`words u32[B K S/per H]` hold `per = 32 // bits` consecutive tokens of one channel, token j of a word from bit bits * j
on. A number is code * scale + lo; keys have one scale and lo per channel and group of tokens, values one per token and
group of channels (KIVI; Liu et al., 2024, section 3).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Float32, Int32, UInt32

from kvjax.core.attention import MASKED_LOGIT, Rule, attend_dense
from kvjax.core.kernels.packed_kernel import QUERY_ROWS, WORD_ROWS, KernelTiling, kernel
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import KvjaxError

HEAD_DIMS = range(16, 257, 16)
"""Sizes of heads that the kernel has tiles for."""

NUM_PROGRAMS = 1024
"""Programs to aim at: about as many as an H200 runs at once, 8 warps on each of its 132 multiprocessors."""


class PackedCodes(NamedTuple):
    """Keys or values as codes; see the module's text."""

    words: UInt32[Array, "B K rows H"]  # S / per rows
    scale: Float[Array, "B K _ _"]  # [B K S/group H] of keys, [B K S H/group] of values
    lo: Float[Array, "B K _ _"]


def attend(
    q: Float[Array, "B K G T H"],
    k: PackedCodes,
    v: PackedCodes,
    pos: Int32[Array, "B #K S"],
    q_pos: Int32[Array, "B T"],
    num_quantized: Int32[Array, " B"],
    *,
    bits: int,
    window: int | None = None,
    interpret: bool = False,
    splits: int | None = None,
) -> Partial:
    """Attends to the visible slots among the first `num_quantized` ones, by the kernel.

    Products take operands of q's dtype, to which scale and lo are rounded too, and sum in float32. It is made for
    float16 and bfloat16; a float32 q is slow.

    Args:
      q: queries.
      k: keys.
      v: values.
      pos: -1 in empty slots, which may be anywhere and hold anything.
      q_pos: positions of the queries.
      num_quantized: codes in the first slots of each sequence; what follows them is not read.
      bits: 1, 2, 4 or 8.
      window: the layer's sliding window.
      interpret: runs the kernel on any device, slowly.
      splits: programs that share the slots of one sequence and head; by default `NUM_PROGRAMS` in all, but no program
        without a block of slots.

    Raises:
      KvjaxError: for other bits, or a head size that is no multiple of 16 up to 256.
    """
    tiling = _tiling(q, k, v, pos, bits=bits, window=window, interpret=interpret)
    if tiling.slots == 0:
        return _attend_nothing(q)
    B, K, G, T, H = q.shape
    # One sequence and head has too few blocks of queries to fill a GPU while decoding, so several programs share its
    # slots (flash-decoding), and their partials are merged below.
    n = pl.cdiv(G * T, QUERY_ROWS)  # programs for the queries of a head
    splits = splits or max(1, min(pl.cdiv(k.words.shape[2], WORD_ROWS), NUM_PROGRAMS // (B * K * n)))
    has_head_pos = pos.shape[1] > 1
    num_warps = max(1, tiling.width // 128) * (
        1 if tiling.is_packed else 4
    )  # one has registers for 128 16-bit channels
    row = pl.BlockSpec((None, None, None, QUERY_ROWS), lambda b, k, s: (b, k // n, s, k % n))
    o, m, l = pl.pallas_call(
        functools.partial(kernel, tiling),
        grid=(B, K * n, splits),
        in_specs=[
            pl.BlockSpec((None, None, QUERY_ROWS, tiling.width), lambda b, k, s: (b, k // n, k % n, 0)),
            *(pl.BlockSpec((None, None, *x.shape[2:]), lambda b, k, s: (b, k // n, 0, 0)) for x in (*k, *v)),
            pl.BlockSpec((None, None, tiling.slots), lambda b, k, s: (b, k // n if has_head_pos else 0, 0)),
            pl.BlockSpec((None, T), lambda b, k, s: (b, 0)),
            pl.BlockSpec((None,), lambda b, k, s: (b,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, QUERY_ROWS, tiling.width), lambda b, k, s: (b, k // n, s, k % n, 0)),
            row,
            row,
        ],
        out_shape=[jax.ShapeDtypeStruct((B, K, splits, G * T, *tail), jnp.float32) for tail in ((H,), (), ())],
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=2),
        interpret=tiling.interpret,
        name="packed_attention",
    )(q.reshape(B, K, G * T, H), *k, *v, pos, q_pos, num_quantized)
    # Merges the partials of the splits by log-sum-exp.
    top = m.max(2)
    w = jnp.exp(m - top[:, :, None])
    o, l = (o * w[..., None]).sum(2), (l * w).sum(2)
    return Partial(o.reshape(q.shape), top.reshape(q.shape[:-1]), l.reshape(q.shape[:-1]))


def attend_reference(
    q: Float[Array, "B K G T H"],
    k: PackedCodes,
    v: PackedCodes,
    pos: Int32[Array, "B #K S"],
    q_pos: Int32[Array, "B T"],
    num_quantized: Int32[Array, " B"],
    *,
    bits: int,
    window: int | None = None,
    interpret: bool = False,
    splits: int | None = None,
) -> Partial:
    """Computes what `attend` does, in plain JAX and float32, with all keys and values dequantized at once."""
    tiling = _tiling(q, k, v, pos, bits=bits, window=window, interpret=interpret)
    if tiling.slots == 0:
        return _attend_nothing(q)
    is_quantized = jnp.arange(tiling.slots, dtype=jnp.int32)[None, None] < num_quantized[:, None, None]
    pos = jnp.where(is_quantized, pos, -1)
    # An empty slot may hold inf, and 0 * inf is NaN.
    values = jnp.where((pos >= 0)[..., None], dequantize_values(v, bits), 0.0)
    return attend_dense(q.astype(jnp.float32), KVBlock(dequantize_keys(k, bits), values, pos), q_pos, Rule(window))


def dequantize_keys(k: PackedCodes, bits: int) -> Float32[Array, "B K S H"]:
    """Returns keys as numbers."""
    codes = _unpack(k.words, bits)
    scale, lo = (x.astype(jnp.float32)[:, :, :, None] for x in (k.scale, k.lo))
    B, K, S, H = codes.shape
    return (codes.reshape(B, K, scale.shape[2], -1, H) * scale + lo).reshape(codes.shape)


def dequantize_values(v: PackedCodes, bits: int) -> Float32[Array, "B K S H"]:
    """Returns values as numbers."""
    codes = _unpack(v.words, bits)
    scale, lo = (x.astype(jnp.float32)[..., None] for x in (v.scale, v.lo))
    return (codes.reshape(*v.scale.shape, -1) * scale + lo).reshape(codes.shape)


def _unpack(words: UInt32[Array, "B K rows H"], bits: int) -> Float32[Array, "B K S H"]:
    """Returns codes as floats."""
    B, K, n, H = words.shape
    shifts = jnp.arange(0, 32, bits, dtype=jnp.uint32)[None, None, None, :, None]
    codes = (words[:, :, :, None] >> shifts) & jnp.uint32(2**bits - 1)
    return codes.astype(jnp.float32).reshape(B, K, n * 32 // bits, H)


def _attend_nothing(q: Array) -> Partial:
    """The partial over no slots."""
    zero = jnp.zeros(q.shape, jnp.float32)
    return Partial(zero, jnp.full_like(zero[..., 0], MASKED_LOGIT), zero[..., 0])


def _tiling(
    q: Array, k: PackedCodes, v: PackedCodes, pos: Array, *, bits: int, window: int | None, interpret: bool
) -> KernelTiling:
    """Derives the sizes of groups from the arrays' shapes; raises KvjaxError where the kernel has no tile for them."""
    _, _, G, T, H = q.shape
    if bits not in (1, 2, 4, 8):
        raise KvjaxError(f"bits must be 1, 2, 4 or 8, got {bits}")
    if H not in HEAD_DIMS:
        raise KvjaxError(f"the head dim must be a multiple of 16 up to 256, got {H}")
    k_groups, v_groups = k.scale.shape[2], v.scale.shape[3]
    S = k.words.shape[2] * (32 // bits)
    return KernelTiling(bits, S, G * T, T, H, S // max(1, k_groups), H // v_groups, q.dtype, window, interpret)
