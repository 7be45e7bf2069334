"""SpeCache's reading: low-bit slots on the device, exact rows fetched from the host one step ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.hold.codecs import Codec
from kvjax.cache.hold.groups import Kivi
from kvjax.cache.read.readers import Reader
from kvjax.core.attention import NEG, combine, partial, scores, visible, weights
from kvjax.core.types import Array, Block, KvjaxError, Partial, pytree


@pytree
class Copy:
    """What the device holds: the low-bit copy of all slots, and the exact rows that were fetched for the next step."""

    k: Any  # stored by the reader's key codec
    v: Any  # stored by the reader's value codec
    rows: Fetched | None


@pytree
class Fetched:
    """Exact rows k, v [B K n H] of the slots idx i32[B K n], -1 where there is none."""

    k: Array
    v: Array
    idx: Array


@dataclasses.dataclass(frozen=True)
class Speculative(Reader):
    """Low-bit slots, of which the topk heaviest are replaced by exact rows (SpeCache, arXiv 2503.16163, section 3.3).

    k, v: codecs of the low-bit copy; only slots that they hold inexactly are candidates. reduce: "mean" or "max" over
    the query heads of a key/value head, of their softmax weights (the paper has no grouped heads).
    speculative: the rows were chosen and fetched in the step before, at the word of its last query (a guessed next
    token); False: they are chosen by this step's own query and fetched while it waits (the paper's Table 4).
    """

    topk: int
    k: Codec = Kivi(1, axis="channel")
    v: Codec = Kivi(1, axis="token")
    reduce: str = "mean"
    speculative: bool = True

    def __post_init__(self):
        if self.topk < 1:
            raise KvjaxError(f"topk must be at least 1 row per head, got {self.topk}; the paper uses 64")
        if self.reduce not in ("mean", "max"):
            raise KvjaxError(f"reduce must be 'mean' or 'max', got {self.reduce!r}")

    @property
    def lookahead(self) -> int:
        return int(self.speculative)

    stepwise = True

    def begin(self, block: Block) -> Copy:
        B, K, S, H = block.k.shape
        copy = Copy(self.k.encode(block.k, block.pos), self.v.encode(block.v, block.pos), None)
        if not self.speculative:
            return copy
        n = min(self.topk, S)
        empty = jnp.zeros((B, K, n, H), block.k.dtype)
        return dataclasses.replace(copy, rows=Fetched(empty, empty, jnp.full((B, K, n), -1, jnp.int32)))

    def write(self, aux: Copy, fresh: Block, at: Array) -> Copy:
        return dataclasses.replace(aux, k=self.k.write(aux.k, fresh.k, at), v=self.v.write(aux.v, fresh.v, at))

    def read(self, k, v, state, q, q_pos, window, guessed=None) -> tuple[Partial, Copy]:
        aux, T = state.aux, q.shape[3]
        if T > 2:
            raise KvjaxError(
                f"a step carries one token and at most one guess, got {T} tokens: no tree or beam of guesses"
            )
        s = jnp.where(visible(state.pos, q_pos, window), self.k.scores(q, aux.k), NEG)
        if not self.speculative:
            low, m, l = weights(s)
            mass = self._over_group(low[:, :, :, 0] / jnp.maximum(l[:, :, :, :1], 1e-30))
            rows = self._fetch(k, v, state, mass, self.k.settled(state.n - 1))
        else:
            rows = aux.rows
        part, mass = self._mixed(state, s, q, rows, q_pos, window, guessed)
        if self.speculative:
            with jax.named_scope("prefetch"):  # nothing else in this step waits for it
                new = self._fetch(k, v, state, mass, self.k.settled(state.n))
                real = (q_pos[:, -1] >= 0)[:, None, None]
                pick = lambda a, b: jnp.where(real if a.ndim == 3 else real[..., None], a, b)  # noqa: E731
                aux = dataclasses.replace(aux, rows=jax.tree.map(pick, new, aux.rows))
        return part, aux

    def _mixed(self, state, s, q, rows, q_pos, window, guessed) -> tuple[Partial, Array]:
        """Attention over low-bit and fetched slots; and the last query's weight of each slot, f32[B K S]."""
        pos = jnp.broadcast_to(state.pos, (*rows.idx.shape[:2], state.pos.shape[2]))
        at = jnp.where(rows.idx >= 0, jnp.take_along_axis(pos, jnp.maximum(rows.idx, 0), 2), -1)
        hot = jnp.where(visible(at, q_pos, window), scores(q, rows.k), NEG)  # [B K G T n]
        slot = jnp.where(rows.idx >= 0, rows.idx, s.shape[-1])
        replaced = _put(jnp.zeros((*slot.shape[:2], s.shape[-1]), bool), slot, True)
        p, m, l = weights(jnp.where(replaced[:, :, None, None], NEG, s))
        fetched = partial(hot, rows.v)
        part = combine(Partial(self.v.mix(p, state.aux.v), m, l), fetched)
        total = part if guessed is None else combine(part, guessed)
        share = lambda p, m: p * (jnp.exp(m - total.m) / jnp.maximum(total.l, 1e-30))[..., None]  # noqa: E731
        last = lambda x: self._over_group(x[:, :, :, -1])  # noqa: E731
        cold = last(share(p, m))
        warm = last(share(jnp.where(hot > NEG / 2, jnp.exp(hot - fetched.m[..., None]), 0.0), fetched.m))
        return part, _put(cold, slot, warm)

    def _over_group(self, w: Array) -> Array:
        """Weights f32[B K G S] -> f32[B K S]."""
        return w.mean(2) if self.reduce == "mean" else w.max(2)

    def _fetch(self, k: Codec, v: Codec, state, mass: Array, candidates: Array) -> Fetched:
        """The topk heaviest of the first candidates i32[B] slots; ties go to the lower one."""
        slot = jnp.arange(mass.shape[-1], dtype=jnp.int32)[None, None]
        open_ = (slot < candidates[:, None, None]) & (state.pos >= 0)
        found, idx = lax.top_k(jnp.where(open_, mass, -1.0), min(self.topk, mass.shape[-1]))
        idx = jnp.where(found >= 0, idx, -1)
        at = jnp.maximum(idx, 0)
        return Fetched(k.rows(state.k, at), v.rows(state.v, at), idx)


def _put(x: Array, idx: Array, value: Any) -> Array:
    """x [B K S] with value at idx i32[B K n]; what lies outside is dropped."""
    B, K, _ = x.shape
    return x.at[jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], idx].set(value, mode="drop")
