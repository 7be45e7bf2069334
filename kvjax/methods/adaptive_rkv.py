"""Adaptive R-KV: blocks of tokens that hold most of the attention, then those that are unlike the other blocks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv
from kvjax.methods.recompress import Recompress


@dataclasses.dataclass(frozen=True)
class BlockDiversity(kv.Scorer):
    """Scores the tokens of a block alike: by the block's attention, or, past a part of all attention, by its diversity.

    The blocks between the first and the recent tokens are ranked by attention. Those at the top that hold `mass` of it
    score 1 and more, the others between -1/2 and 1/2 by minus the cosines of their keys to the tokens of these others.
    The fields are arguments of `adaptive_rkv`, whose `window` is `num_queries`.
    """

    num_queries: kv.PositiveInt = 8
    kernel: kv.PositiveInt = 7
    mass: kv.UnitFloat = 0.9
    block: kv.PositiveInt = 32
    sinks: kv.NonNegativeInt = 32
    recent: kv.NonNegativeInt = 128

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        attention = kv.WindowAttention(self.num_queries).window_attention(
            block, self.require_observation(observation), spec
        )
        attention = kv.over_heads.mean(attention.mean(2))[:, 0]  # [B S]: a layer has one choice
        length = (block.pos[:, 0] >= 0).sum(-1, keepdims=True, dtype=jnp.int32)
        S = block.pos.shape[2]
        # Each token takes the largest attention of its own and the next `kernel` - 1 tokens.
        later = lax.reduce_window(
            attention, np.float32(-np.inf), lax.max, (1, self.kernel), (1, 1), ((0, 0), (0, self.kernel - 1))
        )
        # Blocks are counted from the first token after the sinks, as the selection counts them.
        num_blocks = max(-(-(S - self.sinks) // self.block), 1)
        index = (jnp.arange(S, dtype=jnp.int32) - self.sinks)[None]
        num_whole = jnp.maximum(length - self.sinks - self.recent, 0) // self.block
        is_evictable = (index >= 0) & (index // self.block < num_whole)  # [B S]
        of_block = jnp.broadcast_to(jnp.maximum(index // self.block, 0), is_evictable.shape)

        def sum_blocks(x: kv.Array) -> kv.Array:
            """Sums x f32[B S] over the evictable tokens of each block: f32[B blocks]."""
            rows = jnp.arange(x.shape[0])[:, None]
            return jnp.zeros((x.shape[0], num_blocks)).at[rows, of_block].add(jnp.where(is_evictable, x, 0.0))

        by_attention = sum_blocks(later)
        total = jnp.maximum(by_attention.sum(-1, keepdims=True), 1e-30)
        is_block = jnp.arange(num_blocks, dtype=jnp.int32)[None] < num_whole
        is_heavy = self._heavy_blocks(by_attention / total, is_block)
        is_other = is_evictable & ~jnp.take_along_axis(is_heavy, of_block, 1)
        similarity = kv.over_heads.mean(mean_similarity(block.k, is_evictable, is_other))[:, 0]
        diverse = -sum_blocks(similarity) / (2.0 * self.block)
        score = jnp.where(is_heavy, 1.0 + by_attention / total, diverse)
        per_token = jnp.take_along_axis(score, of_block, 1) / self.block  # the selection sums them
        return kv.token_scores(jnp.broadcast_to(per_token[:, None], block.k.shape[:3]), block)

    def _heavy_blocks(self, attention: kv.Array, is_block: kv.Array) -> kv.Array:
        """Finds the blocks of the largest attention f32[B blocks] until `mass` of it is reached: bool[B blocks]."""
        falling = -jnp.sort(-jnp.where(is_block, attention, 0.0), axis=-1)
        rank = kv.rank(jnp.where(is_block, attention, -1.0))
        return jnp.take_along_axis(kv.covering_mask(falling, self.mass), rank, 1) & is_block


def mean_similarity(keys: kv.Array, rows: kv.Array, columns: kv.Array, at_once: int = 256) -> kv.Array:
    """Computes the mean cosine of each token's key to others, cosines below the token's own mean counted as zero.

    Args:
      keys: [B K S H].
      rows: bool[B S], tokens whose mean cosine is the threshold; their own cosine is zero in it.
      columns: bool[B S], some of these, over which the result is averaged.
      at_once: keys compared at one time, so that memory grows with at_once x S, never with S x S.

    Returns:
      f32[B K S], defined for the tokens of `rows`.
    """
    k = jnp.where(rows[:, None, :, None], keys.astype(jnp.float32), 0.0)
    direction = k / jnp.sqrt(jnp.square(k).sum(-1, keepdims=True) + float(jnp.finfo(jnp.float32).eps))
    S = k.shape[2]
    size, column = min(at_once, S), jnp.arange(S, dtype=jnp.int32)[None, None, None]
    num_rows, num_columns = (jnp.maximum(x.sum(-1, dtype=jnp.float32), 1.0)[:, None, None] for x in (rows, columns))

    def compare(_: None, own: tuple[kv.Array, kv.Array]) -> tuple[None, kv.Array]:
        mine, at = own
        cosine = jnp.einsum("bkth,bksh->bkts", mine, direction, precision=lax.Precision.HIGHEST)
        cosine = jnp.where(column == at[..., None], 0.0, cosine)
        threshold = cosine.sum(-1) / num_rows  # tokens outside of `rows` have a direction of zero
        high = jnp.where((cosine >= threshold[..., None]) & columns[:, None, None], cosine, 0.0)
        return None, high.sum(-1) / num_columns

    at = jnp.broadcast_to(column[0], (1, 1, S))
    blocks = kv.attention.split_blocks(direction, 2, size), kv.attention.split_blocks(at, 2, size, -1)
    found = lax.scan(compare, None, blocks)[1]  # [blocks B K at_once]
    return jnp.moveaxis(found, 0, 2).reshape(*k.shape[:2], -1)[:, :, :S]


@kv.register_method(example="adaptive_rkv:budget=256,block=16,every=16", family="eviction at every step")
def adaptive_rkv(
    budget: int = 672,
    window: kv.PositiveInt = 8,
    kernel: kv.PositiveInt = 7,
    mass: kv.UnitFloat = 0.9,
    block: kv.PositiveInt = 32,
    sinks: kv.NonNegativeInt = 32,
    recent: kv.NonNegativeInt = 128,
    every: int = 32,
) -> kv.Method:
    """Keeps the blocks that hold most of the attention, and fills its budget with those that repeat others least.

    All heads of a layer keep the same tokens. The prompt is compressed likewise, and the memory is constant.

    Formula:
      a_b = attention of a block's tokens, each the largest of its own and the next `kernel` - 1; the blocks of largest
      a_b stay until their sum is `mass` of all; then those of largest -sum_(i in b) mean_j cos(k_i, k_j), the mean over
      heads and over tokens j of blocks that are not heavy, cosines below their row's mean counted as 0

    Differs:
      The rules are those of OpenVINO (pull request 33568 and openvino.genai, Apache-2.0). It averages the attention of
      its last decoded tokens, and here `window` queries attend again to what is cached; it evicts a block whenever one
      is full, here `every` tokens after the last time; tokens behind the last whole block stay with the recent ones.

    Args:
      budget: tokens of each key/value head after a compression, first and recent ones included (OpenVINO: 672).
      window: last queries, whose attention counts (OpenVINO: 8).
      kernel: a token and those behind it that share their largest attention (OpenVINO: 7).
      mass: part of the attention whose blocks stay for it alone; at 1 no block is judged by its keys (OpenVINO: 0.9).
      block: tokens that stay or leave together (OpenVINO: 32 on a CPU).
      sinks: first tokens that always stay (OpenVINO: 32).
      recent: last tokens that always stay (OpenVINO: 128).
      every: tokens between compressions.

    Reference:
      OpenVINO GenAI, AggregationMode.ADAPTIVE_RKV; after R-KV, Cai et al. 2025, arXiv 2505.24133
    """
    scorer = BlockDiversity(window, kernel, mass, block, sinks, recent)
    select = kv.make_selection(scorer, budget, sinks, recent, f"chunk{block}", "layer")
    return kv.Method(select=select, decode=Recompress(every))
