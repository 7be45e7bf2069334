"""StreamingLLM: the first tokens and the most recent ones, in constant memory for a text without end."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.decode.online import Kept, at_least, clean, need_config, put_at, put_rows, turn, turn_queries
from kvjax.cache.read.readers import by_query_blocks
from kvjax.core import memory
from kvjax.core.attention import NEG, merge, partial, scores, visible
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block, Partial
from kvjax.models.config import Config


@dataclasses.dataclass(frozen=True)
class StreamingLLM:
    """Keeps the first `sinks` tokens and the last `recent` ones (Xiao et al. 2023, arXiv 2309.17453, section 3.2).

    Forward first, then evict: a query attends to sinks + recent tokens and to itself, so there are sinks + recent + 1
    slots, and token p lives in slot p, or sinks + (p - sinks) mod (recent + 1). A prompt is attended in full; then
    only these tokens are kept. reindex: positions are indices inside the cache (the paper), so a text may grow beyond
    what the model was trained for; keys are held without RoPE, which is undone once, in float32, from the true
    position, and applied at every read in float32. That costs one more rounding of a key to its dtype (a relative
    2**-9 per element in bfloat16, 2**-24 in float32) and it never accumulates. False: true positions, and keys as they
    came (kvpress and KVCache-Factory). A layer with a sliding window also hides what has left that window, sinks too.
    """

    recent: int
    sinks: int = 4
    reindex: bool = True
    config: Config | None = None  # for RoPE; `plan` sets it
    name: str = dataclasses.field(default="", compare=False)

    queries = 0
    lookahead = 0
    restricted = False
    uses_host = False

    def __post_init__(self):
        at_least("StreamingLLM", recent=(self.recent, 0), sinks=(self.sinks, 0))

    @property
    def budget(self) -> int:
        """Past tokens that a query sees."""
        return self.sinks + self.recent

    def plan(self, config: Config) -> tuple[StreamingLLM, ...]:
        """One method per layer."""
        return (dataclasses.replace(self, config=config, name=""),) * config.layers

    def kept(self, length: int) -> int:
        """Slots that a prompt of this many tokens takes."""
        return min(length, self.budget)

    def prefill(self, block: Block, slots: int, obs: Obs | None = None) -> Kept:
        """The state after a prompt, block [B K T H]; its size does not depend on `slots`."""
        B, K, _, H = block.k.shape
        S = self.budget + 1
        zeros = memory.pack(jnp.zeros((B, K, S, H), block.k.dtype))
        state = Kept(zeros, zeros, jnp.full((B, 1, S), -1, jnp.int32))
        return self._expired(self._write(state, self._bare(clean(block))))

    def extend(
        self, state: Kept, q: Array, k: Array, v: Array, q_pos: Array, commit: int, window: int | None = None
    ) -> tuple[Array, Kept]:
        """Attends T fresh tokens to past and fresh ones, and keeps the first `commit` of them.

        q [B K G T H]; k, v [B K T H]; q_pos i32[B T], -1 for padding on the right. Returns out f32[B K G T H].
        """
        fresh = self._bare(clean(Block(k, v, q_pos[:, None])))
        if q.shape[3] == commit == 1:  # it takes the place of a token that is gone: written first, then read once
            state = self._write(state, fresh)
            return merge([self._read(_block(state), q, q_pos, window)]), self._expired(state)
        parts = [self._read(_block(state), q, q_pos, window), self._read(fresh, q, q_pos, window)]
        return merge(parts), self._expired(self._write(state, jax.tree.map(lambda x: x[:, :, :commit], fresh)))

    def _bare(self, block: Block) -> Block:
        """The block with keys as they are held."""
        if not self.reindex:
            return block
        k = turn(block.k, need_config(self.config, "StreamingLLM"), block.pos[:, 0], back=True)
        return dataclasses.replace(block, k=k.astype(block.k.dtype))

    def _write(self, state: Kept, fresh: Block) -> Kept:
        if not fresh.pos.shape[2]:
            return state
        pos, ring = fresh.pos, self.recent + 1
        last = pos.max(2, keepdims=True)
        stays = (pos >= 0) & ((pos < self.sinks) | (pos > last - ring))
        slot = jnp.where(pos < self.sinks, pos, self.sinks + (pos - self.sinks) % ring)
        slot = jnp.where(stays, slot, -1)
        k, v = put_rows(state.k, fresh.k, slot), put_rows(state.v, fresh.v, slot)
        return Kept(k, v, put_at(state.pos, pos, slot))

    def _expired(self, state: Kept) -> Kept:
        """Without the token that the last query has seen and the next one will not."""
        gone = (state.pos >= self.sinks) & (state.pos <= state.pos.max(2, keepdims=True) - self.recent)
        return dataclasses.replace(state, pos=jnp.where(gone, -1, state.pos))

    def _read(self, block: Block, q: Array, q_pos: Array, window: int | None) -> Partial:
        sink = block.pos < self.sinks
        base = jnp.maximum(q_pos[:, :1] - self.budget, 0)  # index 0 of the ring, as the first query sees it
        keys = block.k
        if self.reindex:
            pos = block.pos[:, 0]
            keys = turn(keys, self.config, jnp.where(sink[:, 0], pos, pos - base))

        def attend(q, t):
            ok = visible(block.pos, t, window)
            near = block.pos[:, :, None, None] >= t[:, None, None, :, None] - self.recent
            ok &= near | sink[:, :, None, None]
            return partial(jnp.where(ok, self._scores(q, t, base, keys, sink), NEG), block.v)

        return by_query_blocks(attend, q, q_pos, 512)

    def _scores(self, q: Array, t: Array, base: Array, keys: Array, sink: Array) -> Array:
        if not self.reindex:
            return scores(q, keys)
        bare = turn_queries(q, self.config, t, back=True)
        to = lambda index: scores(turn_queries(bare, self.config, index), keys)  # noqa: E731
        if t.shape[1] == 1:
            return to(jnp.minimum(t, self.budget))
        # Seen from the chunk's first token, later queries lie beyond the cache's end; only sinks can tell.
        return jnp.where(sink[:, :, None, None], to(jnp.minimum(t, self.budget)), to(t - base))


def _block(state: Kept) -> Block:
    return Block(memory.unpack(state.k), memory.unpack(state.v), state.pos)
