"""A codec that stores the first tokens exactly, and all others by an inner codec."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.codecs.plain import CodecWrapper, in_window
from kvjax.cache.storage import Codec, ObservingCodec, encode_prompt
from kvjax.core import attention, memory
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, pytree
from kvjax.utils.parameter_types import NonNegativeInt, check_fields


@pytree
class PrefixState:
    """All slots by the inner codec, and the first ones exactly as well."""

    inner: Any
    first: Array  # [B K P H]


@dataclasses.dataclass(frozen=True)
class ExactPrefix(CodecWrapper, ObservingCodec):
    """Stores and reads the first `count` tokens exactly.

    Attention sinks are among a text's first tokens, and their keys are unlike all others (KVQuant, Hooper et al. 2024,
    arXiv 2401.18079, attention-sink-aware quantization). The inner codec stores them too, so that its slots and its
    groups are those of the cache, but they are never read from there.
    """

    count: NonNegativeInt = 1

    __post_init__ = check_fields

    def in_window(self, by_token: Codec) -> Codec:
        return in_window(self.inner, by_token)  # the first tokens leave the window

    def encode(self, x: Array, pos: Array, observation: Observation | None = None) -> PrefixState:
        first = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))[:, :, : self.count]
        return PrefixState(encode_prompt(self.inner, x, pos, observation), first)

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

    def scores(self, q: Array, stored: PrefixState) -> Array:
        others = self.inner.scores(q, stored.inner)[..., stored.first.shape[2] :]
        return jnp.concatenate([attention.scores(q, stored.first), others], 4)

    def mix(self, p: Array, stored: PrefixState) -> Array:
        num_exact = stored.first.shape[2]
        is_exact = jnp.arange(p.shape[4], dtype=jnp.int32) < num_exact
        # The inner codec has the first tokens as well, in its own numbers: there they get no weight.
        others = self.inner.mix(jnp.where(is_exact[None, None, None, None], 0.0, p), stored.inner)
        return others + attention.mix(p[..., :num_exact], stored.first)
