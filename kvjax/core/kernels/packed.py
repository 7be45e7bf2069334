"""Decode attention straight from packed low-bit keys and values: a kernel for NVIDIA GPUs, and its reference.

`words u32[B K S/per H]` hold `per = 32 // bits` consecutive tokens of one channel, token j of a word at bit bits * j.
A number is code * scale + lo; keys have one scale and one lo per channel and group of tokens, values one per token and
group of channels (KIVI; Liu et al., 2024, section 3).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kvjax.core.attention import MASKED_LOGIT, attend_dense
from kvjax.core.kernels.packed_kernel import ROWS, WORDS, Plan, kernel
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import KvjaxError

PROGRAMS = 1024  # programs to aim at: about what an H200 holds at once, 8 warps on each of its 132 multiprocessors


class Codes(NamedTuple):
    """Keys or values as codes; see the module's text."""

    words: Array  # u32[B K S/per H]
    scale: Array  # float[B K S/group H] of keys, float[B K S H/group] of values
    lo: Array  # like scale


def attend(
    q: Array,
    k: Codes,
    v: Codes,
    pos: Array,
    q_pos: Array,
    settled: Array,
    *,
    bits: int,
    window: int | None = None,
    interpret: bool = False,
    splits: int | None = None,
) -> Partial:
    """q [B K G T H] at q_pos i32[B T] over the visible slots below settled i32[B] -> Partial; a kernel.

    pos i32[B 1|K S] may be -1 (empty) anywhere, and an empty slot may hold anything. Products take operands of q's
    dtype, to which scale and lo are rounded too, and add up in float32. Made for float16 and bfloat16: a float32 q is
    served in float32, slowly. `interpret` runs the kernel on any device. `splits` is the number of programs that share
    the slots of a row and head; by default PROGRAMS in all, but none without a block of slots.
    Raises KvjaxError for shapes that do not fit together, bits other than 1, 2, 4 or 8, and a head dim other than a
    multiple of 16 up to 256.
    """
    plan = _plan(q, k, v, pos, bits, window, interpret)
    if plan.slots == 0:
        return _nothing(q)
    o, m, l = _programs(plan, splits, q, k, v, pos, q_pos, settled)
    top = m.max(2)
    w = jnp.exp(m - top[:, :, None])
    o, l = (o * w[..., None]).sum(2), (l * w).sum(2)
    return Partial(o.reshape(q.shape), top.reshape(q.shape[:-1]), l.reshape(q.shape[:-1]))


def reference(
    q: Array,
    k: Codes,
    v: Codes,
    pos: Array,
    q_pos: Array,
    settled: Array,
    *,
    bits: int,
    window: int | None = None,
    interpret: bool = False,
    splits: int | None = None,
) -> Partial:
    """What `attend` computes, in plain JAX and float32, with all keys and values dequantised at once; any device."""
    plan = _plan(q, k, v, pos, bits, window, interpret)
    if plan.slots == 0:
        return _nothing(q)
    below = jnp.arange(plan.slots, dtype=jnp.int32)[None, None] < settled[:, None, None]
    pos = jnp.where(below, pos, -1)
    mixed = jnp.where((pos >= 0)[..., None], values(v, bits), 0.0)  # what an empty slot holds: 0 * inf would be NaN
    return attend_dense(q.astype(jnp.float32), KVBlock(keys(k, bits), mixed, pos), q_pos, window)


def keys(k: Codes, bits: int) -> Array:
    """Keys f32[B K S H]."""
    codes = _unpack(k.words, bits)
    scale, lo = (x.astype(jnp.float32)[:, :, :, None] for x in (k.scale, k.lo))
    B, K, S, H = codes.shape
    return (codes.reshape(B, K, scale.shape[2], -1, H) * scale + lo).reshape(codes.shape)


def values(v: Codes, bits: int) -> Array:
    """Values f32[B K S H]."""
    codes = _unpack(v.words, bits)
    scale, lo = (x.astype(jnp.float32)[..., None] for x in (v.scale, v.lo))
    return (codes.reshape(*v.scale.shape, -1) * scale + lo).reshape(codes.shape)


def _programs(plan: Plan, splits: int | None, q, k: Codes, v: Codes, pos, q_pos, settled) -> list[Array]:
    """Runs the kernel: partials o f32[B K splits G*T H] and m, l f32[B K splits G*T]."""
    B, K, G, T, H = q.shape
    n, heads = pl.cdiv(G * T, ROWS), pos.shape[1] > 1  # programs for the queries of a head
    splits = splits or max(1, min(pl.cdiv(k.words.shape[2], WORDS), PROGRAMS // (B * K * n)))

    def whole(x):
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, k, s: (b, k // n, 0, 0))

    row = pl.BlockSpec((None, None, None, ROWS), lambda b, k, s: (b, k // n, s, k % n))
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=(B, K * n, splits),
        in_specs=[
            pl.BlockSpec((None, None, ROWS, plan.width), lambda b, k, s: (b, k // n, k % n, 0)),
            *(whole(x) for x in (*k, *v)),
            pl.BlockSpec((None, None, plan.slots), lambda b, k, s: (b, k // n if heads else 0, 0)),
            pl.BlockSpec((None, T), lambda b, k, s: (b, 0)),
            pl.BlockSpec((None,), lambda b, k, s: (b,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, ROWS, plan.width), lambda b, k, s: (b, k // n, s, k % n, 0)),
            row,
            row,
        ],
        out_shape=[jax.ShapeDtypeStruct((B, K, splits, G * T, *tail), jnp.float32) for tail in ((H,), (), ())],
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=2),
        interpret=plan.interpret,
        name="packed_attention",
    )(q.reshape(B, K, G * T, H), *k, *v, pos, q_pos, settled)


def _nothing(q: Array) -> Partial:
    """The partial over no slots."""
    zero = jnp.zeros(q.shape, jnp.float32)
    return Partial(zero, jnp.full_like(zero[..., 0], MASKED_LOGIT), zero[..., 0])


def _unpack(words: Array, bits: int) -> Array:
    """u32[B K S/per H] -> codes f32[B K S H]."""
    B, K, n, H = words.shape
    shifts = jnp.arange(0, 32, bits, dtype=jnp.uint32)[None, None, None, :, None]
    codes = (words[:, :, :, None] >> shifts) & jnp.uint32(2**bits - 1)
    return codes.astype(jnp.float32).reshape(B, K, n * 32 // bits, H)


def _plan(q: Array, k: Codes, v: Codes, pos: Array, bits: int, window: int | None, interpret: bool) -> Plan:
    """Checks what the arrays are, and finds the groups in their shapes."""
    B, K, G, T, H = q.shape
    if bits not in (1, 2, 4, 8):
        raise KvjaxError(f"bits must be 1, 2, 4 or 8, got {bits}")
    if H % 16 or not 16 <= H <= 256:
        raise KvjaxError(f"the head dim must be a multiple of 16 up to 256, got {H}")
    n, k_groups, v_groups = k.words.shape[2], k.scale.shape[2], v.scale.shape[3]
    S = n * (32 // bits)
    if (S % k_groups if k_groups else S) or v_groups == 0 or H % v_groups:
        raise KvjaxError(f"{S} slots do not fall into {k_groups} equal groups, or {H} channels not into {v_groups}")
    shapes = {
        "words": (B, K, n, H),
        "scale and lo of keys": (B, K, k_groups, H),
        "scale and lo of values": (B, K, S, v_groups),
        "pos": (B, 1 if pos.shape[1] == 1 else K, S),
    }
    for (name, shape), arrays in zip(shapes.items(), ((k.words, v.words), k[1:], v[1:], (pos,)), strict=True):
        if any(x.shape != shape for x in arrays):
            got = " and ".join(str(x.shape) for x in arrays)
            raise KvjaxError(f"{name} must be {shape} beside q {q.shape} at {bits} bits, got {got}")
    if any(x.dtype != jnp.uint32 for x in (k.words, v.words)):
        raise KvjaxError(f"words must be uint32, got {k.words.dtype} and {v.words.dtype}")
    return Plan(bits, S, G * T, T, H, S // max(1, k_groups), H // v_groups, q.dtype, window, interpret)
