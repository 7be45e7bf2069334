"""A KV-cache method as a value: what becomes of a prompt's keys and values, and of each token after it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvjax import memory
from kvjax.attention import attend_dense, merge
from kvjax.kv.codecs import Codec, Host, Plain
from kvjax.kv.readers import Full, Reader
from kvjax.kv.state import LayerState
from kvjax.types import Array, Block, KvjaxError


@dataclasses.dataclass(frozen=True)
class Method:
    """What is stored where, and what a query reads; every combination is a value.

    k, v: codecs of keys and values. read: which slots a query reads. tail: that many recent tokens stay dense and
    are flushed to the body as one group (0: tokens go straight to the body). device_layers: so many first layers
    stay on the device and are read in full (KCache, section 4.1). name: how reports call it.
    """

    k: Codec = Plain()
    v: Codec = Plain()
    read: Reader = Full()
    tail: int = 0
    device_layers: int = 0
    name: str = dataclasses.field(default="", compare=False)

    def __post_init__(self):
        if self.tail < 0:
            raise KvjaxError(f"tail must be 0 or more tokens, got {self.tail}")
        if self.device_layers < 0:
            raise KvjaxError(f"device_layers must be 0 or more layers, got {self.device_layers}")

    @property
    def uses_host(self) -> bool:
        """Whether any layer keeps something in host memory."""
        return isinstance(self.k, Host) or isinstance(self.v, Host)

    def plan(self, layers: int) -> tuple[Method, ...]:
        """One method per layer."""
        if self.device_layers > layers:
            raise KvjaxError(f"device_layers={self.device_layers} but the model has {layers} layers; use 0..{layers}")
        first = dataclasses.replace(
            self, k=self.k.on_device(), v=self.v.on_device(), read=Full(), device_layers=0, name=""
        )
        rest = dataclasses.replace(self, device_layers=0, name="")
        return (first,) * self.device_layers + (rest,) * (layers - self.device_layers)

    def body_slots(self, capacity: int) -> int:
        """S for a capacity in tokens: whole groups when there is a tail."""
        return -(-capacity // self.tail) * self.tail if self.tail else capacity

    def prefill(self, block: Block, capacity: int) -> LayerState:
        """The state after a prompt: block [B K T H], rows left-aligned, with room for `capacity` tokens in all."""
        S, T, R = self.body_slots(capacity), block.pos.shape[2], self.tail
        n = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        tail, tail_n = (None, None) if not R else _last(block, n % R, n, R)
        if R:
            n = n - tail_n
            block = dataclasses.replace(
                block, pos=jnp.where(jnp.arange(T)[None, None] < n[:, None, None], block.pos, -1)
            )
        grow = [(0, 0), (0, 0), (0, S - T)]
        pos = jnp.pad(block.pos, grow, constant_values=-1)
        k, v = (codec.encode(jnp.pad(x, [*grow, (0, 0)]), pos) for codec, x in ((self.k, block.k), (self.v, block.v)))
        return LayerState(k, v, pos, n, tail, tail_n)

    def extend(
        self, state: LayerState, q: Array, k: Array, v: Array, q_pos: Array, commit: int, window: int | None = None
    ) -> tuple[Array, LayerState]:
        """Attends T fresh tokens to past and fresh ones, and keeps the first `commit` of them.

        q [B K G T H]; k, v [B K T H]; q_pos i32[B T], -1 for padding on the right. Returns out f32[B K G T H].
        A chunk of T tokens gives what T single steps give.
        """
        T = q.shape[3]
        if self.tail and commit > 1:  # a flush may be due between any two tokens of the chunk
            return self._extend_singly(state, q, k, v, q_pos, commit, window)
        fresh = Block(k, v, q_pos[:, None])
        with jax.named_scope("append"):
            state = self._append(state, jax.tree.map(lambda x: x[:, :, :commit], fresh))
        with jax.named_scope("read"):
            parts = [self.read.read(self.k, self.v, state, q, q_pos, window)]
            if self.tail:
                parts.append(attend_dense(q, state.tail, q_pos, window))
            if commit < T:
                parts.append(attend_dense(q, jax.tree.map(lambda x: x[:, :, commit:], fresh), q_pos, window))
        return merge(parts), state

    def _extend_singly(self, state, q, k, v, q_pos, commit, window):
        if commit < q.shape[3]:
            raise KvjaxError(f"a method with a tail keeps 0, 1 or all of a chunk's tokens, got commit={commit}")

        def step(state, xs):
            q, k, v, q_pos = (jnp.expand_dims(x, a) for x, a in zip(xs, (3, 2, 2, 1), strict=True))
            out, state = self.extend(state, q, k, v, q_pos, 1, window)
            return state, out[:, :, :, 0]

        xs = tuple(jnp.moveaxis(x, a, 0) for x, a in zip((q, k, v, q_pos), (3, 2, 2, 1), strict=True))
        state, out = lax.scan(step, state, xs)
        return jnp.moveaxis(out, 0, 3), state

    def _append(self, state: LayerState, fresh: Block) -> LayerState:
        if not self.tail:
            return self._write(state, fresh, state.n)
        due = (state.tail_n == self.tail) & (fresh.pos[:, 0, 0] >= 0)
        state = lax.cond(due.any(), lambda s: self._flush(s, due), lambda s: s, state)
        at = state.tail_n
        tail = jax.tree.map(lambda a, x: memory.put(a, x, at), state.tail, fresh)
        return dataclasses.replace(state, tail=tail, tail_n=at + (fresh.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32))

    def _flush(self, state: LayerState, due: Array) -> LayerState:
        # Rows that are not due write too, beyond their last slot, where the next write goes anyway; only pos counts.
        pos = jnp.where(due[:, None, None], state.tail.pos, -1)
        state = self._write(state, dataclasses.replace(state.tail, pos=pos), state.n)
        empty = jnp.where(due[:, None, None], -1, state.tail.pos)
        return dataclasses.replace(
            state, tail=dataclasses.replace(state.tail, pos=empty), tail_n=jnp.where(due, 0, state.tail_n)
        )

    def _write(self, state: LayerState, fresh: Block, at: Array) -> LayerState:
        pos = jnp.broadcast_to(fresh.pos, (*state.pos.shape[:2], fresh.pos.shape[2]))
        return dataclasses.replace(
            state,
            k=self.k.write(state.k, fresh.k, at),
            v=self.v.write(state.v, fresh.v, at),
            pos=memory.put(state.pos, pos, at),
            n=at + (fresh.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32),
        )


def _last(block: Block, count: Array, n: Array, R: int) -> tuple[Block, Array]:
    """The last count i32[B] of n i32[B] tokens of each row, at the front of R slots."""
    T = block.pos.shape[2]
    idx = jnp.clip((n - count)[:, None] + jnp.arange(R)[None], 0, T - 1)[:, None]  # [B 1 R]
    take = lambda x: jnp.take_along_axis(x, idx[..., None] if x.ndim == 4 else idx, 2)  # noqa: E731
    tail = jax.tree.map(take, block)
    return dataclasses.replace(
        tail, pos=jnp.where(jnp.arange(R)[None, None] < count[:, None, None], tail.pos, -1)
    ), count
