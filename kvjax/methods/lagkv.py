"""LagKV: keeps the tokens that vary most relative to the tokens after them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.eviction.granularity import group_into_units

MIN_SPAN = 1e-6  # a channel with less between its extremes in a partition counts as constant


@dataclasses.dataclass(frozen=True)
class LagKV(kv.Scorer):
    """Scores a token by its variation within the range of the next partition (arXiv 2504.04704).

    After its `sinks` a sequence is cut into partitions of `lag` tokens. Each channel of a token's key is normalized to
    the range of that channel in the next partition; the standard deviation over the channels, as a softmax over the
    token's own partition, is the key's score. Values are scored alike, and the mean of both counts. Tokens without a
    whole partition after theirs have no score: they outrank all others, the later the higher, and the sinks outrank
    these. A channel that is constant in the next partition counts 0 for every token. The fields are arguments of
    `lagkv`.
    """

    lag: kv.PositiveInt = 128
    sinks: int = 4
    cross: bool = False

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        real = block.clean()
        keys, values = (group_into_units(x.astype(jnp.float32), self.sinks, self.lag, 2) for x in (real.k, real.v))
        scored = (_spread(keys) + _spread(values)) / 2
        if not self.cross:
            scored = scored.argsort(-1).argsort(-1).astype(jnp.float32) / self.lag
        B, K, S = block.k.shape[:3]
        scored = jnp.pad(scored.reshape(B, K, -1), [(0, 0), (0, 0), (self.sinks, S)])[:, :, :S]
        slot = jnp.arange(S, dtype=jnp.int32)[None, None]
        length = (block.pos >= 0).sum(2, keepdims=True, dtype=jnp.int32)
        recency = slot.astype(jnp.float32) / jnp.maximum(length, 1).astype(jnp.float32)
        unscored = jnp.where(slot < self.sinks, 2.0, 1.0 + recency)
        end_of_next = self.sinks + ((slot - self.sinks) // self.lag + 2) * self.lag
        return kv.token_scores(jnp.where((slot >= self.sinks) & (end_of_next <= length), scored, unscored), block)


def _spread(x: kv.Array) -> kv.Array:
    """Scores the tokens of all partitions x [B K U c H] but the last: f32[B K U-1 c]."""
    scored, following = x[:, :, :-1], x[:, :, 1:]
    low = following.min(3, keepdims=True)
    span = following.max(3, keepdims=True) - low
    normalized = jnp.where(span > MIN_SPAN, (scored - low) / jnp.maximum(span, MIN_SPAN), 0.0)
    spread = normalized.std(-1, ddof=min(1, x.shape[-1] - 1))
    weight = jnp.exp(spread - spread.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


@kv.register_method(example="lagkv:budget=512", family="eviction after the prompt")
def lagkv(
    budget: kv.TokenBudget = 1024,
    lag: int = 128,
    sinks: int = 4,
    cross: bool = False,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens that stand out from the tokens that follow them; it needs no queries.

    'lagkv + recompress:every=128' goes on while decoding.

    Formula:
      x = (k - min_next) / (max_next - min_next) by channel, score = softmax over the partition of std(x); mean of key's
      and value's, ranked within the partition

    Differs:
      The authors compress each partition as soon as the next is full, also while decoding; here, as in kvpress, the
      prompt is compressed once. kvpress leaves ties among the unscored tokens to chance; here the later ones stay.

    Args:
      budget, unit, per: as in `make_selection`.
      lag: tokens of a partition; the last whole partition and what follows it stay before all others (kvpress: 128; the
        class in the authors' code: 1024).
      sinks: as in `make_selection` (kvpress: 4; the class in the authors' code: 16).
      cross: whether partitions compete with one another; otherwise a token's score is its rank in its partition, so
        that all partitions keep equally many.

    Reference:
      LagKV, Liang et al. 2025, arXiv 2504.04704; scored once after the prompt as in kvpress
    """
    return kv.Method(select=kv.make_selection(LagKV(lag, sinks, cross), budget, sinks, 0, unit, per))
