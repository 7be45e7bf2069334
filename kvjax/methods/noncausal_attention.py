"""Non-causal attention: keeps the tokens that all queries of their chunk attend to, later tokens included."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.scorers import pool_scores
from kvjax.methods.leverage_score import mask_evictable, standardize


@dataclasses.dataclass(frozen=True)
class NoncausalAttention(kv.Scorer):
    """Scores a token by the attention of its chunk's queries, without a causal mask, times |v| (2507.08143).

    Chunks are counted from the first token after the sinks. The mean over a key/value head's query heads is averaged
    over three neighbors and standardized over all heads of the layer. The fields are arguments of
    `noncausal_attention`; tokens that always stay take no part, and score 0.
    """

    num_queries: ClassVar[int | None] = None
    chunk: kv.PositiveInt = 256
    sinks: kv.NonNegativeInt = 0
    recent: kv.NonNegativeInt = 0

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        block, observation = block.clean(), self.require_observation(observation)
        B, K, S, H = block.k.shape
        # A query lies at its position, or, in the ring of a cache that is compressed again, at that modulo the width.
        pos = jnp.broadcast_to(block.pos, (B, K, S))
        at = jnp.maximum(pos, 0) % observation.pos.shape[1]
        q = jnp.take_along_axis(observation.q, at[:, :, None, :, None], 3)
        is_scored = jnp.broadcast_to(mask_evictable(block, self.sinks, self.recent), (B, K, S))
        is_asking = is_scored & (jnp.take_along_axis(observation.pos[:, None], at, 2) == pos)

        def sum_chunk(xs: tuple[kv.Array, ...]) -> kv.Array:
            q, k, is_scored, is_asking = xs
            # Neither the authors' code nor kvpress divides the dot products by sqrt(H).
            logits = spec.rule.cap(kv.attention.scores(q, k)) * H**0.5
            logits = jnp.where(is_scored[:, :, None, None], logits, kv.MASKED_LOGIT)
            p = kv.attention.softmax(logits, observation.sinks)  # f32[B K G chunk chunk]
            return jnp.where(is_asking[:, :, None, :, None], p, 0.0).sum(3).mean(2)

        arrays, size = (q, block.k, is_scored, is_asking), min(self.chunk, S)
        chunks = tuple(
            kv.attention.split_blocks(x[..., self.sinks :, :] if x.ndim > 3 else x[..., self.sinks :], axis, size)
            for x, axis in zip(arrays, (3, 2, 2, 2), strict=True)
        )
        received = jnp.moveaxis(lax.map(sum_chunk, chunks), 0, 2).reshape(B, K, -1)
        received = jnp.pad(received, [(0, 0), (0, 0), (self.sinks, 0)])[..., :S]
        norms = jnp.sqrt(jnp.square(block.v.astype(jnp.float32)).sum(-1))
        return kv.token_scores(standardize(pool_scores(received * norms, is_scored, 3, "avg"), is_scored), block)


@kv.register_method(example="noncausal_attention:budget=512", family="eviction after the prompt")
def noncausal_attention(
    budget: kv.TokenBudget = 1024,
    chunk: int = 256,
    sinks: int = 0,
    recent: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens that the queries before and after them in their chunk attend to.

    It is one half of Compactor ('compactor'), whose paper does not use it alone.

    Formula:
      score_s = avg3(|v_s| mean over a head's query heads of the sum over queries t of s's chunk of softmax_s(q_t k_s),
      over all tokens of the chunk)

    Differs:
      A last chunk that is not full attends to its own tokens alone, as in the authors' code (vnchari/compactor-vllm);
      kvpress (NonCausalAttnPress) also counts its padding, as keys of zeros and as queries.

    Args:
      budget, unit, per: as in `make_selection`.
      chunk: tokens that attend to one another (kvpress: 256).
      sinks, recent: as in `make_selection`; they are left out of the chunks and of all statistics.

    Reference:
      Compactor, Chari & Van Durme 2025, arXiv 2507.08143; constants of its press in kvpress
    """
    scorer = NoncausalAttention(chunk, sinks, recent)
    return kv.Method(select=kv.make_selection(scorer, budget, sinks, recent, unit, per))
