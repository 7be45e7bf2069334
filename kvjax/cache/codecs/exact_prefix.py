"""A codec that stores the first tokens exactly, and all others by an inner codec."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.codecs import ring_order
from kvjax.cache.codecs.plain import CodecWrapper
from kvjax.cache.components import Codec
from kvjax.core import attention, memory
from kvjax.core.attention_mass import Observation
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array, pytree
from kvjax.utils.parameter_types import NonNegativeInt, check_fields


@pytree
class PrefixState:
    """All slots by the inner codec, and the first ones exactly as well."""

    inner: Any
    first: Array  # [B K P H]
    n: Array | None = None  # i32[B], tokens that were written, with padding, in all rounds of a ring


@dataclasses.dataclass(frozen=True)
class ExactPrefix(CodecWrapper):
    """Stores and reads the first `count` tokens exactly.

    Attention sinks are among a text's first tokens, and their keys are unlike all others (KVQuant, Hooper et al. 2024,
    arXiv 2401.18079, attention-sink-aware quantization). The inner codec stores them too, so that its slots and its
    groups are those of the cache, but they are never read from there.
    """

    count: NonNegativeInt = 1

    __post_init__ = check_fields

    @property
    def ring_room(self) -> int:
        return max(self.inner.ring_room, self.count)

    def in_ring(self, num_slots: int) -> Codec:
        return ExactPrefixRing(self.inner.in_ring(num_slots), self.count, num_slots)

    def encode_prompt(self, x: Array, pos: Array, observation: Observation | None) -> PrefixState:
        first = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))[:, :, : self.count]
        return PrefixState(self.inner.encode_prompt(x, pos, observation), first)

    def encode(self, x: Array, pos: Array) -> PrefixState:
        return self.encode_prompt(x, pos, None)

    def append(self, stored: PrefixState, x: Array, at: Array) -> PrefixState:
        # `put` drops the tokens that lie after the prefix.
        return PrefixState(self.inner.append(stored.inner, x, at), memory.put(stored.first, x, at))

    def decode(self, stored: PrefixState) -> Array:
        others = self.inner.decode(stored.inner)[:, :, stored.first.shape[2] :]
        return jnp.concatenate([stored.first, others], 2)

    def gather(self, stored: PrefixState, idx: Array) -> Array:
        others, num_exact = self.inner.gather(stored.inner, idx), stored.first.shape[2]
        if not num_exact:
            return others
        exact = memory.take(stored.first, jnp.clip(idx, 0, num_exact - 1))
        return jnp.where((idx < num_exact)[..., None], exact, others)

    def load(self, stored: PrefixState) -> PrefixState:
        return dataclasses.replace(stored, inner=self.inner.load(stored.inner))

    def scores(self, q: Array, stored: PrefixState) -> Array:
        others = self.inner.scores(q, stored.inner)[..., stored.first.shape[2] :]
        return jnp.concatenate([attention.scores(q, stored.first), others], 4)

    def mix(self, p: Array, stored: PrefixState) -> Array:
        num_exact = stored.first.shape[2]
        is_exact = jnp.arange(p.shape[4], dtype=jnp.int32) < num_exact
        others = self.inner.mix(jnp.where(is_exact[None, None, None, None], 0.0, p), stored.inner)
        return others + attention.mix(p[..., :num_exact], stored.first)

    def read_bytes(self, stored: PrefixState, tokens: int | None = None) -> StepBytes:
        return self.inner.read_bytes(stored.inner, tokens) + StepBytes.of_all(stored.first)

    def num_committed(self, stored: PrefixState, n: Array) -> Array:
        return self.inner.num_committed(stored.inner, n)


@dataclasses.dataclass(frozen=True)
class ExactPrefixRing(ExactPrefix):
    """`ExactPrefix` in a ring, where other tokens take the slots of the first ones in the second round.

    It cannot tell the rounds of a long prompt. What it then takes for the first tokens are the oldest in the ring,
    which are out of sight.

    Args:
      num_slots: of the ring. With fewer slots nothing is ever overwritten.
    """

    num_slots: int = 0

    def encode_prompt(self, x: Array, pos: Array, observation: Observation | None) -> PrefixState:
        n = ring_order.count_tokens(pos, self.num_slots)
        return dataclasses.replace(super().encode_prompt(x, pos, observation), n=n)

    def append(self, stored: PrefixState, x: Array, at: Array) -> PrefixState:
        assert stored.n is not None  # as `encode_prompt` counts
        token = ring_order.nearest_token(at, stored.n[:, None], self.num_slots)
        n = jnp.maximum(stored.n, token[:, 0] + x.shape[2])
        return PrefixState(self.inner.append(stored.inner, x, at), memory.put(stored.first, x, token), n)

    def decode(self, stored: PrefixState) -> Array:
        x = self.inner.decode(stored.inner)
        num_exact = stored.first.shape[2]
        first = jnp.where(self._are_first(stored)[:, None, :, None], stored.first, x[:, :, :num_exact])
        return jnp.concatenate([first, x[:, :, num_exact:]], 2)

    def gather(self, stored: PrefixState, idx: Array) -> Array:
        others, num_exact = self.inner.gather(stored.inner, idx), stored.first.shape[2]
        if not num_exact:
            return others
        place = jnp.clip(idx, 0, num_exact - 1)
        is_first = jnp.take_along_axis(self._are_first(stored)[:, None], place, 2) & (idx < num_exact)
        return jnp.where(is_first[..., None], memory.take(stored.first, place), others)

    def scores(self, q: Array, stored: PrefixState) -> Array:
        s, num_exact = self.inner.scores(q, stored.inner), stored.first.shape[2]
        are_first = self._are_first(stored)[:, None, None, None]
        first = jnp.where(are_first, attention.scores(q, stored.first), s[..., :num_exact])
        return jnp.concatenate([first, s[..., num_exact:]], 4)

    def mix(self, p: Array, stored: PrefixState) -> Array:
        num_exact = stored.first.shape[2]
        are_first = self._are_first(stored)[:, None, None, None]
        exact = jnp.where(are_first, p[..., :num_exact], 0.0)
        others = jnp.concatenate([jnp.where(are_first, 0.0, p[..., :num_exact]), p[..., num_exact:]], 4)
        return self.inner.mix(others, stored.inner) + attention.mix(exact, stored.first)

    def _are_first(self, stored: PrefixState) -> Array:
        """bool[B P]: whether a slot still holds the token of the first round."""
        assert stored.n is not None
        return stored.n[:, None] <= self.num_slots + jnp.arange(stored.first.shape[2], dtype=jnp.int32)[None]
