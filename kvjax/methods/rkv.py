"""R-KV: while a model reasons, keeps tokens that are attended to and whose keys do not repeat one another."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.scorers import pool_scores
from kvjax.methods.recompress import Recompress, latest_queries


@dataclasses.dataclass(frozen=True)
class RKV(kv.Scorer):
    """Scores tokens by the attention of the last queries minus redundancy among keys (Cai et al. 2025, 2505.24133).

    Attention is the greatest logit of a key/value head's query heads, softmax over the tokens before the window (the
    last `num_queries` tokens), mean over the queries, and the greatest of `kernel` neighbors. Tokens before the window
    score mix * attention - (1 - mix) * redundancy, tokens of the window 1. The fields are arguments of `rkv`, whose
    `window` is `num_queries`.
    """

    num_queries: kv.PositiveInt = 8
    kernel: Annotated[int, kv.Odd()] = 7
    mix: kv.UnitFloat = 0.1
    threshold: kv.UnitFloat = 0.5

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        block, before = block.clean(), kv.pre_window_mask(block, self.num_queries)
        observation = latest_queries(self.require_observation(observation), self.num_queries)
        is_visible = kv.attention.visible(block.pos, observation.pos, spec.rule)[:, :, 0] & before[:, :, None]
        logits = spec.rule.cap(kv.attention.scores(observation.q, block.k)).max(2)
        # The greatest logit of a group's query heads is taken of their learned sinks too.
        sinks = None if observation.sinks is None else observation.sinks.max(2)
        p = kv.attention.softmax(jnp.where(is_visible, logits, kv.attention.MASKED_LOGIT), sinks)
        count = jnp.maximum((observation.pos >= 0).sum(1, dtype=jnp.int32), 1).astype(jnp.float32)
        received = p.sum(2) / count[:, None, None]
        received = pool_scores(received, before, self.kernel, "max")
        score = self.mix * received - (1 - self.mix) * redundancy(block, self.threshold)
        return kv.token_scores(jnp.where(before, score, 1.0), block)


def redundancy(block: kv.KVBlock, threshold: float, at_once: int = 256) -> kv.Array:
    """Computes a softmax over a sequence's tokens of the mean cosine of all keys to each.

    A key's own cosine counts 0, and so does the cosine of each key to the newest one that is more similar than
    `threshold`: the newest of near duplicates is not redundant. A key without near duplicates counts 0 to the first
    token (a quirk of the authors' code that is kept).

    Args:
      block: keys and values, zeros in empty slots.
      threshold: cosine of near duplicates.
      at_once: keys compared at one time, so that memory grows with at_once x S, never with S x S.

    Returns:
      f32[B K S].
    """
    k = block.k.astype(jnp.float32)
    direction = k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-8)
    B, K, S, _ = k.shape
    size = min(at_once, S)
    column = jnp.arange(S, dtype=jnp.int32)[None, None, None]

    def add(total: kv.Array, keys_block: tuple[kv.Array, kv.Array]) -> tuple[kv.Array, None]:
        keys, own = keys_block
        cosine = jnp.einsum("bkth,bksh->bkts", keys, direction)
        cosine = jnp.where(column == own, 0.0, cosine)
        newest_duplicate = jnp.where(cosine > threshold, column, 0).max(-1, keepdims=True)
        return total + jnp.where(column == newest_duplicate, 0.0, cosine).sum(2), None

    blocks = (
        kv.attention.split_blocks(direction, 2, size),
        kv.attention.split_blocks(jnp.moveaxis(column, 3, 2), 2, size, -1),
    )
    total = lax.scan(add, kv.vary(jnp.zeros((B, K, S))), blocks)[0]
    real = block.pos >= 0
    count = jnp.maximum(real.sum(2, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
    return kv.attention.softmax(jnp.where(real, total / count, kv.attention.MASKED_LOGIT))


@kv.register_method(example="rkv:budget=512,every=32", family="eviction at every step")
def rkv(
    budget: int = 1024,
    window: kv.PositiveInt = 8,
    kernel: int = 7,
    mix: float = 0.1,
    threshold: float = 0.5,
    every: int = 128,
) -> kv.Method:
    """Returns to its budget whenever `every` tokens have come, and keeps tokens that are attended to and not redundant.

    The prompt is compressed likewise, and the memory is constant.

    Formula:
      score_s = mix * pooled window attention - (1 - mix) * softmax_s(mean over keys of cos(k, k_s), the newest near
      duplicate spared); back to `budget` tokens whenever `every` more are cached

    Differs:
      The authors compress after the newest token has come in and before it attends, here before it comes in; the prompt
      is compressed too. The paper spares the newest beta of near duplicates; its code and kvjax spare the newest.

    Args:
      budget: tokens of each key/value head after a compression, the window included (the paper's runs: 1024 to 3072).
      window: last queries, which score the others; their own tokens always stay.
      kernel: neighbors that share the largest attention among them, odd.
      mix: weight of attention in a score (the paper: 0.1; 0.07 in the class of the authors' code).
      threshold: cosine above which keys are near duplicates.
      every: tokens between compressions.

    Reference:
      R-KV, Cai et al. 2025, arXiv 2505.24133; the rules of its public code, Zefan-Cai/R-KV
    """
    scorer = RKV(window, kernel, mix, threshold)
    return kv.Method(select=kv.make_selection(scorer, budget, 0, window), decode=Recompress(every))
