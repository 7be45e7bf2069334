"""Decode attention straight from codes of single tokens: a kernel for NVIDIA GPUs, and its reference.

Each token's vector has a scale and a zero point of its own: number = (code - zero) * scale. `data` holds the codes of
a vector one after the other, `8 // bits` to a byte from the lowest bit on, or 8-bit floats, each a code by itself.

A program decodes a block of slots into registers and uses it at once, so that a step reads the codes and nothing else
of their size. It takes each place in a byte ("plane") by itself, with the channels of the queries that stand there: so
neither queries nor codes have to be moved between threads. Scale and zero point leave the products: they multiply the
scores of a slot, and the weights of a slot before its values are summed.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Float32, Int32, Shaped

from kvjax.core.attention import MASKED_LOGIT, Rule, attend_dense
from kvjax.core.kernels.packed_attention import NUM_PROGRAMS
from kvjax.core.kernels.packed_kernel import dot, span
from kvjax.core.types import Array, KVBlock, Partial

BLOCK_SLOTS = 64  # slots that a program decodes at a time
QUERY_ROWS = 16  # queries of a program, the side of a tile of a tensor core
MAX_HEAD_DIM = 256


class TokenCodes(NamedTuple):
    """Keys or values as codes; see the module's text."""

    data: Shaped[Array, "B K S bytes"]  # uint8, or 8-bit floats
    scale: Float32[Array, "B K S"]
    zero: Float32[Array, "B K S"] | None  # None: 2^(bits - 1) for integers, which is then the middle, and 0 for floats


def fits(H: int, bits: int) -> bool:
    """Whether there are tiles for heads of H channels in codes of so many bits: a plane is a tile's width."""
    width = H * bits // 8
    return bits in (1, 2, 4, 8) and 16 <= width and width & (width - 1) == 0 and H <= MAX_HEAD_DIM


def attend(
    q: Float[Array, "B K G T H"],
    k: TokenCodes,
    v: TokenCodes,
    pos: Int32[Array, "B #K S"],
    q_pos: Int32[Array, "B T"],
    *,
    bits: tuple[int, int],
    window: int | None = None,
    interpret: bool = False,
    splits: int | None = None,
) -> Partial:
    """Attends to the visible slots, by the kernel.

    Products take operands of q's dtype, in which integer codes are exact, and sum in float32.

    Args:
      q: queries.
      k: keys.
      v: values.
      pos: -1 in empty slots, which may be anywhere and hold anything.
      q_pos: positions of the queries.
      bits: of a key's and of a value's code, for which `fits` must hold.
      window: the layer's sliding window.
      interpret: runs the kernel on any device, slowly.
      splits: programs that share the slots of one sequence and head; by default as many as fill a GPU.
    """
    (B, K, G, T, H), S = q.shape, pos.shape[2]
    n = pl.cdiv(G * T, QUERY_ROWS)  # programs for the queries of a head
    splits = splits or max(1, min(pl.cdiv(S, BLOCK_SLOTS), NUM_PROGRAMS // (B * K * n)))
    k_planes, v_planes = (8 // x for x in bits)
    # Plane j has every k_planes-th channel from j on: those whose codes stand at place j of their bytes.
    planes = jnp.moveaxis(q.reshape(B, K, G * T, H // k_planes, k_planes), 4, 2)
    arrays = [planes, k.data, k.scale, k.zero, v.data, v.scale, v.zero, pos, q_pos]

    def head_spec(x: Array) -> pl.BlockSpec:
        if x is q_pos:
            return pl.BlockSpec((None, T), lambda b, h, s: (b, 0))
        of_head = (lambda h: h // n) if x.shape[1] > 1 or K == 1 else (lambda h: 0)
        shape, rest = x.shape[2:], (0,) * (x.ndim - 2)
        return pl.BlockSpec((None, None, *shape), lambda b, h, s: (b, of_head(h), *rest))

    present = [x is not None for x in arrays]
    given = [x for x in arrays if x is not None]
    row = pl.BlockSpec((None, None, None, QUERY_ROWS), lambda b, h, s: (b, h // n, s, h % n))
    out, m, l = pl.pallas_call(
        functools.partial(_kernel, _Sizes(S, G * T, T, H, bits, window, q.dtype), present),
        grid=(B, K * n, splits),
        in_specs=[head_spec(x) for x in given],
        out_specs=[
            pl.BlockSpec(
                (None, None, None, v_planes, QUERY_ROWS, H // v_planes), lambda b, h, s: (b, h // n, s, 0, h % n, 0)
            ),
            row,
            row,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, K, splits, *tail), jnp.float32)
            for tail in ((v_planes, G * T, H // v_planes), (G * T,), (G * T,))
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="token_attention",
    )(*given)
    # Merges the partials of the splits by log-sum-exp.
    top = m.max(2)
    w = jnp.exp(m - top[:, :, None])
    out, l = (out * w[:, :, :, None, :, None]).sum(2), (l * w).sum(2)
    out = jnp.moveaxis(out, 2, 4).reshape(q.shape)
    return Partial(out, top.reshape(q.shape[:-1]), l.reshape(q.shape[:-1]))


def attend_reference(
    q: Float[Array, "B K G T H"],
    k: TokenCodes,
    v: TokenCodes,
    pos: Int32[Array, "B #K S"],
    q_pos: Int32[Array, "B T"],
    *,
    bits: tuple[int, int],
    window: int | None = None,
) -> Partial:
    """Computes what `attend` does, in plain JAX and float32, with all keys and values dequantized at once."""
    is_filled = jnp.broadcast_to(pos >= 0, k.data.shape[:3])[..., None]
    keys, values = (
        # An empty slot may hold inf, and 0 * inf is NaN.
        jnp.where(is_filled, dequantize(x, b), 0.0)
        for x, b in zip((k, v), bits, strict=True)
    )
    return attend_dense(q.astype(jnp.float32), KVBlock(keys, values, pos), q_pos, Rule(window))


def dequantize(x: TokenCodes, bits: int) -> Float32[Array, "B K S H"]:
    """Returns keys or values as numbers."""
    codes = x.data[..., None].astype(jnp.float32)
    if x.data.dtype == jnp.uint8:
        shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)[None, None, None, None]
        codes = (x.data[..., None] >> shifts & jnp.uint8(2**bits - 1)).astype(jnp.float32)
    codes = codes.reshape(*x.data.shape[:3], -1)
    zero = _middle(x.data.dtype, bits) if x.zero is None else x.zero[..., None]
    return (codes - zero) * x.scale[..., None]


def _middle(dtype: jnp.dtype, bits: int) -> float:
    """The zero point of codes that have none of their own."""
    return float(2 ** (bits - 1)) if dtype == jnp.uint8 else 0.0


class _Sizes(NamedTuple):
    """The static numbers of the kernel."""

    slots: int
    queries: int  # of a key/value head: G * T
    tokens: int  # T
    channels: int  # H
    bits: tuple[int, int]
    window: int | None
    dtype: jnp.dtype  # of q, and of all operands


def _kernel(sizes: _Sizes, present: list[bool], *refs):
    """The program: `QUERY_ROWS` queries of one sequence and head, and every `splits`-th block of slots."""
    *given, out_ref, m_ref, l_ref = refs
    rest = iter(given)
    all_refs: list[Any] = [next(rest) if is_given else None for is_given in present]
    q_ref, k_data, k_scale, k_zero, v_data, v_scale, v_zero, pos_ref, q_pos_ref = all_refs
    k_bits, v_bits = sizes.bits
    k_planes, v_planes = 8 // k_bits, 8 // v_bits
    row = span(QUERY_ROWS)
    query = pl.program_id(1) % pl.cdiv(sizes.queries, QUERY_ROWS) * QUERY_ROWS + row
    real = query < sizes.queries
    channel = span(sizes.channels // k_planes)[None]
    q = [
        triton.load(q_ref.at[j, jnp.minimum(query, sizes.queries - 1)[:, None], channel], mask=real[:, None], other=0)
        for j in range(k_planes)
    ]
    q_pos = triton.load(q_pos_ref.at[query % sizes.tokens], mask=real, other=-1)[:, None]
    split, splits = pl.program_id(2), pl.num_programs(2)
    num_blocks = pl.cdiv(jnp.maximum(pl.cdiv(sizes.slots, BLOCK_SLOTS) - split, 0), splits)
    # Weights times scales leave the range of float16, whose values are scaled instead.
    scales_values = sizes.dtype == jnp.float16

    def attend_block(i, carry):
        out, m, l = carry
        slot = (split + i * splits) * BLOCK_SLOTS + span(BLOCK_SLOTS)
        index = jnp.minimum(slot, sizes.slots - 1)
        pos = triton.load(pos_ref.at[index], mask=slot < sizes.slots, other=-1)
        filled, pos = pos >= 0, pos[None]

        def load(data, scale_ref, zero_ref, bits):
            """The planes of a block's codes less their zero points, [slots, channels], and the slots' scales."""
            # What an empty slot holds must not reach a product: its weight is 0, and 0 * inf is NaN.
            scale = triton.load(scale_ref.at[index], mask=filled, other=0)
            zero = _middle(data.dtype, bits)
            if zero_ref is not None:
                zero = triton.load(zero_ref.at[index], mask=filled, other=0)[:, None]
            width = sizes.channels * bits // 8
            place = data.at[index[:, None], span(width)[None]]
            if data.dtype != jnp.uint8:  # for which Triton has no number to load in place of hidden ones
                return [jnp.where(filled[:, None], triton.load(place).astype(jnp.float32), 0.0)], scale
            x = triton.load(place, mask=filled[:, None], other=0).astype(jnp.int32)
            parts = ((x >> (bits * j)) & (2**bits - 1) if bits < 8 else x for j in range(8 // bits))
            return [part.astype(jnp.float32) - zero for part in parts], scale

        keys, scale = load(k_data, k_scale, k_zero, k_bits)
        s = functools.reduce(jnp.add, (dot(x, y.astype(sizes.dtype).T) for x, y in zip(q, keys, strict=True)))
        s = s * (scale * (math.log2(math.e) * sizes.channels**-0.5))[None]
        visible = (pos >= 0) & (pos <= q_pos)
        if sizes.window is not None:
            visible &= pos > q_pos - sizes.window
        s = jnp.where(visible, s, MASKED_LOGIT)
        top = jnp.maximum(m, s.max(1))
        shrink = jnp.exp2(m - top)
        p = jnp.where(visible, jnp.exp2(s - top[:, None]), 0.0)
        values, scale = load(v_data, v_scale, v_zero, v_bits)
        if scales_values:
            weight, values = p.astype(sizes.dtype), [x * scale[:, None] for x in values]
        else:
            weight = (p * scale[None]).astype(sizes.dtype)
        out = tuple(x * shrink[:, None] + dot(weight, y.astype(sizes.dtype)) for x, y in zip(out, values, strict=True))
        return out, top, l * shrink + p.sum(1)

    zero = jnp.zeros((QUERY_ROWS, sizes.channels // v_planes), jnp.float32)
    start = (
        (zero,) * v_planes,
        jnp.full((QUERY_ROWS,), MASKED_LOGIT, jnp.float32),
        jnp.zeros((QUERY_ROWS,), jnp.float32),
    )
    out, m, l = lax.fori_loop(0, num_blocks, attend_block, start)
    channel = span(sizes.channels // v_planes)[None]
    for j, x in enumerate(out):
        triton.store(out_ref.at[j, row[:, None], channel], x, mask=real[:, None])
    triton.store(m_ref.at[row], jnp.where(m > MASKED_LOGIT / 2, m * math.log(2), MASKED_LOGIT), mask=real)
    triton.store(l_ref.at[row], l, mask=real)
