"""Keys whose channels are brought into balance with those of the queries before another codec holds them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from kvjax.cache.codecs.base import Codec
from kvjax.cache.codecs.prompt_adaptive import PromptAdaptiveKeys
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, pytree


@pytree
class Weighted:
    """Keys times the weights of their channels."""

    rows: Any  # stored by the inner codec
    weight: Array  # f32[B K 1 H]


@dataclasses.dataclass(frozen=True)
class ChannelBalancer(PromptAdaptiveKeys):
    """Channels are multiplied by b = sqrt(max |q| / max |k|) and those of queries divided by it (MiKV, 2402.18096).

    Products stay what they are, and outliers are shared between both. The maxima are those of a prompt, over the query
    heads of a key/value head too. A channel that is zero in queries or keys has weight 1.
    """

    inner: Codec

    num_queries: ClassVar[int | None] = None

    @property
    def sequential_writes(self) -> bool:
        return self.inner.sequential_writes

    @property
    def is_smooth(self) -> bool:
        return self.inner.is_smooth

    @property
    def supports_eviction(self) -> bool:
        return self.inner.supports_eviction

    def fit_prompt(self, x: Array, pos: Array, observation: Observation) -> Array:
        """f32[B K 1 H]: the weights."""
        asked = _largest(observation.q, (observation.pos >= 0)[:, None, None, :, None], (2, 3))[:, :, None]
        held = _largest(x, (pos >= 0)[..., None], (2,))[:, :, None]
        both = (asked > 0) & (held > 0)
        # The quotient itself may exceed what a number can be.
        return jnp.where(both, jnp.sqrt(asked) / jnp.sqrt(jnp.where(both, held, 1.0)), 1.0)

    def encode_with(self, x: Array, pos: Array, found: Array) -> Weighted:
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        return Weighted(self.inner.encode(_times(x, found), pos), found)

    def decode(self, stored: Weighted) -> Array:
        return _times(self.inner.decode(stored.rows), 1 / stored.weight)

    def append(self, stored: Weighted, x: Array, at: Array) -> Weighted:
        return dataclasses.replace(stored, rows=self.inner.append(stored.rows, _times(x, stored.weight), at))

    def gather(self, stored: Weighted, idx: Array) -> Array:
        return _times(self.inner.gather(stored.rows, idx), 1 / stored.weight)

    def load(self, stored: Weighted) -> Weighted:
        return dataclasses.replace(stored, rows=self.inner.load(stored.rows))

    def scores(self, q: Array, stored: Weighted) -> Array:
        return self.inner.scores(_times(q, 1 / stored.weight[:, :, None]), stored.rows)

    def num_quantized(self, n: Array) -> Array:
        return n

    def num_committed(self, stored: Weighted, n: Array) -> Array:
        return self.inner.num_committed(stored.rows, n)


def _largest(x: Array, real: Array, axes: tuple[int, ...]) -> Array:
    """The greatest |x| over these axes, where `real`: f32[B K H]."""
    return jnp.where(real, jnp.abs(x.astype(jnp.float32)), 0.0).max(axes)


def _times(x: Array, weight: Array) -> Array:
    """x times f32 weights, in x's dtype."""
    return (x.astype(jnp.float32) * weight).astype(x.dtype)
