"""FINCH: the tokens that a question at the prompt's end attends to, chunk by chunk, at positions without gaps."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class QuestionAttention(kv.Scorer):
    """Scores a token by the attention of the last queries, each times the number of tokens before it.

    Args:
      num_queries: last queries of the prompt, the question.
      chunk: tokens of a chunk, which ranks its tokens by itself: a score is then minus the token's rank in its chunk,
        over the chunk's length; 0 for the attention itself.
    """

    num_queries: kv.PositiveInt = 32
    chunk: kv.NonNegativeInt = 0

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        observation = self.require_observation(observation)
        in_question = kv.window_query_mask(observation, self.num_queries)
        query_weights = jnp.where(in_question, observation.pos, 0).astype(jnp.float32)
        attention = kv.attention_mass(block, observation, query_weights, spec.rule)[0].mean(2)  # [B K S]
        is_before = kv.pre_window_mask(block, self.num_queries)
        scores = jnp.where(is_before, attention, jnp.finfo(jnp.float32).max)  # the question always stays
        return kv.token_scores(self._rank_in_chunks(scores, block.pos >= 0) if self.chunk else scores, block)

    def _rank_in_chunks(self, scores: kv.Array, is_token: kv.Array) -> kv.Array:
        B, K, S = scores.shape
        padding = [(0, 0), (0, 0), (0, -S % self.chunk)]
        # The best of a half of each chunk are the best half of all tokens: chunks keep parts in proportion.
        by_chunk = jnp.pad(jnp.where(is_token, scores, -jnp.inf), padding, constant_values=-jnp.inf)
        by_chunk = by_chunk.reshape(B, K, -1, self.chunk)
        rank = kv.rank(by_chunk).astype(jnp.float32)
        length = jnp.pad(is_token, padding).reshape(B, is_token.shape[1], -1, self.chunk).sum(-1, keepdims=True)
        return -(rank / jnp.maximum(length, 1).astype(jnp.float32)).reshape(B, K, -1)[:, :, :S]


@kv.register_method(example="finch:budget=512", family="eviction after the prompt")
def finch(
    budget: kv.TokenBudget = 1024,
    window: kv.PositiveInt = 32,
    chunk: kv.NonNegativeInt = 0,
    rerotate: bool = True,
    sinks: int = 0,
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens that the question at its end attends to most, and the question, at positions 0, 1, 2, ..

    Tokens are evicted once, when the prompt ends; decoded tokens continue behind the kept ones.

    Formula:
      score_s = mean over the question's queries t of t softmax(q_t k_s), mean over a key/value head's query heads; with
      chunks, each keeps the part of its tokens that all of the prompt keeps; the i-th kept token is rotated to i

    Differs:
      As kvpress' press. The paper reads the prompt chunk by chunk, each behind what the earlier ones left, and here all
      of it is read before anything leaves. kvpress finds the question by a delimiter, which is `window` here.

    Args:
      budget: as in `make_selection`; the question is included.
      window: tokens of the question, at the prompt's end; they always stay.
      chunk: tokens of a chunk that chooses by itself; 0 for one choice among all (kvpress' default).
      rerotate: whether kept tokens get positions without gaps; else they stay at their own.
      sinks, per: as in `make_selection`.

    Reference:
      FINCH, Corallo and Papotti 2024, TACL 12, section 3; as FinchPress of NVIDIA's kvpress
    """
    select = kv.make_selection(QuestionAttention(window, chunk), budget, sinks, window, per=per)
    return kv.Method(select=select, positions="cache" if rerotate else "true")
