"""ZipVL: ZipCache's two tiers, with as many important tokens as keep most of a layer's attention."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.codecs.chunk_quant import Channelwise, SeparableTokenwise
from kvjax.methods.zipcache import ProbeAttention


@dataclasses.dataclass(frozen=True)
class UnimportantTokens(kv.PrecisionTiers):
    """Stores in the low tier all tokens but the fewest that receive `tau` of their layer's attention.

    The number of important tokens is that of the layer: attention is averaged over all of its heads. Each head chooses
    its own by the normalized scores.

    Args:
      scorer: the scores.
      tau: fraction of the attention that important tokens receive.
      k: codec of the low tier's keys.
      v: codec of the low tier's values.
      least: fraction of all tokens that are important at least.
      most: fraction of all tokens that are important at most.
    """

    scorer: ProbeAttention
    tau: Annotated[float, kv.Within("(0, 1]")]
    k: kv.Codec
    v: kv.Codec
    least: float = 0.0
    most: float = 1.0

    def __post_init__(self):
        kv.check_fields(self)
        if not (0 <= self.least <= self.most <= 1 and self.most > 0):
            raise kv.KvjaxError(
                f"0 <= least <= most <= 1 and most > 0 must hold, got least={self.least}, most={self.most}; 0 and 1 "
                "leave the count as it is"
            )

    @property
    def num_queries(self) -> int | None:
        return self.scorer.num_queries

    def slots(self, spec: kv.LayerSpec, kept: int, width: int) -> kv.Slots:
        # The prompt decides how many are important, so both tiers have room for the most; rounded up.
        return kv.Slots(kept, -kv.fraction_of(self.most, -kept), kept - kv.fraction_of(self.least, kept))

    def low_tier_mask(self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None) -> kv.Array:
        # Ties go into the low tier from the left.
        scores = self.scorer.scores(block, observation, spec).per_kv_head
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        return kv.top_k_mask(-scores, block.pos >= 0, length - self.num_important(block, observation, spec))

    def num_important(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Array:
        """Counts the important tokens of each sequence, i32[B]."""
        probe_attention, _ = self.scorer.probe_attention(block, self.scorer.require_observation(observation), spec)
        falling = -jnp.sort(-kv.over_heads.mean(probe_attention.mean(2))[:, 0], -1)
        count = kv.covering_mask(falling, self.tau).sum(-1, dtype=jnp.int32)
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        return jnp.clip(count, kv.fraction_of(self.least, length), -kv.fraction_of(self.most, -length))


@kv.register_method(example="zipvl:least=0.2,most=0.6", family="quantization by channel and group")
def zipvl(
    tau: float = 0.97,
    least: float = 0.0,
    most: float = 1.0,
    low: int = 2,
    high: int = 4,
    every: int = 100,
    probes: Annotated[float, kv.Within("(0, 1]")] = 0.05,
    normalise: Literal["queries", "probes"] = "queries",
    seed: int = 0,
) -> kv.Method:
    """Quantizes a prompt, and gives fewer bits to the tokens that a layer's attention can do without.

    Formula:
      p = the fewest tokens that receive tau of all attention from the probes, heads averaged; in each head the p tokens
      of the highest normalized attention in 4 bits, the others in 2

    Differs:
      The prompt's own attention is exact, where the paper reads the important tokens alone: that selection depends on
      the data. Shapes are static: both tiers have room for every token, 6 bits a number, unless least and most bound
      the count. There is no public code; unverified: tau, and that p counts attention before it is normalized.

    Args:
      tau: fraction of the attention that important tokens keep.
      least: lower bound on their fraction of a head's tokens. Arrays cannot shrink with the data, so the tiers take
        `most` times `high` and 1 - `least` times `low` bits a number (the paper: no bounds).
      most: upper bound on that fraction.
      low, high, every, probes, normalise, seed: as in `zipcache`.

    Reference:
      ZipVL, He et al. 2024, arXiv 2410.08584 (version 1), section 3; tiers: ZipCache, arXiv 2405.14256
    """
    keys, values = Channelwise(low), SeparableTokenwise(low)
    tier = UnimportantTokens(ProbeAttention(probes, normalise, seed), tau, keys, values, least, most)
    return kv.Method(side_store=tier, k=Channelwise(high, every), v=SeparableTokenwise(high, every))
