"""InfLLM: a sliding window, and blocks of the past fetched from host memory by what their best keys say."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.decode.online import at_least, clean, gather, need, need_config, put_at, put_rows, turn, turn_queries
from kvjax.core import memory
from kvjax.core.attention import NEG, combine, mix, scores, visible, weights
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block, KvjaxError, Partial, pytree
from kvjax.models.config import Config


@pytree
class Memory:
    """The cache of one layer: sinks and a ring of recent tokens on the device, older blocks on the host."""

    k: memory.Buffer  # [B K S H] after RoPE: slots of the sinks, then the ring
    v: memory.Buffer  # [B K S H]
    pos: Array  # i32[B 1 S], -1 empty
    mass: Array  # f32[B K G S], attention received while inside the window
    n: Array  # i32[B], tokens seen
    formed: Array  # i32[B], blocks on the host
    blocks: memory.Buffer | None  # [B K blocks (tokens of a block * 2 H)], key without RoPE and value of each token
    keys: Array | None  # [B K G blocks H], the representative key of each block

    def positions(self) -> Array:
        """i32[B 1 n]: all tokens seen, since blocks on the host are never dropped; -1 beyond a row's own."""
        p = jnp.arange(self.n.max())[None, None]
        return jnp.where(p < self.n[:, None, None], p, -1)


@dataclasses.dataclass(frozen=True)
class InfLLM:
    """Sinks, a window, and the `topk` most relevant blocks of the past (Xiao et al. 2024, arXiv 2402.04617, section 3).

    Tokens come in chunks of at most `chunk` queries (one when decoding); a prompt too, so its attention is restricted.
    A query sees the tokens less than `local` behind it as they are. Everything older counts as far: the first `sinks`
    tokens, those that have not become a block yet, and the blocks looked up for the chunk. Far keys carry no RoPE and
    the query the angle of position local - 1, so all far tokens are equally distant. One softmax runs over both parts.
    After a chunk, while block + local tokens or more lie behind the sinks and the blocks, the oldest `block` of them
    become a block; it can be looked up from the next chunk on. Its key, per query head, is the mean of the keys without
    RoPE of the `representatives` tokens with the most attention mass, gathered over the queries that had them in their
    window. A lookup compares it with the mean query of the chunk at the far angle, summed over all heads: one set per
    layer, or per key/value head with per_head.

    What differs from the authors' code: blocks are always read from the host (no LRU cache of blocks on the device);
    per_head sums over the query heads of a key/value head instead of giving each its own set; of equal scores the
    older block comes first; a chunk is what one call brings (longer calls are cut every `chunk` tokens of a row), and
    tokens of a call that are not kept are looked up for as a chunk of their own. So a chunk of T tokens equals T single
    steps only as long as all blocks are taken. Keys lose one rounding to their dtype when RoPE is undone in float32.
    """

    block: int = 128
    sinks: int = 128
    local: int = 4096
    topk: int = 16
    representatives: int = 4
    chunk: int = 512
    per_head: bool = False
    config: Config | None = None  # for RoPE and head counts; `plan` sets it, and the layer's sliding window
    window: int | None = None
    name: str = dataclasses.field(default="", compare=False)

    queries = None  # `prefill` runs them again; a decoder calls `empty` and `extend` instead
    lookahead = 0
    restricted = True
    uses_host = True

    def __post_init__(self):
        fields = ("block", "local", "topk", "representatives", "chunk")
        at_least("InfLLM", sinks=(self.sinks, 0), **{name: (getattr(self, name), 1) for name in fields})
        if self.chunk > self.local:
            raise KvjaxError(f"chunk of InfLLM must not exceed local={self.local}, got {self.chunk}; use {self.local}")
        if self.representatives > self.block:
            raise KvjaxError(
                f"representatives of InfLLM must not exceed block={self.block}, got {self.representatives}; "
                f"use {self.block} or fewer"
            )

    def plan(self, config: Config) -> tuple[InfLLM, ...]:
        """One method per layer."""
        layer = lambda i: dataclasses.replace(self, config=config, window=config.window(i), name="")  # noqa: E731
        return tuple(layer(i) for i in range(config.layers))

    def kept(self, length: int) -> int:
        """Slots that a prompt of this many tokens takes."""
        return length

    def ring(self, slots: int) -> int:
        """Slots for recent tokens, with room for `slots` tokens per row: whole blocks, so that none wraps around.

        The window, an unfinished block, the last chunk and this one: tokens are written before blocks are cut, as the
        other order would copy the ring at every step.
        """
        most = self.local + self.block - 1 + 2 * self.chunk
        return -(-max(min(most, slots - self.sinks), 1) // self.block) * self.block

    def most_blocks(self, slots: int) -> int:
        """Blocks that `slots` tokens per row can form."""
        return max(slots - self.sinks - self.local, 0) // self.block

    def empty(self, batch: int, slots: int, dtype: jnp.dtype) -> Memory:
        """A state with room for `slots` tokens per row, before the first."""
        c = need_config(self.config, "InfLLM")
        B, K, G, H, N = batch, c.kv_heads, c.groups, c.head_dim, self.most_blocks(slots)
        S = self.sinks + self.ring(slots)
        rows = memory.pack(jnp.zeros((B, K, S, H), dtype))
        blocks = memory.pack(jnp.zeros((B, K, N, self.block * 2 * H), dtype), host=True) if N else None
        keys = jnp.zeros((B, K, G, N, H), dtype) if N else None
        zero = jnp.zeros(B, jnp.int32)
        mass = jnp.zeros((B, K, G, S), jnp.float32)
        return Memory(rows, rows, jnp.full((B, 1, S), -1, jnp.int32), mass, zero, zero, blocks, keys)

    def prefill(self, block: Block, slots: int, obs: Obs | None) -> Memory:
        """The state after a prompt, block [B K T H], whose queries are all in obs: `extend`, chunk by chunk."""
        q = need(obs, "InfLLM", "all queries").q
        state = self.empty(q.shape[0], slots, block.k.dtype)
        return self.extend(state, q, block.k, block.v, block.pos[:, 0], q.shape[3], self.window)[1]

    def extend(
        self, state: Memory, q: Array, k: Array, v: Array, q_pos: Array, commit: int, window: int | None = None
    ) -> tuple[Array, Memory]:
        """Attends a chunk of T fresh tokens to past and fresh ones, and keeps the first `commit` of them.

        q [B K G T H]; k, v [B K T H]; q_pos i32[B T], -1 for padding on the right. Returns out f32[B K G T H].
        """
        T = q.shape[3]
        if T - commit > self.chunk:
            raise KvjaxError(f"InfLLM keeps all but chunk={self.chunk} tokens of a call, got commit={commit} of {T}")
        fresh = clean(Block(k, v, q_pos[:, None]))
        split = lambda x, a: (lax.slice_in_dim(x, 0, commit, axis=a), lax.slice_in_dim(x, commit, T, axis=a))  # noqa: E731
        (q, ahead_q), (k, ahead_k), (v, ahead_v), (pos, ahead_pos) = (
            split(x, a) for x, a in ((q, 3), (fresh.k, 2), (fresh.v, 2), (fresh.pos, 2))
        )
        outs = []
        if commit:
            out, state = self._pieces(state, q, Block(k, v, pos), window)
            outs.append(out)
        else:
            state = self._form(state, state.n)
        if commit < T:
            ahead = Block(ahead_k, ahead_v, ahead_pos)
            outs.append(
                self._attend(state, ahead_q, ahead_pos[:, 0], min(T, self.chunk + T - commit), window, ahead)[0]
            )
        return outs[0] if len(outs) == 1 else jnp.concatenate(outs, 3), state

    def _pieces(self, state: Memory, q: Array, fresh: Block, window: int | None) -> tuple[Array, Memory]:
        """`_piece`, for every `chunk` tokens."""
        T, C = q.shape[3], self.chunk
        if T <= C:
            return self._piece(state, q, fresh, window)
        cut = functools.partial(_cut, n=C)
        xs = (cut(q, 3), Block(cut(fresh.k, 2), cut(fresh.v, 2), cut(fresh.pos, 2, fill=-1)))
        state, out = lax.scan(lambda s, x: self._piece(s, *x, window)[::-1], state, xs)
        return _join(out, T), state

    def _piece(self, state: Memory, q: Array, fresh: Block, window: int | None) -> tuple[Array, Memory]:
        """One chunk: written, then the blocks cut that the last one completed, then read: host writes come first."""
        state = self._form(self._write(state, fresh), state.n)
        out, mass = self._attend(state, q, fresh.pos[:, 0], q.shape[3], window)
        return out, dataclasses.replace(state, mass=state.mass + mass)

    def _write(self, state: Memory, fresh: Block) -> Memory:
        pos = fresh.pos
        slot = jnp.where(pos < 0, -1, self._slot(pos, state.pos.shape[2]))
        B, K, G, _ = state.mass.shape
        zero = jnp.zeros((B, K * G, pos.shape[2]), jnp.float32)
        return dataclasses.replace(
            state,
            k=put_rows(state.k, fresh.k, slot),
            v=put_rows(state.v, fresh.v, slot),
            pos=put_at(state.pos, pos, slot),
            mass=put_at(state.mass.reshape(B, K * G, -1), zero, slot).reshape(state.mass.shape),
            n=jnp.maximum(state.n, pos.max((1, 2)) + 1),
        )

    def _slot(self, pos: Array, S: int) -> Array:
        return jnp.where(pos < self.sinks, pos, self.sinks + (pos - self.sinks) % (S - self.sinks))

    def _form(self, state: Memory, n: Array) -> Memory:
        """Moves blocks of the first n i32[B] tokens to the host, until fewer than block + local of them are left."""
        if state.blocks is None:
            return state
        with jax.named_scope("form"):
            target = jnp.minimum((n - self.sinks - self.local) // self.block, state.keys.shape[3])
            due = lambda s: target > s.formed  # noqa: E731
            return lax.while_loop(lambda s: due(s).any(), lambda s: self._form_one(s, due(s)), state)

    def _form_one(self, state: Memory, due: Array) -> Memory:
        """One more block in every row that is due bool[B]."""
        at = state.formed
        B, K, G, N, H = state.keys.shape
        pos = self.sinks + at[:, None] * self.block + jnp.arange(self.block, dtype=jnp.int32)[None]
        slot = self._slot(pos, state.pos.shape[2])[:, None]  # [B 1 block]
        k, v = (gather(memory.unpack(x), slot) for x in (state.k, state.v))
        bare = turn(k, self.config, pos, back=True)
        mass = jnp.take_along_axis(state.mass, slot[:, :, None], 3)
        best = lax.top_k(mass, self.representatives)[1]  # [B K G r]
        key = jnp.take_along_axis(bare[:, :, None], best[..., None], 3).mean(3, keepdims=True)
        both = jnp.concatenate([bare.astype(v.dtype), v], -1).reshape(B, K, 1, -1)
        column = jnp.where(due, at, -1)[:, None, None]
        keys = put_at(state.keys.reshape(B, K * G, N, H), key.reshape(B, K * G, 1, H).astype(v.dtype), column)
        gone = jnp.where(due[:, None, None], slot, -1)
        return dataclasses.replace(
            state,
            pos=put_at(state.pos, jnp.full_like(slot, -1), gone),
            formed=at + due.astype(jnp.int32),
            blocks=memory.append(state.blocks, both, at, due),
            keys=keys.reshape(state.keys.shape),
        )

    def _attend(
        self, state: Memory, q: Array, t: Array, calls: int, window: int | None, ahead: Block | None = None
    ) -> tuple[Array, Array]:
        """out f32[B K G T H] of queries at t i32[B T], and the mass f32[B K G S] that the slots received.

        calls: most tokens since blocks were last formed. ahead: tokens that are read and not kept.
        """
        bare = turn_queries(q, self.config, t, back=True)
        far_q = turn_queries(bare, self.config, jnp.full_like(t, self.local - 1))
        held = Block(memory.unpack(state.k), memory.unpack(state.v), state.pos)
        near = [held] if ahead is None else [held, ahead]
        far = [self._left(state, held, calls)]
        if state.blocks is not None:
            far.append(self._recall(state, far_q, t))
        reach = self.local if window is None else min(self.local, window)

        def attend(q, far_q, t):
            old = lambda b: visible(b.pos, t, window) & ~visible(b.pos, t, self.local)  # noqa: E731
            s = [jnp.where(visible(b.pos, t, reach), scores(q, b.k), NEG) for b in near]
            s += [jnp.where(old(b), scores(far_q, b.k), NEG) for b in far]
            p = [weights(x) for x in s]
            parts = [Partial(mix(x, b.v), m, l) for (x, m, l), b in zip(p, near + far, strict=True)]
            total = functools.reduce(combine, parts)
            x, m, _ = p[0]
            l = jnp.maximum(total.l, 1e-30)[..., None]
            return total.o / l, (x * jnp.exp(m - total.m)[..., None] / l).sum(3)

        return _by_queries(attend, q, far_q, t)

    def _left(self, state: Memory, held: Block, calls: int) -> Block:
        """Sinks, and what is left behind the last block and may lie outside the window; keys without RoPE, f32."""
        S = state.pos.shape[2]
        first = self.sinks + state.formed * self.block
        count = min(self.block - 1 + calls, S - self.sinks)
        recent = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        early = jnp.broadcast_to(jnp.arange(self.sinks, dtype=jnp.int32)[None], (recent.shape[0], self.sinks))
        slot = jnp.concatenate([early, self._slot(recent, S)], 1)[:, None]
        k, v, pos = (gather(x, slot) for x in (held.k, held.v, held.pos))
        return Block(turn(k, self.config, pos[:, 0], back=True), v, pos)

    def _recall(self, state: Memory, far_q: Array, t: Array) -> Block:
        """The blocks looked up for the queries far_q f32[B K G T H]; of the host's blocks only these cross."""
        B, K, G, N, H = state.keys.shape
        real = (t >= 0)[:, None, None, :, None]
        mean = jnp.where(real, far_q, 0.0).sum(3) / jnp.maximum(real.sum(3, dtype=jnp.int32), 1).astype(jnp.float32)
        score = jnp.einsum("bkgh,bkgnh->bkn", mean, state.keys.astype(jnp.float32))
        score = score if self.per_head else score.sum(1, keepdims=True)
        score = jnp.where(jnp.arange(N)[None, None] < state.formed[:, None, None], score, -jnp.inf)
        best, idx = lax.top_k(score, min(self.topk, N))  # [B K|1 n]
        with jax.named_scope("recall"):
            rows = memory.rows(state.blocks, jnp.broadcast_to(idx, (B, K, idx.shape[2])))
        rows = rows.reshape(B, K, -1, 2 * H)
        pos = self.sinks + idx[..., None] * self.block + jnp.arange(self.block, dtype=jnp.int32)[None, None, None]
        pos = jnp.where((best > -jnp.inf)[..., None], pos, -1).reshape(B, idx.shape[1], -1)
        return Block(rows[..., :H].astype(jnp.float32), rows[..., H:], pos)


def _by_queries(attend, q: Array, far_q: Array, t: Array, n: int = 64) -> tuple[Array, Array]:
    """attend(q, far_q, t) -> (out, mass), n queries at a time: memory grows with n x S. mass is summed."""
    T = t.shape[1]
    if T <= n:
        return attend(q, far_q, t)
    xs = (_cut(q, 3, n), _cut(far_q, 3, n), _cut(t, 1, n, -1))
    like = jax.eval_shape(attend, *jax.tree.map(lambda x: x[0], xs))[1]

    def step(total, x):
        out, mass = attend(*x)
        return total + mass, out

    mass, out = lax.scan(step, jnp.zeros(like.shape, like.dtype), xs)
    return _join(out, T), mass


def _cut(x: Array, axis: int, n: int, fill: int = 0) -> Array:
    """An axis as (count, n), padded with `fill`; count comes first."""
    T = x.shape[axis]
    x = jnp.pad(x, [(0, -T % n if i == axis else 0) for i in range(x.ndim)], constant_values=fill)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, n, *x.shape[axis + 1 :]), axis, 0)


def _join(x: Array, T: int) -> Array:
    """[count B K G n H] -> [B K G T H]."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, x.shape[-1])[:, :, :, :T]
