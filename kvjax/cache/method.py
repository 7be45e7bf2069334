"""A KV-cache method as a value: what becomes of a prompt's keys and values, and of each token after it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.contract import LayerState
from kvjax.cache.hold.codecs import Codec, Host, Plain
from kvjax.cache.read.readers import Full, Reader
from kvjax.cache.select.eviction import Eviction
from kvjax.core import memory
from kvjax.core.attention import attend_dense, combine, merge
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block, IncompatibleMethod, KvjaxError
from kvjax.methods import recompress as again
from kvjax.methods.kvcrush import Rest
from kvjax.models.config import Config


@dataclasses.dataclass(frozen=True)
class Method:
    """What is stored where, and what a query reads; every combination is a value.

    select: which of a prompt's tokens are kept at all; what is decoded is kept in any case, one row a token. rest: how
    a share of the selection goes to tokens that stand for the lost ones. again: whenever so many tokens have been
    decoded, select again (0: never). k, v: codecs of keys and values. read: which slots a query reads. device_layers:
    so many first layers stay on the device and are read in full (KCache, section 4.1). name: how reports call it.
    """

    select: Eviction | None = None
    rest: Rest | None = None
    k: Codec = Plain()
    v: Codec = Plain()
    read: Reader = Full()
    again: int = 0
    device_layers: int = 0
    name: str = dataclasses.field(default="", compare=False)

    def __post_init__(self):
        if self.again < 0:
            raise KvjaxError(f"again must be 0 (never) or a number of tokens, got {self.again}")
        if self.device_layers < 0:
            raise KvjaxError(f"device_layers must be 0 or more layers, got {self.device_layers}")

    restricted = False  # the prompt's attention is exact
    composable = True  # its slots can be filled by another method

    @property
    def queries(self) -> int | None:
        """How many of a row's last prompt queries `prefill` wants to see; None: all."""
        return self.select.scorer.queries if self.select else 0

    @property
    def uses_host(self) -> bool:
        """Whether any layer keeps something in host memory."""
        return isinstance(self.k, Host) or isinstance(self.v, Host)

    @property
    def lookahead(self) -> int:
        """Guessed tokens that each decode step carries beside the true one."""
        return self.read.lookahead

    def plan(self, config: Config) -> tuple[Method, ...]:
        """One method per layer."""
        layers = config.layers
        if self.device_layers > layers:
            raise KvjaxError(f"device_layers={self.device_layers} but the model has {layers} layers; use 0..{layers}")
        if self.rest and not self.select:
            raise IncompatibleMethod(
                f"{self.name or self.rest} spends a share of an eviction method's budget and has none to stand on; "
                "compose it with one, as in 'snapkv:budget=256 + kvcrush'"
            )
        rest = dataclasses.replace(self, device_layers=0, name="")
        first = dataclasses.replace(rest, k=self.k.on_device(), v=self.v.on_device(), read=Full())
        plan = (first,) * self.device_layers + (rest,) * (layers - self.device_layers)
        if self.select:
            plan = tuple(dataclasses.replace(m, select=self.select.at(i, config)) for i, m in enumerate(plan))
        if self.again:
            for layer in plan:
                again.check(layer)
        return plan

    def kept(self, length: int) -> int:
        """Slots that a prompt of this many tokens takes in this layer."""
        return self.select.kept(length) if self.select else length

    def prefill(self, block: Block, slots: int, obs: Obs | None = None) -> LayerState:
        """The state after a prompt: block [B K T H], rows left-aligned, seen by the queries obs; `slots` are needed."""
        if self.again:
            slots = min(slots, self.select.target + self.again)
        if self.select:
            block = self.select(block, obs, min(slots, block.pos.shape[2]), self.rest)
        grow = [(0, 0), (0, 0), (0, slots - block.pos.shape[2])]
        k, v = (jnp.pad(x, [*grow, (0, 0)]) for x in (block.k, block.v))
        block = Block(k, v, jnp.pad(block.pos, grow, constant_values=-1))
        n = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        k, v = self.k.encode(block.k, block.pos), self.v.encode(block.v, block.pos)
        return LayerState(k, v, block.pos, n, self.read.begin(block), again.begin(obs) if self.again else None)

    def extend(
        self, state: LayerState, q: Array, k: Array, v: Array, q_pos: Array, commit: int, window: int | None = None
    ) -> tuple[Array, LayerState]:
        """Attends T fresh tokens to past and fresh ones, and keeps the first `commit` of them.

        q [B K G T H]; k, v [B K T H]; q_pos i32[B T], -1 for padding on the right. Returns out f32[B K G T H].
        A chunk of T tokens gives what T single steps give.
        """
        T = q.shape[3]
        if commit > 1 and (self.k.stepwise or self.v.stepwise or self.read.stepwise or self.again):
            return self._extend_singly(state, q, k, v, q_pos, commit, window)
        fresh = Block(k, v, q_pos[:, None])
        if self.again and commit:
            state = again.see(state, q[:, :, :, :1], q_pos[:, :1])
            state = again.compress(self, state)
        with jax.named_scope("append"):
            state = self._append(state, jax.tree.map(lambda x: x[:, :, :commit], fresh))
        with jax.named_scope("read"):
            guessed = None
            if commit < T:
                guessed = attend_dense(q, jax.tree.map(lambda x: x[:, :, commit:], fresh), q_pos, window)
            part, aux = self.read.read(self.k, self.v, state, q, q_pos, window, guessed)
        return merge([part if guessed is None else combine(part, guessed)]), dataclasses.replace(state, aux=aux)

    def _extend_singly(self, state, q, k, v, q_pos, commit, window):
        if commit < q.shape[3]:
            raise KvjaxError(
                f"this method keeps 0, 1 or all of a chunk's tokens, got commit={commit} of {q.shape[3]}: it holds one "
                "sequence per row, and no tree or beam of guesses"
            )

        def step(state, xs):
            q, k, v, q_pos = (jnp.expand_dims(x, a) for x, a in zip(xs, (3, 2, 2, 1), strict=True))
            out, state = self.extend(state, q, k, v, q_pos, 1, window)
            return state, out[:, :, :, 0]

        xs = tuple(jnp.moveaxis(x, a, 0) for x, a in zip((q, k, v, q_pos), (3, 2, 2, 1), strict=True))
        state, out = lax.scan(step, state, xs)
        return jnp.moveaxis(out, 0, 3), state

    def _append(self, state: LayerState, fresh: Block) -> LayerState:
        pos = jnp.broadcast_to(fresh.pos, (*state.pos.shape[:2], fresh.pos.shape[2]))
        return dataclasses.replace(
            state,
            k=self.k.write(state.k, fresh.k, state.n),
            v=self.v.write(state.v, fresh.v, state.n),
            pos=memory.put(state.pos, pos, state.n),
            n=state.n + (fresh.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32),
            aux=self.read.write(state.aux, fresh, state.n),
        )
