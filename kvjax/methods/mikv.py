"""MiKV: stores the tokens that an eviction method would drop in few bits instead."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.codecs.chunk_quant import Tokenwise
from kvjax.cache.codecs.prompt_adaptive import PromptAdaptiveKeys, PromptAdaptiveTiers


@kv.pytree
class BalancedKeys:
    """Keys times the weights of their channels."""

    inner: Any
    weight: kv.Array  # f32[B K 1 H]


@dataclasses.dataclass(frozen=True)
class ChannelBalancer(PromptAdaptiveKeys, kv.CodecWrapper):
    """Multiplies key channels by b = sqrt(max |q| / max |k|), and divides those of queries by it (MiKV, 2402.18096).

    Products are unchanged, and outliers are shared between queries and keys. The maxima are those of a prompt, over the
    query heads of a key/value head too. A channel that is zero in queries or keys has weight 1.

    Args:
      inner: the codec that stores the balanced keys.
    """

    num_queries: ClassVar[int | None] = None

    def fit_prompt(self, x: kv.Array, pos: kv.Array, observation: kv.Observation) -> kv.Array:
        """Computes the weights, f32[B K 1 H]."""
        is_query, is_key = (observation.pos >= 0)[:, None, None, :, None], (pos >= 0)[..., None]
        max_q = jnp.where(is_query, jnp.abs(observation.q.astype(jnp.float32)), 0.0).max((2, 3))[:, :, None]
        max_k = jnp.where(is_key, jnp.abs(x.astype(jnp.float32)), 0.0).max(2)[:, :, None]
        # Two roots, because the quotient of the maxima may overflow.
        both = (max_q > 0) & (max_k > 0)
        return jnp.where(both, jnp.sqrt(max_q) / jnp.sqrt(jnp.where(both, max_k, 1.0)), 1.0)

    def encode_with(self, x: kv.Array, pos: kv.Array, params: kv.Array) -> BalancedKeys:
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        return BalancedKeys(self.inner.encode(_scale(x, params), pos), params)

    def decode(self, stored: BalancedKeys) -> kv.Array:
        return _scale(self.inner.decode(stored.inner), 1 / stored.weight)

    def append(self, stored: BalancedKeys, x: kv.Array, at: kv.Array) -> BalancedKeys:
        return dataclasses.replace(stored, inner=self.inner.append(stored.inner, _scale(x, stored.weight), at))

    def gather(self, stored: BalancedKeys, idx: kv.Array) -> kv.Array:
        return _scale(self.inner.gather(stored.inner, idx), 1 / stored.weight)

    def scores(self, q: kv.Array, stored: BalancedKeys) -> kv.Array:
        return self.inner.scores(_scale(q, 1 / stored.weight[:, :, None]), stored.inner)


def _scale(x: kv.Array, weight: kv.Array) -> kv.Array:
    """Multiplies x by f32 weights, in x's dtype."""
    return (x.astype(jnp.float32) * weight).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class BalancedTier(PromptAdaptiveTiers, kv.ScoredTiers):
    """A low tier whose key channels are balanced by all queries and keys of the prompt."""


@kv.register_method(family="quantization by channel and group")
def mikv(
    share: float = 0.8, recent: float = 0.5, low: int = 2, high: int = 0, group: int = 0, balance: bool = True
) -> kv.Method:
    """Quantizes the least attended prompt tokens to few bits, with balanced channels, and stores the others exactly.

    Attention in the prompt is exact.

    Formula:
      s_i = attention that token i receives from all queries of the prompt; the lowest 80 % of a head, but not the
      newest, as code = round((x - min) / a), a = (max - min) / (2^bits - 1) by token, of k b with b_c = sqrt(max |q_c|
      / max |k_c|), read by q / b

    Differs:
      Decoded tokens stay in the high tier, n more for an answer of n tokens, and tokens never change their tier, where
      the paper moves them as their importance falls: 512 tokens and an answer of 512 take 68% of the exact cache's
      bytes, and a prompt of 1,024 34% (SmolLM2-135M, where the answer takes 0.048 bits per byte more than under the
      exact cache; 4 contexts). There is no public code. Unverified: the fraction, the group size, and that half of the
      high tier are the newest tokens.

    Args:
      share: fraction of each head's prompt tokens in the low tier.
      recent: fraction of the high tier that is reserved for the newest tokens (H2O: a half).
      low: bits of the low tier (the paper: 2, 3 or 4).
      high: bits of the high tier, each token vector by itself; 0 stores them exactly (the paper: 16 or 8).
      group: channels of a token that share a scale; 0 for all of them.
      balance: whether keys are weighted by channel.

    Reference:
      No Token Left Behind (MiKV), Yang et al. 2024, arXiv 2402.18096, sections 3.1 and 3.2
    """
    low_codec = Tokenwise(low, group=group)
    high_codec = kv.PerTokenCodec(kv.MinMax(high)) if high else kv.Plain()
    if balance:
        tier = BalancedTier(kv.AccumulatedAttention(), share, ChannelBalancer(low_codec), low_codec, recent)
    else:
        tier = kv.ScoredTiers(kv.AccumulatedAttention(), share, low_codec, low_codec, recent)
    return kv.Method(side_store=tier, k=high_codec, v=high_codec)
