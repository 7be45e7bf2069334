"""Chunk budgets: every chunk of a prompt keeps the same fraction of its tokens."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class ChunkRanks(kv.SecondStageScorer):
    """Ranks tokens by the fraction of their chunk's tokens that score higher."""

    share: ClassVar[float] = 0.0  # the scores alone choose no token
    chunk: kv.PositiveInt

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


@dataclasses.dataclass(frozen=True)
class RanksAlone(ChunkRanks):
    """`ChunkRanks` by the scores of each chunk alone, as if it were a whole prompt."""

    def check(self, components: kv.Components) -> None:
        assert components.select is not None
        if components.decode is not None and components.select.scorer.num_queries != 0:
            raise kv.IncompatibleMethod(
                f"component `second_stage`, {self}, reads the queries of every chunk of a prompt, and component "
                f"`decode`, {type(components.decode).__name__}, keeps only the latest; give chunk_budgets score=prompt"
            )

    def with_selection(self, selection: kv.PromptSelection) -> kv.SecondStageScorer:
        return BoundRanksAlone(self.chunk, selection.select.scorer)


@dataclasses.dataclass(frozen=True)
class BoundRanksAlone(RanksAlone):
    """`RanksAlone` over the scorer of a layer."""

    scorer: kv.Scorer

    @property
    def num_queries(self) -> int | None:
        """All queries, where the scorer reads any: the last ones of a chunk may be anywhere in the prompt."""
        return 0 if self.scorer.num_queries == 0 else None

    def scores(
        self, block: kv.KVBlock, own: kv.Array, observation: kv.Observation | None, spec: kv.LayerSpec
    ) -> kv.Array:
        B, K, S, _ = block.k.shape

        def split(x: kv.Array, axis: int, padding: float = 0) -> kv.Array:
            """Makes each chunk a sequence of the batch: [B .. S ..] -> [chunks * B .. chunk ..]."""
            chunks = kv.attention.split_blocks(x, axis, self.chunk, padding)
            return chunks.reshape(-1, *chunks.shape[2:])

        parts = kv.KVBlock(split(block.k, 2), split(block.v, 2), split(block.pos, 2, -1))
        if observation is not None:
            hidden, replayed, sinks = observation.hidden_states, observation.replay_scores, observation.sinks
            observes_all = self.num_queries is None
            observation = kv.Observation(
                split(observation.q, 3) if observes_all else observation.q,
                split(observation.pos, 1, -1) if observes_all else observation.pos,
                output_projection=observation.output_projection,
                hidden_states=None if hidden is None else split(hidden, 2),
                replay_scores=None if replayed is None else split(replayed, 2),
                sinks=None if sinks is None else jnp.broadcast_to(sinks, (len(parts.pos), *sinks.shape[1:])),
            )
        alone = self.scorer.scores(parts, observation, spec).per_kv_head.reshape(-1, B, K, self.chunk)
        alone = jnp.moveaxis(alone, 0, 2).reshape(B, K, -1)[:, :, :S]
        return super().scores(block, alone, observation, spec)


@kv.register_method(example="keynorm:budget=512 + chunk_budgets:chunk=256", family="component over a selection")
def chunk_budgets(chunk: int = 1024, score: Literal["prompt", "chunk"] = "prompt") -> kv.Method:
    """Divides an eviction method's budget equally over the chunks of a prompt, so that no part of it is left out.

    Use it as in 'keynorm:budget=25% + chunk_budgets'. The best tokens of every chunk stay, in proportion to its length.

    Formula:
      score_s = -(1 + number of tokens of s's chunk that score higher) / tokens of the chunk

    Differs:
      kvpress (ChunkPress) scores each chunk alone, as score=chunk does. The default ranks a chunk's tokens by the
      scores of the whole prompt; scores that look at one token (`keynorm`) are the same in both. Tokens that the
      rounding of chunks leaves go to the chunks that lost most by it, so that the budget is exact. Sinks and windows
      always stay and are counted first. With per=layer the heads' ranks are averaged. A scorer that reads queries
      (`snapkv`) gets those of the chunk at their positions; kvpress turns them to the last positions of the prompt.

    Args:
      chunk: tokens of a chunk, counted from the first token (kvpress: 1,024).
      score: what a scorer is given to score a token by: "prompt", all tokens, or "chunk", the chunk alone.

    Reference:
      ChunkPress of kvpress, after FINCH, Corallo & Papotti 2024, TACL
    """
    return kv.Method(second_stage=ChunkRanks(chunk) if score == "prompt" else RanksAlone(chunk))
