"""The first tokens as they came, and all others as another codec holds them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.codecs.base import CodecWrapper
from kvjax.core import attention, memory
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError


@pytree
class PrefixState:
    """All slots in another codec, and the first ones exactly as well."""

    rows: Any
    first: Array  # [B K P H]


@dataclasses.dataclass(frozen=True)
class ExactPrefix(CodecWrapper):
    """The first `count` slots exactly, and those behind them as `inner` holds them.

    Attention sinks are among a text's first tokens, and their keys are unlike all others (KVQuant, Hooper et al. 2024,
    arXiv 2401.18079, attention-sink-aware quantisation). They are held by both codecs, and read exactly.
    """

    count: int = 1

    def __post_init__(self):
        if self.count < 0:
            raise KvjaxError(f"the first tokens that are held exactly must be 0 or more, got {self.count}; 1 is usual")

    def encode_prompt(self, x: Array, pos: Array, observation: Observation | None) -> PrefixState:
        return PrefixState(self.inner.encode_prompt(x, pos, observation), self._first(x, pos))

    def encode(self, x: Array, pos: Array) -> PrefixState:
        return PrefixState(self.inner.encode(x, pos), self._first(x, pos))

    def append(self, stored: PrefixState, x: Array, at: Array) -> PrefixState:
        # What lies behind the first slots is dropped.
        return PrefixState(self.inner.append(stored.rows, x, at), memory.put(stored.first, x, at))

    def decode(self, stored: PrefixState) -> Array:
        others = self.inner.decode(stored.rows)[:, :, stored.first.shape[2] :]
        return jnp.concatenate([stored.first, others], 2)

    def gather(self, stored: PrefixState, idx: Array) -> Array:
        others, places = self.inner.gather(stored.rows, idx), stored.first.shape[2]
        if not places:
            return others
        exact = memory.take(stored.first, jnp.clip(idx, 0, places - 1))
        return jnp.where((idx < places)[..., None], exact, others)

    def load(self, stored: PrefixState) -> PrefixState:
        return dataclasses.replace(stored, rows=self.inner.load(stored.rows))

    def scores(self, q: Array, stored: PrefixState) -> Array:
        others = self.inner.scores(q, stored.rows)[..., stored.first.shape[2] :]
        return jnp.concatenate([attention.scores(q, stored.first), others], 4)

    def mix(self, p: Array, stored: PrefixState) -> Array:
        places = stored.first.shape[2]
        first = jnp.arange(p.shape[4], dtype=jnp.int32) < places
        others = self.inner.mix(jnp.where(first[None, None, None, None], 0.0, p), stored.rows)
        return others + attention.mix(p[..., :places], stored.first)

    def num_committed(self, stored: PrefixState, n: Array) -> Array:
        return self.inner.num_committed(stored.rows, n)

    def _first(self, x: Array, pos: Array) -> Array:
        """Of x [B K S H] the first slots, zeros in empty ones."""
        exact = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        return exact[:, :, : self.count]
