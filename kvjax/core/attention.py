"""Attention as mergeable partials, and exact causal attention that never builds a T x S array."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Float32, Int32

from kvjax.core.matmul import has_matrix_unit
from kvjax.core.mesh import vary
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens
from kvjax.errors import KvjaxError
from kvjax.utils.abstract import abstract
from kvjax.utils.parameter_types import PositiveFloat, Size, check_fields

MASKED_LOGIT = -1e30
"""Logit of a slot that a query does not see. It is finite, so that a query without any visible slot gives no NaN."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The sliding window and the soft cap of a layer's attention: how scaled dot products become logits.

    Attributes:
      window: latest positions that a query sees, its own included; None for all.
      soft_cap: c in c * tanh(s / c), which bounds every logit s (Gemma 2); None for none.
    """

    window: Size | None = None
    soft_cap: PositiveFloat | None = None

    __post_init__ = check_fields

    def cap(self, s: Float32[Array, "*rest"]) -> Float32[Array, "*rest"]:
        """Bounds scaled dot products; a bias, such as the logarithm of merged tokens, is added afterwards."""
        return s if self.soft_cap is None else self.soft_cap * jnp.tanh(s / self.soft_cap)

    def logits(
        self,
        s: Float32[Array, "B K G T S"],
        pos: Int32[Array, "#B #K S"],
        q_pos: Int32[Array, "#B T"],
        bias: Float32[Array, "B #K S"] | None = None,
        readable: Bool[Array, "#B #K #G #T #S"] | None = None,
    ) -> Float32[Array, "B K G T S"]:
        """Turns scaled dot products into logits: bounded, with the slots' bias, MASKED_LOGIT where hidden.

        Args:
          s: what `scores` returns.
          pos: positions of the slots, -1 in empty ones.
          q_pos: positions of the queries.
          bias: of the slots; None for none.
          readable: slots that a query may read among the visible ones; None for all.
        """
        s = self.cap(s)
        if bias is not None:
            s = s + bias[:, :, None, None]
        mask = visible(pos, q_pos, self)
        return jnp.where(mask if readable is None else mask & readable, s, MASKED_LOGIT)


PLAIN = Rule()
"""Every query sees all tokens before it, and nothing bounds its logits."""


@runtime_checkable
class AttentionPattern(Protocol):
    """Sparse attention of a prompt's own queries: which earlier tokens they read, by position."""

    def is_visible(self, s: Int32[Array, "..."], t: Int32[Array, "..."]) -> Bool[Array, "..."]:
        """Whether a query at position t reads the key at position s; it must read the key at s = t."""
        ...

    def block_visibility(
        self, first: Int32[Array, ""], last: Int32[Array, ""], start: Int32[Array, ""], end: Int32[Array, ""]
    ) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
        """For keys first..last and queries start..end: (whether any pair is read, whether all causal pairs are)."""
        ...


@runtime_checkable
class TileSkipping(AttentionPattern, Protocol):
    """A pattern under which a query also leaves out whole tiles of the keys that it could read, by their logits.

    Attributes:
      tile: keys of a tile; tiles are counted from position 0.
    """

    tile: int

    def skips(self, largest: Float32[Array, "..."], before: Float32[Array, "..."]) -> Bool[Array, "..."]:
        """Whether a query skips a tile with this largest logit, after tiles with the largest logit `before`."""
        ...


class ChosenKeys(NamedTuple):
    """The keys that each query head of one tile of queries reads, see `TileChoosing`."""

    tiles: Bool[Array, "B K G tiles"]  # which tiles of keys; tiles are counted from position 0
    # Positions of single keys that are read where their tile is not, -1 for none; None: tiles alone.
    columns: Int32[Array, "B K G columns"] | None = None


class TileChoosing:
    """Base class of patterns that choose, from the layer's queries and keys, the keys that a tile of queries reads.

    Keys after a query, or outside of its sliding window, stay hidden whatever is chosen.

    Attributes:
      tile: queries, and keys, of a tile; tiles are counted from position 0.
    """

    tile: int

    @abstract
    def choose_keys(
        self,
        q: Float[Array, "B K G T H"],
        k: Float[Array, "B K S H"],
        start: Int32[Array, ""] | np.integer | int,
        lengths: Int32[Array, " B"],
    ) -> Callable[[Array, Array], ChosenKeys]:
        """Looks at the queries and keys of a prompt, or of one of its chunks, once.

        Args:
          q: queries at positions start..start+T-1, after RoPE and not scaled; no gradient passes.
          k: keys at positions 0..S-1.
          start: position of the first query, a multiple of `tile`.
          lengths: of the prompts; queries and keys from there on are padding, and must not change what others read.

        Returns:
          A function of one tile's queries [B K G tile H] and the position of the first, which chooses their keys.
        """
        ...

    def is_visible(self, s: Int32[Array, "..."], t: Int32[Array, "..."]) -> Bool[Array, "..."]:
        """Raises KvjaxError: positions alone do not say what is read."""
        raise KvjaxError(
            f"{type(self).__name__} chooses keys for whole tiles of {self.tile} queries, and here single queries "
            "attend; read the prompt with kvjax.prefill, or take a pattern of positions, such as `a_shape`"
        )

    def block_visibility(
        self, first: Int32[Array, ""], last: Int32[Array, ""], start: Int32[Array, ""], end: Int32[Array, ""]
    ) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
        """Raises KvjaxError, as `is_visible` does."""
        return self.is_visible(first, start), self.is_visible(last, end)


def scores(q: Float[Array, "B K G T H"], k: Float[Array, "B K S H"]) -> Float32[Array, "B K G T S"]:
    """Computes scaled dot products of queries and keys."""
    return _dot_products(q, k) * q.shape[-1] ** -0.5


def _dot_products(q: Float[Array, "B K G T H"], k: Float[Array, "B K S H"]) -> Float32[Array, "B K G T S"]:
    """As `scores`, not scaled."""
    B, K, G, T, H = q.shape
    if G * T > 16:
        return jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
    # Few queries: with the keys as the second operand, XLA:CPU transposes all of them on every decode step.
    dims = (((3,), (3,)), ((0, 1), (0, 1)))
    s = lax.dot_general(k, q.reshape(B, K, G * T, H), dims, preferred_element_type=jnp.float32)
    return s.swapaxes(2, 3).reshape(B, K, G, T, -1)


def visible(
    pos: Int32[Array, "#B #K S"], q_pos: Int32[Array, "#B T"], rule: Rule = PLAIN
) -> Bool[Array, "#B #K 1 T S"]:
    """Whether each query sees each slot: the slot is filled, not in the future, and inside the sliding window."""
    s, t = pos[:, :, None, None, :], q_pos[:, None, None, :, None]
    ok = (s >= 0) & (s <= t)
    return ok if rule.window is None else ok & (s > t - rule.window)


def weights(
    s: Float32[Array, "*rest S"],
) -> tuple[Float32[Array, "*rest S"], Float32[Array, "*rest"], Float32[Array, "*rest"]]:
    """Softmax without the division.

    Args:
      s: logits, MASKED_LOGIT where masked.

    Returns:
      (unnormalized weights, 0 where masked; the largest logit; the sum of the weights).
    """
    # No result depends on m, and its own gradient would be 0 / 0 where XLA computes s twice with other roundings.
    m = lax.stop_gradient(jnp.max(s, -1))
    # Where all are masked, m is the masked logit itself and exp(s - m) would be 1: hence the mask, taken from s.
    p = jnp.where(s > MASKED_LOGIT / 2, jnp.exp(s - m[..., None]), 0.0)
    return p, m, p.sum(-1)


def softmax(s: Float32[Array, "*rest S"], sinks: Float[Array, "..."] | None = None) -> Float32[Array, "*rest S"]:
    """Returns the weights of logits, for scorers: 0 where masked, and all 0 where all are masked.

    Args:
      s: logits, MASKED_LOGIT where masked.
      sinks: logits that take weight too and get none returned; None for none. Their axes are the first ones of `s`,
        where a size of 1 stands for all: those of `Observation.sinks`, [B K G], are the first of [B K G T S].
    """
    p, m, l = weights(s)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(*sinks.shape, *(1,) * (m.ndim - sinks.ndim))
        top = lax.stop_gradient(jnp.maximum(m, sink))
        shrink = jnp.exp(m - top)
        p, l = p * shrink[..., None], l * shrink + jnp.exp(sink - top)
    return p / jnp.maximum(l, 1e-30)[..., None]


def mix(p: Float32[Array, "B K G T S"], v: Float[Array, "B K S Hv"]) -> Float32[Array, "B K G T Hv"]:
    """Sums values by weights."""
    # Weights are rounded to the values' dtype, as in FlashAttention: a product of two 16-bit arrays is what matrix
    # units are fast at, and the weights, at most 1, lose less than the values already have.
    return jnp.einsum("bkgts,bksh->bkgth", p.astype(v.dtype), v, preferred_element_type=jnp.float32)


def attend_scores(s: Float32[Array, "B K G T S"], v: Float[Array, "B K S Hv"]) -> Partial:
    """Attends by scores, MASKED_LOGIT where masked."""
    p, m, l = weights(s)
    return Partial(mix(p, v), m, l)


def attend_dense(
    q: Float[Array, "B K G T H"],
    block: KVBlock,
    q_pos: Int32[Array, "B T"],
    rule: Rule = PLAIN,
    pattern: AttentionPattern | None = None,
) -> Partial:
    """Attends queries at the positions `q_pos` to the slots of a block; holds all T x S scores at once."""
    readable = None
    if pattern is not None:
        readable = pattern.is_visible(block.pos[:, :, None, None, :], q_pos[:, None, None, :, None])
    s = rule.logits(scores(q, block.k), block.pos, q_pos, block.bias, readable)
    return attend_scores(_mask_skipped(s, pattern) if isinstance(pattern, TileSkipping) else s, block.v)


def _mask_skipped(s: Float32[Array, "B K G T S"], pattern: TileSkipping) -> Float32[Array, "B K G T S"]:
    """Masks the tiles that queries skip; slots are positions, as in a prompt."""
    tiles = jnp.moveaxis(split_blocks(s, 4, pattern.tile, MASKED_LOGIT), 0, 4)  # [B K G T tiles n]
    largest = tiles.max(-1)
    # A skipped tile has no largest logit so far, so that those of all tiles before are those of the read ones.
    before = lax.cummax(jnp.pad(largest, [(0, 0)] * 4 + [(1, 0)], constant_values=MASKED_LOGIT)[..., :-1], 4)
    masked = jnp.where(pattern.skips(largest, before)[..., None], MASKED_LOGIT, tiles)
    return masked.reshape(*s.shape[:4], -1)[..., : s.shape[4]]


def combine(a: Partial, b: Partial) -> Partial:
    """Adds two partials over disjoint slots (log-sum-exp rule; Milakov & Gimelshein, 2018)."""
    m = jnp.maximum(a.m, b.m)
    x, y = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return Partial(x[..., None] * a.o + y[..., None] * b.o, m, x * a.l + y * b.l)


def merge(parts: list[Partial]) -> Float32[Array, "B K G T Hv"]:
    """Returns the attention output of partials over disjoint slots, exact for any partition of the slots."""
    p = functools.reduce(combine, parts)
    # A padding query sees no slot: its sum is 0, and its output 0 instead of NaN.
    return p.o / jnp.maximum(p.l, 1e-30)[..., None]


def weight_share(lse: Float32[Array, "B K G T"], others: Float32[Array, "#B K G #T"]) -> Float32[Array, "B K G T"]:
    """Computes the fraction of each query's weight that one part of its softmax takes.

    Args:
      lse: the log-sum-exp of the logits of this part.
      others: that of all other logits.
    """
    # exp(lse) / (exp(lse) + exp(others))
    return jax.nn.sigmoid(lse - others)


def sink_partial(sinks: Float[Array, "#B K G"], q: Float[Array, "B K G T H"], value_dim: int) -> Partial:
    """Returns the attention to a learned sink of each query head: a logit that takes weight and gives no value.

    Args:
      sinks: the logits (gpt-oss).
      q: the queries that attend to them; only its shape is read.
      value_dim: width of the values that others give.
    """
    m = jnp.broadcast_to(sinks.astype(jnp.float32)[..., None], q.shape[:4])
    return Partial(jnp.zeros((*q.shape[:4], value_dim), jnp.float32), m, jnp.ones_like(m))


def log_sum_exp(m: Float32[Array, "*rest"], l: Float32[Array, "*rest"]) -> Float32[Array, "*rest"]:
    """Log of a softmax's denominator, from its largest logit and its sum: a weight is exp(logit - this)."""
    return m + jnp.log(jnp.maximum(l, 1e-30))


def causal_attention(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    start: Int32[Array, ""] | np.integer | int = 0,
    rule: Rule = PLAIN,
    *,
    block: int = 512,
    pattern: AttentionPattern | None = None,
    sinks: Float[Array, "1 K G"] | None = None,
) -> Float[Array, "B K G T Hv"]:
    """Returns the output of `causal_attention_with_lse` alone."""
    return causal_attention_with_lse(q, k, v, start, rule, block=block, pattern=pattern, sinks=sinks)[0]


def causal_attention_with_lse(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    start: Int32[Array, ""] | np.integer | int = 0,
    rule: Rule = PLAIN,
    *,
    block: int = 512,
    pattern: AttentionPattern | None = None,
    sinks: Float[Array, "1 K G"] | None = None,
    lengths: Int32[Array, " B"] | None = None,
) -> tuple[Float[Array, "B K G T Hv"], Float32[Array, "B K G T"]]:
    """Computes exact causal attention block by block: memory grows with `block`, never with T x S.

    Padding on the right needs no mask: it lies in the future of every real query. Key blocks that no query of a block
    may read, for causality, window or pattern, are skipped.

    Args:
      q: queries at positions start..start+T-1.
      k: keys at positions 0..S-1; those after the last query are not read.
      v: values.
      start: position of the first query.
      rule: the layer's window and soft cap.
      block: queries and keys of a block, at most.
      pattern: sparse attention; None for all earlier tokens.
      sinks: learned logits of query heads that take weight and give no value; None for none.
      lengths: of the prompts, for a `TileChoosing`, whose choice must not depend on padding; None: all T queries.

    Returns:
      (outputs in q's dtype; the log-sum-exp of each query's logits, the sink's among them).

    Reference:
      FlashAttention, Dao et al. 2022, arXiv 2205.14135
    """
    if sinks is not None:
        out, lse = causal_attention_with_lse(q, k, v, start, rule, block=block, pattern=pattern, lengths=lengths)
        sink_lse = sinks.astype(jnp.float32)[..., None]
        out_with_sinks = out.astype(jnp.float32) * weight_share(lse, sink_lse)[..., None]
        return out_with_sinks.astype(out.dtype), jnp.logaddexp(lse, sink_lse)
    if q.shape[0] != 1 and jax.default_backend() == "cpu":
        # One sequence at a time: a CPU's allocator takes a buffer as large as the scores of a whole batch from the
        # system anew at every call.
        attend = functools.partial(causal_attention_with_lse, start=start, rule=rule, block=block, pattern=pattern)

        def attend_sequence(xs: tuple[Array, Array, Array, Array | None]) -> tuple[Array, Array]:
            q, k, v, length = jax.tree.map(lambda x: x[None], xs)
            return attend(q, k, v, lengths=length)

        out, lse = lax.map(attend_sequence, (q, k, v, lengths))
        return out[:, 0], lse[:, 0]
    (B, K, G, T, _), dtype = q.shape, q.dtype
    if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" and not has_matrix_unit():
        # Such a CPU multiplies float32 numbers faster: 512 queries of nine heads of 64 take 13 ms instead of 20.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    if isinstance(pattern, TileChoosing):
        lengths = jnp.full(B, start + T, jnp.int32) if lengths is None else lengths
        out, lse = _attend_chosen(q, k, v, start, rule, pattern, lengths, block)
        return out.astype(dtype), lse
    # As many blocks as `block` asks for, of equal size: a short last one would be padded to a whole one.
    q_block, k_block = (-(-n // -(-n // block)) for n in (T, k.shape[2]))
    if isinstance(pattern, TileSkipping):
        k_block = pattern.tile
    queries = split_blocks(q, 3, q_block)
    k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % k_block), (0, 0)]) for x in (k, v))
    keys = _KeyBlocks(k, v, k_block, rule, pattern)

    def attend_block(_: None, xs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        i, q = xs
        partial = keys.attend(q, start + i * q_block + jnp.arange(q_block))
        return None, (merge([partial]).astype(dtype), log_sum_exp(partial.m, partial.l))

    _, (out, lse) = lax.scan(attend_block, None, (jnp.arange(len(queries)), queries))
    out, lse = jnp.moveaxis(out, 0, 3).reshape(B, K, G, -1, v.shape[3]), jnp.moveaxis(lse, 0, 3).reshape(B, K, G, -1)
    return out[:, :, :, :T], lse[..., :T]


def _attend_chosen(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    start: Int32[Array, ""] | np.integer | int,
    rule: Rule,
    pattern: TileChoosing,
    lengths: Int32[Array, " B"],
    block: int,
) -> tuple[Float32[Array, "B K G T Hv"], Float32[Array, "B K G T"]]:
    """Attends each tile of queries to the keys that a pattern chooses, `block` keys at a time.

    Every head reads its own first `block` chosen keys in the first step, and so on: steps end with the head that reads
    the most, and not with the keys that any head reads.
    """
    (B, K, G, T, H), S, size = q.shape, k.shape[2], pattern.tile
    choose = pattern.choose_keys(lax.stop_gradient(q), lax.stop_gradient(k), start, lengths)
    # Constants vary from here on: JAX cannot mark them inside a branch that `vmap` turns into a selection.
    keys = KVBlock(k, v, vary(jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, 1, S))))
    num_tiles = -(-S // size)
    tile, offset = (jnp.arange(n, dtype=jnp.int32)[None, None, None] for n in (num_tiles, size))

    def attend_tile(_: None, xs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        i, q = xs
        first = jnp.int32(start) + i * size
        t = vary(first + jnp.arange(size, dtype=jnp.int32)[None])
        tiles, columns = choose(lax.stop_gradient(q), first)
        # Chosen tiles first, in order. A tile after the last query is none, as is a padded end of the keys.
        chosen = tiles & (tile * size <= t[0, -1])
        order = jnp.sort(jnp.where(chosen, tile, num_tiles), -1)
        slots = (order[..., None] * size + offset[..., None, :]).reshape(B, K, G, -1)
        if columns is not None:
            # A column in a chosen tile would count twice.
            in_tile = jnp.take_along_axis(chosen, jnp.maximum(columns, 0) // size, 3)
            is_read = (columns >= 0) & (columns <= t[0, -1]) & ~in_tile
            slots = jnp.concatenate([slots, jnp.sort(jnp.where(is_read, columns, S), -1)], 3)
        slots = jnp.where(slots < S, slots, -1)
        heads = q.reshape(B, K * G, 1, -1, H)  # each with keys of its own

        def add_keys(acc: Partial, slots: Array) -> tuple[Partial, None]:
            def add(acc: Partial) -> Partial:
                read = gather_tokens(keys, slots.reshape(B, K, -1))
                by_head = jax.tree.map(lambda x: x.reshape(B, K * G, slots.shape[3], *x.shape[3:]), read)
                s = rule.logits(scores(heads, by_head.k), by_head.pos, t)
                return combine(acc, attend_scores(s, by_head.v))

            return lax.cond((slots >= 0).any(), add, lambda acc: acc, acc), None

        zero = Partial(
            jnp.zeros((*heads.shape[:4], v.shape[3]), jnp.float32),
            jnp.full(heads.shape[:4], MASKED_LOGIT),
            jnp.zeros(heads.shape[:4]),
        )
        num_blocks = -(-slots.shape[3] // block)
        blocks = split_blocks(slots, 3, -(-slots.shape[3] // num_blocks), -1)
        partial = lax.scan(add_keys, vary(zero), blocks)[0]
        return None, (merge([partial]), log_sum_exp(partial.m, partial.l))

    queries = split_blocks(q, 3, size)
    _, (out, lse) = lax.scan(attend_tile, None, (jnp.arange(len(queries), dtype=jnp.int32), queries))
    out = jnp.moveaxis(out[:, :, :, 0], 0, 2).reshape(B, K, G, -1, v.shape[3])
    return out[:, :, :, :T], jnp.moveaxis(lse[:, :, :, 0], 0, 2).reshape(B, K, G, -1)[..., :T]


def split_blocks(x: Array, axis: int, n: int, padding: float = 0) -> Array:
    """Splits an axis into (count, n), the last block padded; `count` becomes the first axis, as `lax.map` needs it."""
    x = jnp.pad(x, [(0, -x.shape[axis] % n if i == axis else 0) for i in range(x.ndim)], constant_values=padding)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, n, *x.shape[axis + 1 :]), axis, 0)


class _KeyBlocks(NamedTuple):
    """All keys and values, read block by block."""

    k: Float[Array, "B K S H"]  # S whole blocks
    v: Float[Array, "B K S Hv"]
    size: int  # tokens of a block
    rule: Rule
    pattern: AttentionPattern | None

    def attend(self, q: Float[Array, "B K G T H"], t: Int32[Array, " T"]) -> Partial:
        """Attends a block of queries at the positions t to all key blocks."""

        def add_block(acc: Partial, j: Array) -> tuple[Partial, None]:
            first = j * self.size
            last = first + self.size - 1
            some, every = first <= t[-1], last <= t[0]  # whether any, and whether all pairs are visible
            if (window := self.rule.window) is not None:
                some, every = some & (last > t[0] - window), every & (first > t[-1] - window)
            if self.pattern is not None:
                some_read, every_read = self.pattern.block_visibility(first, last, t[0], t[-1])
                some, every = some & some_read, every & every_read
            # A block that every query sees whole needs no mask: most blocks of a long prompt.
            add = functools.partial(self._add_block, q, t)
            branches = (
                lambda acc, first: acc,
                lambda acc, first: add(acc, first, masked=True),
                lambda acc, first: add(acc, first, masked=False),
            )
            branch = some.astype(jnp.int32) + (some & every).astype(jnp.int32)
            return lax.switch(branch, branches, acc, first), None

        zero_out = jnp.zeros((*q.shape[:-1], self.v.shape[3]), jnp.float32)
        zero = Partial(zero_out, jnp.full(q.shape[:-1], MASKED_LOGIT), jnp.zeros(q.shape[:-1]))
        return lax.scan(add_block, vary(zero), jnp.arange(self.k.shape[2] // self.size))[0]

    def _add_block(
        self, q: Float[Array, "B K G T H"], t: Int32[Array, " T"], acc: Partial, first: Int32[Array, ""], masked: bool
    ) -> Partial:
        """Adds the key block from `first` on to the partial of the blocks before it (online softmax)."""
        # Sliced here and not scanned over: a scan would first write all keys anew, with the axis of blocks in front.
        k, v = (lax.dynamic_slice_in_dim(x, first, self.size, 2) for x in (self.k, self.v))
        s, scale = _dot_products(q, k), q.shape[-1] ** -0.5
        if self.rule.soft_cap is not None:
            s, scale = self.rule.cap(s * scale), 1.0
        if masked:
            s_pos, t_pos = (first + jnp.arange(self.size))[None, None], t[None]
            mask = visible(s_pos, t_pos, self.rule)
            if self.pattern is not None:
                mask &= self.pattern.is_visible(s_pos[:, :, None, None, :], t_pos[:, None, None, :, None])
            s = jnp.where(mask, s, MASKED_LOGIT)
        # Scaled after the maximum: otherwise XLA:CPU writes a scaled copy of all scores to take it.
        largest = lax.stop_gradient(s.max(-1) * scale)
        m = jnp.maximum(acc.m, largest)

        def add(acc: Partial, skipped: Array | None) -> Partial:
            # A query that sees no slot yet adds weights of exp(0) here. Its own token, its last at the latest, gives it
            # a real maximum, and `shrink` is then exp(MASKED_LOGIT * scale) = 0.
            p, shrink = jnp.exp(s * scale - m[..., None]), jnp.exp(acc.m - m)
            p = p if skipped is None else jnp.where(skipped[..., None], 0.0, p)
            return Partial(acc.o * shrink[..., None] + mix(p, v), m, acc.l * shrink + p.sum(-1))

        if not isinstance(self.pattern, TileSkipping):
            return add(acc, None)
        skipped = self.pattern.skips(largest, acc.m)
        return lax.cond(skipped.all(), lambda acc: acc, lambda acc: add(acc, skipped), acc)
