"""Decode attention to packed codes with exact vectors in place of some: a kernel for NVIDIA GPUs, and its reference.

A slot is read from one of three places: the first ones as codes (`packed_attention` has their form), the newest ones as
the exact vectors of a window, and a few others as exact vectors that were fetched. Where a slot is read is decided by
comparing numbers in the program that reads it, so that no mask of all slots is written and read again. The last
query's logits are returned too, for callers that select by them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Float32, Int32

from kvjax.core import attention
from kvjax.core.attention import MASKED_LOGIT, Rule
from kvjax.core.kernels.packed_attention import NUM_PROGRAMS, PackedCodes, dequantize_keys, dequantize_values
from kvjax.core.kernels.packed_kernel import dot, span
from kvjax.core.kernels.products import WORD_ROWS, ProductTiling, WordBlock, tiling_of
from kvjax.core.types import Array, Partial

ROWS = 16  # exact vectors that are read at a time, the side of a tile of a tensor core


class GroupedTokens(NamedTuple):
    """Keys or values: codes of the first slots, and exact vectors of the newest ones."""

    codes: PackedCodes
    recent: Float[Array, "B K P H"]  # slot i at index i modulo P
    num_codes: Int32[Array, " B"]  # slots that are read as codes


class SlotVectors(NamedTuple):
    """Exact keys and values that stand for some slots."""

    k: Float[Array, "B K n H"]
    v: Float[Array, "B K n H"]
    idx: Int32[Array, "B K n"]  # their slots, -1 where there is none


def attend(
    q: Float[Array, "B K G T H"],
    k: GroupedTokens,
    v: GroupedTokens,
    fetched: SlotVectors,
    pos: Int32[Array, "B #K S"],
    q_pos: Int32[Array, "B T"],
    n: Int32[Array, " B"],
    *,
    bits: int,
    window: int | None = None,
    interpret: bool = False,
) -> tuple[Partial, Float32[Array, "B K G S"]]:
    """Attends to the first n slots, by the kernel.

    Products take operands of q's dtype, and sum in float32. `products.fits` says for which q and codes there are tiles.

    Args:
      q: queries.
      k: keys; not fewer of them are codes than of the values.
      v: values; at most `v.recent.shape[2]` of the first n slots are no codes.
      fetched: what is read in place of codes.
      pos: -1 in empty slots.
      q_pos: positions of the queries.
      n: slots in use.
      bits: of a code.
      window: the layer's sliding window.
      interpret: runs the kernel on any device, slowly.

    Returns:
      The partial, and the last query's logits: MASKED_LOGIT where it sees nothing, anything from slot n on.
    """
    tilings = tiling_of(q, k.codes, bits, q.dtype), tiling_of(q, v.codes, bits, q.dtype)
    (B, K, G, T, H), S = q.shape, pos.shape[2]
    blocks = pl.cdiv(tilings[1].rows, WORD_ROWS)
    splits = max(1, min(blocks, NUM_PROGRAMS // (B * K)))
    heads = [q.reshape(B, K, G * T, H), *k.codes, k.recent, *v.codes, v.recent, *fetched]
    per_head_pos = pos.shape[1] > 1
    out, m, last = pl.pallas_call(
        functools.partial(_kernel, tilings, S, T, window),
        grid=(B, K, splits + 1),  # the last program reads the exact vectors
        in_specs=[
            *(_head_spec(x.shape[2:]) for x in heads),
            pl.BlockSpec((None, None, S), lambda b, h, s: (b, h if per_head_pos else 0, 0)),
            pl.BlockSpec((None, T), lambda b, h, s: (b, 0)),
            *[pl.BlockSpec((None,), lambda b, h, s: (b,))] * 3,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, G * T, H + 1), lambda b, h, s: (b, h, s, 0, 0)),
            pl.BlockSpec((None, None, None, G * T), lambda b, h, s: (b, h, s, 0)),
            _head_spec((G * T, S)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, K, splits + 1, G * T, H + 1), jnp.float32),
            jax.ShapeDtypeStruct((B, K, splits + 1, G * T), jnp.float32),
            jax.ShapeDtypeStruct((B, K, G * T, S), jnp.float32),  # only the last queries' rows are written
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="mixed_attention",
    )(*heads, pos, q_pos, k.num_codes, v.num_codes, n)
    # Merges the partials of the programs by log-sum-exp; the last column has the sums of weights.
    top = m.max(2)
    out = (out * jnp.exp(m - top[:, :, None])[..., None]).sum(2).reshape(B, K, G, T, H + 1)
    return Partial(out[..., :H], top.reshape(q.shape[:-1]), out[..., H]), last.reshape(B, K, G, T, S)[:, :, :, -1]


def attend_reference(
    q: Float[Array, "B K G T H"],
    k: GroupedTokens,
    v: GroupedTokens,
    fetched: SlotVectors,
    pos: Int32[Array, "B #K S"],
    q_pos: Int32[Array, "B T"],
    n: Int32[Array, " B"],
    *,
    bits: int,
    window: int | None = None,
) -> tuple[Partial, Float32[Array, "B K G S"]]:
    """Computes what `attend` does, in plain JAX and float32, with all keys and values dequantized at once."""
    S = pos.shape[2]
    slot = jnp.arange(S, dtype=jnp.int32)
    arrays = []
    for x, dequantize, exact in ((k, dequantize_keys, fetched.k), (v, dequantize_values, fetched.v)):
        numbers = dequantize(x.codes, bits)[:, :, :S]
        numbers = jnp.pad(numbers, [(0, 0), (0, 0), (0, S - numbers.shape[2]), (0, 0)])
        recent = jnp.take(x.recent, slot % x.recent.shape[2], axis=2).astype(jnp.float32)
        numbers = jnp.where((slot[None] < x.num_codes[:, None])[:, None, :, None], numbers, recent)
        # One place more takes what is fetched for no slot.
        numbers = jnp.pad(numbers, [(0, 0), (0, 0), (0, 1), (0, 0)])
        at = jnp.broadcast_to(jnp.where(fetched.idx >= 0, fetched.idx, S)[..., None], exact.shape)
        numbers = jnp.put_along_axis(numbers, at, exact.astype(jnp.float32), 2, inplace=False)
        arrays.append(numbers[:, :, :S])
    pos = jnp.where((slot[None] < n[:, None])[:, None], pos, -1)
    s = Rule(window).logits(attention.scores(q.astype(jnp.float32), arrays[0]), pos, q_pos)
    values = jnp.where((pos >= 0)[..., None], arrays[1], 0.0)
    return attention.attend_scores(s, values), s[:, :, :, -1]


def _head_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
    """All of one sequence and key/value head."""
    return pl.BlockSpec((None, None, *shape), lambda b, h, s: (b, h, *(0 for _ in shape)))


class _Program(NamedTuple):
    """What a program reads besides keys and values, and where it writes the last query's logits."""

    tiling: ProductTiling
    slots: int
    tokens: int  # T
    window: int | None
    q: Array
    q_pos: Array
    pos: Any  # a reference of Pallas, as the next
    last: Any

    def logits(self, key: Array, slot: Array, is_read: Array) -> Array:
        """Logits of a tile of keys in slots i32[r], MASKED_LOGIT where they are not read; writes the last query's."""
        tiling, query = self.tiling, span(self.tiling.height)[:, None]
        index = jnp.clip(slot, 0, self.slots - 1)
        pos = triton.load(self.pos.at[index], mask=is_read, other=-1)[None]
        visible = (pos >= 0) & (pos <= self.q_pos)
        if self.window is not None:
            visible &= pos > self.q_pos - self.window
        s = jnp.where(visible, dot(self.q, key.T) * tiling.channels**-0.5, MASKED_LOGIT)
        is_last = (query % self.tokens == self.tokens - 1) & (query < tiling.queries)
        # Where nothing is read no place of a read slot is named: an interpreted store writes back what it found there.
        place = jnp.where(is_read, slot, self.slots + span(slot.shape[0]))[None]
        triton.store(self.last.at[query, place], s, mask=is_last & is_read[None])
        return s


def _kernel(tilings: tuple[ProductTiling, ProductTiling], slots: int, tokens: int, window: int | None, *refs):
    """The program: all queries of a sequence and head, and every `splits`-th block of codes, or the exact vectors."""
    q_ref, *rest = refs
    k_codes, k_recent, v_codes, v_recent = rest[:3], rest[3], rest[4:7], rest[7]
    fetched_k, fetched_v, idx_ref, pos_ref, q_pos_ref, *counts, out_ref, m_ref, last_ref = rest[8:]
    tiling, (H, dtype) = tilings[1], (tilings[1].channels, tilings[1].dtype)
    split, splits = pl.program_id(2), pl.num_programs(2) - 1
    query, channel = span(tiling.height), span(tiling.width)[None]
    real, inside = query < tiling.queries, channel < H
    q_mask = real[:, None] & inside
    q = triton.load(q_ref.at[query[:, None], channel], mask=q_mask, other=0).astype(dtype)
    q_pos = triton.load(q_pos_ref.at[query % tokens], mask=real, other=-1)[:, None]
    program = _Program(tiling, slots, tokens, window, q, q_pos, pos_ref, last_ref)
    num_k, num_v, n = (jnp.minimum(ref[()], slots) for ref in counts)
    num_fetched = idx_ref.shape[0]
    fetched_place = span(pl.next_power_of_2(num_fetched))
    fetched = triton.load(idx_ref.at[fetched_place], mask=fetched_place < num_fetched, other=-1)

    def is_fetched(slot):
        return (slot[:, None] == fetched[None]).astype(jnp.int32).max(1) > 0

    def add(carry, scores, values):
        """The online softmax over some tiles of logits and the values of each."""
        out, m, l = carry
        top = jnp.maximum(m, functools.reduce(jnp.maximum, scores).max(1))
        shrink = jnp.exp(m - top)
        out, l = out * shrink[:, None], l * shrink
        for j, s in enumerate(scores):
            p = jnp.where(s > MASKED_LOGIT / 2, jnp.exp(s - top[:, None]), 0.0)
            out, l = out + dot(p.astype(dtype), values(j)), l + p.sum(1)
        return out, top, l

    def add_codes(i, carry):
        first = (split + i * splits) * WORD_ROWS
        keys, values = (WordBlock(t, x, first) for t, x in zip(tilings, (k_codes, v_codes), strict=True))
        scores = []
        for j in range(tiling.per):
            slot = keys.word * tiling.per + j
            scores.append(program.logits(keys.dequantize(j), slot, (slot < num_v) & ~is_fetched(slot)))
        return add(carry, scores, values.dequantize)

    def load_rows(ref, row, is_row):
        return triton.load(ref.at[row[:, None], channel], mask=is_row[:, None] & inside, other=0).astype(dtype)

    def add_newest(i, carry):
        """Slots whose values are exact; the keys of the first of them may be codes."""
        t, slot = tilings[0], num_v + i * ROWS + span(ROWS)
        is_read = (slot < n) & ~is_fetched(slot)
        is_code = is_read & (slot < num_k)
        word = jnp.minimum(slot // t.per, t.rows - 1)
        codes_mask = is_code[:, None] & inside
        words = triton.load(k_codes[0].at[word[:, None], channel], mask=codes_mask, other=0)
        codes = words >> (slot % t.per * t.bits).astype(jnp.uint32)[:, None] & jnp.uint32(2**t.bits - 1)
        group = jnp.minimum(slot, t.rows * t.per - 1)[:, None] // t.slot_group, channel // t.channel_group
        scale, lo = (triton.load(x.at[group], mask=codes_mask, other=0).astype(jnp.float32) for x in k_codes[1:])
        coded = (codes.astype(jnp.int32).astype(jnp.float32) * scale + lo).astype(dtype)
        key = jnp.where(is_code[:, None], coded, load_rows(k_recent, slot % k_recent.shape[0], is_read))
        s = program.logits(key, slot, is_read)
        return add(carry, [s], lambda _: load_rows(v_recent, slot % v_recent.shape[0], is_read))

    def add_fetched(i, carry):
        row = i * ROWS + span(ROWS)
        slot = triton.load(idx_ref.at[row], mask=row < num_fetched, other=-1)
        s = program.logits(load_rows(fetched_k, row, slot >= 0), slot, slot >= 0)
        return add(carry, [s], lambda _: load_rows(fetched_v, row, slot >= 0))

    start = (
        jnp.zeros((tiling.height, tiling.width), jnp.float32),
        jnp.full((tiling.height,), MASKED_LOGIT, jnp.float32),
        jnp.zeros((tiling.height,), jnp.float32),
    )
    has_codes = split < splits
    num_blocks = pl.cdiv(jnp.maximum(pl.cdiv(num_v, tiling.per * WORD_ROWS) - split, 0), splits)
    carry = lax.fori_loop(0, jnp.where(has_codes, num_blocks, 0), add_codes, start)
    num_newest = pl.cdiv(jnp.maximum(n - num_v, 0), ROWS)
    carry = lax.fori_loop(0, jnp.where(has_codes, 0, num_newest), add_newest, carry)
    num_exact = jnp.int32(pl.cdiv(num_fetched, ROWS))
    out, m, l = lax.fori_loop(0, jnp.where(has_codes, 0, num_exact), add_fetched, carry)
    triton.store(out_ref.at[query[:, None], channel], out, mask=q_mask)
    triton.store(m_ref.at[query], m, mask=real)
    triton.store(out_ref.at[query, H], l, mask=real)
