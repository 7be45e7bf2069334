"""Attention as merged partials, and exact prefill attention that never builds an S x S array."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.mesh import vary
from kvjax.core.types import Array, KVBlock, Partial

MASKED_LOGIT = -1e30  # a masked logit: finite, so that a row without any slot stays free of NaN


@runtime_checkable
class AttentionPattern(Protocol):
    """Which earlier tokens a prompt's own queries read, by their positions: sparse attention of the prompt."""

    def is_visible(self, s: Array, t: Array) -> Array:
        """Whether a query at position t reads the key at position s, bool; a query always reads its own key."""
        ...

    def block_visibility(self, first: Array, last: Array, start: Array, end: Array) -> tuple[Array, Array]:
        """Of keys first..last and queries start..end: (whether any pair is read, whether all causal pairs are)."""
        ...


def scores(q: Array, k: Array) -> Array:
    """q [B K G T H], k [B K S H] -> scaled dot products f32[B K G T S]."""
    return _products(q, k) * q.shape[-1] ** -0.5


def _products(q: Array, k: Array) -> Array:
    """As `scores`, not scaled."""
    B, K, G, T, H = q.shape
    if G * T > 16:
        return jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
    # Few queries: with the keys as the second operand, XLA:CPU transposes all of them on every decode step.
    dims = (((3,), (3,)), ((0, 1), (0, 1)))
    s = lax.dot_general(k, q.reshape(B, K, G * T, H), dims, preferred_element_type=jnp.float32)
    return s.swapaxes(2, 3).reshape(B, K, G, T, -1)


def visible(pos: Array, q_pos: Array, window: int | None = None) -> Array:
    """pos i32[B K S], q_pos i32[B T] -> bool[B K 1 T S]: filled, not in the future, inside the window."""
    s, t = pos[:, :, None, None, :], q_pos[:, None, None, :, None]
    ok = (s >= 0) & (s <= t)
    return ok if window is None else ok & (s > t - window)


def weights(s: Array) -> tuple[Array, Array, Array]:
    """Scores f32[... S], NEG where masked -> (unnormalised weights, 0 where masked; the maximum m; the sum l)."""
    # No result depends on m, and its own gradient would be 0 / 0 where XLA computes s twice with other roundings.
    m = lax.stop_gradient(jnp.max(s, -1))
    p = jnp.where(s > MASKED_LOGIT / 2, jnp.exp(s - m[..., None]), 0.0)
    return p, m, p.sum(-1)


def mix(p: Array, v: Array) -> Array:
    """Weights f32[B K G T S], v [B K S H] -> f32[B K G T H]."""
    return jnp.einsum("bkgts,bksh->bkgth", p.astype(v.dtype), v, preferred_element_type=jnp.float32)


def partial(s: Array, v: Array) -> Partial:
    """Scores f32[B K G T S], NEG where masked, and values [B K S H] -> Partial."""
    p, m, l = weights(s)
    return Partial(mix(p, v), m, l)


def attend_dense(
    q: Array, block: KVBlock, q_pos: Array, window: int | None = None, pattern: AttentionPattern | None = None
) -> Partial:
    """q [B K G T H] at q_pos i32[B T] over the slots of a block -> Partial; holds all T x S scores at once."""
    s = scores(q, block.k)
    if block.bias is not None:
        s = s + block.bias[:, :, None, None]
    seen = visible(block.pos, q_pos, window)
    if pattern is not None:
        seen &= pattern.is_visible(block.pos[:, :, None, None, :], q_pos[:, None, None, :, None])
    return partial(jnp.where(seen, s, MASKED_LOGIT), block.v)


def combine(a: Partial, b: Partial) -> Partial:
    """Two partials over disjoint slots as one (log-sum-exp rule; Milakov & Gimelshein, 2018)."""
    m = jnp.maximum(a.m, b.m)
    x, y = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return Partial(x[..., None] * a.o + y[..., None] * b.o, m, x * a.l + y * b.l)


def merge(parts: list[Partial]) -> Array:
    """Partials over disjoint slots -> attention output f32[B K G T H]; exact for any partition."""
    p = functools.reduce(combine, parts)
    return p.o / jnp.maximum(p.l, 1e-30)[..., None]


def log_sum_exp(m: Array, l: Array) -> Array:
    """Of a softmax's maximum and sum, the log of its whole sum: a weight is exp(logit - this)."""
    return m + jnp.log(jnp.maximum(l, 1e-30))


def causal_attention(*of: Any, **how: Any) -> Array:
    """What `causal_attention_with_lse` gives, without the sums."""
    return causal_attention_with_lse(*of, **how)[0]


def causal_attention_with_lse(
    q: Array,
    k: Array,
    v: Array,
    start: Array | int = 0,
    window: int | None = None,
    block: int = 512,
    pattern: AttentionPattern | None = None,
) -> tuple[Array, Array]:
    """Exact causal attention in blocks: memory grows with `block`, never with T x S.

    q [B K G T H] at positions start..start+T-1; k, v [B K S H] at positions 0..S-1 (later slots are not read).
    Returns [B K G T H] in q's dtype, and the log of the sum of each query's softmax, f32[B K G T]. Right padding needs
    no mask: it lies in every real query's future. Online softmax over key blocks (FlashAttention; Dao et al., 2022);
    blocks wholly in the future or before the window are skipped, not masked, and so are those that a sparse `pattern`
    leaves out.
    """
    in_blocks = functools.partial(_in_blocks, start=start, window=window, block=block, pattern=pattern)
    if q.shape[0] == 1 or jax.default_backend() != "cpu":
        return in_blocks(q, k, v)

    def one(row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        return jax.tree.map(lambda x: x[0], in_blocks(row[0][None], row[1][None], row[2][None]))

    # Scores of all rows at once are a buffer so large that a CPU's allocator takes it from the system for every call.
    return lax.map(one, (q, k, v))


def _in_blocks(
    q: Array, k: Array, v: Array, start: Array | int, window: int | None, block: int, pattern: AttentionPattern | None
) -> tuple[Array, Array]:
    B, K, G, T, H = q.shape
    nq, nk = -(-T // block), -(-k.shape[2] // block)
    bq, bk = -(-T // nq), -(-k.shape[2] // nk)
    queries = jnp.moveaxis(_padded(q, nq * bq, 3).reshape(B, K, G, nq, bq, H), 3, 0)
    keys = _KeyBlocks(_padded(k, nk * bk, 2), _padded(v, nk * bk, 2), bk, window, pattern)

    def rows(_, xs):
        i, qi = xs
        found = keys.attend(qi, start + i * bq + jnp.arange(bq))
        return None, (merge([found]).astype(q.dtype), log_sum_exp(found.m, found.l))

    _, (out, sums) = lax.scan(rows, None, (jnp.arange(nq), queries))
    out = jnp.moveaxis(out, 0, 3).reshape(B, K, G, nq * bq, H)
    return out[:, :, :, :T], jnp.moveaxis(sums, 0, 3).reshape(B, K, G, nq * bq)[..., :T]


def _padded(x: Array, size: int, axis: int) -> Array:
    return jnp.pad(x, [(0, size - x.shape[a] if a == axis else 0) for a in range(x.ndim)])


class _KeyBlocks(NamedTuple):
    """All keys and values, in blocks, and which of them a query sees."""

    k: Array  # [B K S H], S whole blocks
    v: Array
    size: int
    window: int | None
    pattern: AttentionPattern | None

    def attend(self, q: Array, t: Array) -> Partial:
        """A block of queries [B K G T H] at the positions t [T] over all key blocks."""
        masked, whole = (functools.partial(self._onto, q, t, masked) for masked in (True, False))

        def columns(acc: Partial, j: Array) -> tuple[Partial, None]:
            first = j * self.size
            branches = (lambda acc, first: acc, masked, whole)
            return lax.switch(self._reach(first, t), branches, acc, first), None

        zero = Partial(jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], MASKED_LOGIT), jnp.zeros(q.shape[:-1]))
        return lax.scan(columns, vary(zero), jnp.arange(self.k.shape[2] // self.size))[0]

    def _reach(self, first: Array, t: Array) -> Array:
        """Of the block of keys from `first` on the queries see 0: nothing, 1: a part, 2: all."""
        last = first + self.size - 1
        needed, whole = first <= t[-1], last <= t[0]
        if self.window is not None:
            needed, whole = needed & (last > t[0] - self.window), whole & (first > t[-1] - self.window)
        if self.pattern is not None:
            some, every = self.pattern.block_visibility(first, last, t[0], t[-1])
            needed, whole = needed & some, whole & every
        return needed.astype(jnp.int32) + (needed & whole).astype(jnp.int32)

    def _onto(self, q: Array, t: Array, masked: bool, acc: Partial, first: Array) -> Partial:
        """The block of keys from `first` on, added to what the queries have of the blocks before it."""
        k, v = (lax.dynamic_slice_in_dim(x, first, self.size, 2) for x in (self.k, self.v))
        s, scale = _products(q, k), q.shape[-1] ** -0.5
        if masked:
            s = jnp.where(self._seen(first + jnp.arange(self.size), t), s, MASKED_LOGIT)
        # Scaled behind the maximum, or XLA:CPU writes all scores once more, scaled, to take it.
        m = jnp.maximum(acc.m, lax.stop_gradient(s.max(-1) * scale))
        # What a row without a visible slot adds here, its own slot (at the latest) multiplies by exp(NEG * scale).
        p, shrink = jnp.exp(s * scale - m[..., None]), jnp.exp(acc.m - m)
        return Partial(acc.o * shrink[..., None] + mix(p, v), m, acc.l * shrink + p.sum(-1))

    def _seen(self, key_pos: Array, t: Array) -> Array:
        seen = visible(key_pos[None, None], t[None], self.window)
        if self.pattern is None:
            return seen
        return seen & self.pattern.is_visible(key_pos[None, None, None, None], t[None, None, None, :, None])
