"""Chunk budgets: every chunk of a prompt keeps the same fraction of its tokens."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class ChunkRanks(kv.SecondStageScorer):
    """Ranks tokens by the fraction of their chunk's tokens that score higher."""

    share: ClassVar[float] = 0.0  # the scores alone choose no token
    chunk: kv.PositiveInt = 1024

    __post_init__ = kv.check_fields

    def scores(
        self, block: kv.KVBlock, own: kv.Array, observation: kv.Observation | None, spec: kv.LayerSpec
    ) -> kv.Array:
        B, K, S = own.shape
        chunks = jnp.pad(own, [(0, 0), (0, 0), (0, -S % self.chunk)], constant_values=-jnp.inf)
        chunks = chunks.reshape(B, K, -1, self.chunk)
        num_tokens = jnp.maximum((chunks > -jnp.inf).sum(-1, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        fraction = (kv.rank(chunks) + 1).astype(jnp.float32) / num_tokens
        return jnp.where(own > -jnp.inf, -fraction.reshape(B, K, -1)[:, :, :S], -jnp.inf)


@kv.register_method(example="keynorm:budget=512 + chunk_budgets:chunk=256", family="component over a selection")
def chunk_budgets(chunk: int = 1024) -> kv.Method:
    """Divides an eviction method's budget equally over the chunks of a prompt, so that no part of it is left out.

    Use it as in 'keynorm:budget=25% + chunk_budgets'. The best tokens of every chunk stay, in proportion to its length.

    Formula:
      score_s = -(1 + number of tokens of s's chunk that score higher) / tokens of the chunk

    Differs:
      Scores are those of the whole prompt, and each chunk ranks its own tokens by them. kvpress (ChunkPress) scores
      each chunk alone. That is the same for scores that look at one token (`keynorm`), and not for those that compare
      tokens (`keydiff`) or read the last queries (`snapkv`). Tokens that the rounding of chunks leaves go to the chunks
      that lost most by it, so that the budget is exact. Sinks and windows always stay and are counted first. With
      per=layer the heads' ranks are averaged.

    Args:
      chunk: tokens of a chunk, counted from the first token (kvpress: 1,024).

    Reference:
      ChunkPress of kvpress, after FINCH, Corallo & Papotti 2024, TACL
    """
    return kv.Method(second_stage=ChunkRanks(chunk))
