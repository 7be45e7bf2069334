"""ZipCache: stores all tokens in few bits, and the least salient ones in fewer."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.codecs.chunk_quant import Channelwise, SeparableTokenwise


@dataclasses.dataclass(frozen=True)
class ProbeAttention(kv.Scorer):
    """Scores by normalized attention from a few prompt queries, the newest and random ones (ZipCache, 2405.14256).

    A token's score is the attention that the probes pay it, over the number of queries that can see it.

    Args:
      share: fraction of the newest queries that are probes, rounded up, and fraction of all that are drawn from the
        others, rounded down, without replacement, by seed and position alone.
      normalise: the queries that are counted: "queries", all of them (the public code), or "probes".
      seed: seed of the random probes.
    """

    num_queries: ClassVar[int | None] = None
    share: Annotated[float, kv.Within("(0, 1]")] = 0.05
    normalise: Literal["queries", "probes"] = "queries"
    seed: int = 0

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        observation = self.require_observation(observation)
        probe_attention, number = self.probe_attention(block, observation, spec)
        if self.normalise == "queries":
            number = observation.pos.max(-1)[:, None, None] - block.pos + 1
            number = (number if spec.rule.window is None else jnp.minimum(number, spec.rule.window)).astype(jnp.float32)
        heads = probe_attention / jnp.maximum(number, 1.0)[:, :, None]
        return kv.head_scores(heads, heads.mean(2), block)

    def probe_attention(
        self, block: kv.KVBlock, observation: kv.Observation, spec: kv.LayerSpec
    ) -> tuple[kv.Array, kv.Array]:
        """Sums the probes' attention to each token, f32[B K G S], and counts the probes that see it, f32[B 1|K S]."""
        probes = self._take_probes(observation)
        return kv.attention_mass(block, probes, (probes.pos >= 0).astype(jnp.float32), spec.rule)

    def _take_probes(self, observation: kv.Observation) -> kv.Observation:
        """Takes the queries that are probes, in order."""
        Q = observation.pos.shape[1]
        length = (observation.pos >= 0).sum(-1, dtype=jnp.int32)
        first = length + kv.fraction_of(self.share, -length)  # of the newest
        draws = (kv.draw(self.seed, observation.pos) >> 8).astype(jnp.float32)
        is_random = kv.top_k_mask(
            draws, (observation.pos >= 0) & (observation.pos < first[:, None]), kv.fraction_of(self.share, length)
        )
        slot = jnp.where(is_random | (observation.pos >= first[:, None]), jnp.arange(Q, dtype=jnp.int32)[None], Q)
        slot = jnp.sort(slot, -1)[:, : kv.fraction_of(self.share, Q) - kv.fraction_of(self.share, -Q)]
        at = jnp.minimum(slot, Q - 1)
        q = jnp.take_along_axis(observation.q, at[:, None, None, :, None], 3)
        pos = jnp.where(slot < Q, jnp.take_along_axis(observation.pos, at, 1), -1)
        return kv.Observation(q, pos, sinks=observation.sinks)


@kv.register_method(family="quantization by channel and group")
def zipcache(
    share: float = 0.4,
    low: int = 2,
    high: int = 4,
    every: int = 100,
    probes: Annotated[float, kv.Within("(0, 1]")] = 0.05,
    normalise: Literal["queries", "probes"] = "queries",
    seed: int = 0,
) -> kv.Method:
    """Quantizes a prompt's keys by channel and values by token, the least salient tokens to fewer bits.

    Attention in the prompt is exact.

    Formula:
      s_i = sum over probes of A_i / number of queries that see token i; the lowest 40 % of a head in 2 bits, the others
      in 4; K by channel, V by token after division by sqrt(max |V|) of each channel

    Differs:
      Decoded tokens take `high` bits each, where the public code ranks a chunk of them by its last query and gives the
      fraction `share` of it `low` bits, 3.2 in the mean: 512 tokens and an answer of 512 take 37% of the exact cache's
      bytes, and a prompt of 1,024 34% (SmolLM2-135M, where the answer takes 0.022 bits per byte more than under the
      exact cache; 4 contexts). It also codes all earlier tokens again with every chunk, from what it had decoded, where
      here a token is coded once. Values have a minimum and a scale for each token and head, where the public code has
      one for all heads (of different tokens, as each head ranks its own); probes are drawn without replacement;
      statistics never mix sequences.

    Args:
      share: fraction of each head's prompt tokens, the least salient, in `low` bits (the public code: 40 %).
      low: bits of the least salient tokens (the public code: 2).
      high: bits of the other tokens (the public code: 4).
      every: decoded tokens that stay exact until they fill a chunk, which is quantized to `high` bits (100).
      probes: fraction of the prompt's queries from which saliency comes, twice: the newest, and some drawn by `seed` (5
        %).
      normalise: the divisor of the attention that a token receives: "queries", all that see it (the public code), or
        "probes", all probes that do.
      seed: seed of the drawn probes.

    Reference:
      ZipCache, He et al. 2024, arXiv 2405.14256; constants of its authors' code
    """
    tier = kv.ScoredTiers(ProbeAttention(probes, normalise, seed), share, Channelwise(low), SeparableTokenwise(low))
    return kv.Method(side_store=tier, k=Channelwise(high, every), v=SeparableTokenwise(high, every))
