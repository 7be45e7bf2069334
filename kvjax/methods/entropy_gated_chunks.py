"""Entropy-gated chunks: whole chunks stay where scores are even, and only the best tokens of a chunk with a peak."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax import method_api as kv

EPSILON = 1e-8  # kvpress' constant, in the fractions and in their logarithm


@dataclasses.dataclass(frozen=True)
class EntropyGate(kv.SecondStageScorer):
    """Ranks tokens by chunks, best mean score first; of an important chunk with uneven scores only a part is in line.

    A chunk is important if its mean is at least the median of all chunks, and uneven if the entropy of its scores, over
    the largest that its length allows, is below the median. It then offers its best `kept` tokens. All tokens that no
    chunk offers follow, by their scores. Heads are averaged first. The fields are arguments of `entropy_gated_chunks`.
    """

    share: ClassVar[float] = 0.0  # the gate ranks all tokens; the scores alone choose none
    chunk: kv.PositiveInt = 10
    kept: kv.PositiveInt = 4

    __post_init__ = kv.check_fields

    def scores(
        self, block: kv.KVBlock, own: kv.Array, observation: kv.Observation | None, spec: kv.LayerSpec
    ) -> kv.Array:
        size, S = self.chunk, own.shape[2]
        scores = jnp.pad(kv.over_heads.mean(own)[:, 0], [(0, 0), (0, -S % size)], constant_values=-jnp.inf)
        chunks = scores.reshape(len(scores), -1, size)  # [B U size]
        is_real = chunks > -jnp.inf
        num_tokens = is_real.sum(-1, dtype=jnp.int32)
        finite = jnp.where(is_real, chunks, 0.0)
        mean = finite.sum(-1) / jnp.maximum(num_tokens, 1).astype(jnp.float32)
        entropy = normalized_entropy(finite, is_real)
        has_tokens = num_tokens > 0
        is_important = mean >= lower_median(mean, has_tokens)
        is_uneven = entropy < lower_median(entropy, has_tokens)
        offered = jnp.where(is_important & is_uneven, self.kept, size)
        place = kv.rank(chunks)
        in_line = kv.rank(jnp.where(has_tokens, mean, -jnp.inf))[:, :, None] * size + place
        behind = chunks.shape[1] * size + kv.rank(scores).reshape(chunks.shape)
        order = jnp.where(place < offered[:, :, None], in_line, behind).reshape(scores.shape)[:, None, :S]
        return jnp.where(own > -jnp.inf, -order.astype(jnp.float32), -jnp.inf)

    def check(self, components: kv.Components) -> None:
        assert components.select is not None
        if components.select.granularity.size > 1:
            raise kv.IncompatibleMethod(
                f"entropy_gated_chunks (component `second_stage`) makes chunks of {self.chunk} tokens itself, and "
                f"component `select` keeps units of {components.select.granularity.size} tokens whole; leave `unit` out"
            )


def lower_median(x: kv.Array, counts: kv.Array) -> kv.Array:
    """f32[B 1]: the median of the entries of x [B U] that count; of an even number, the lower of the middle two."""
    middle = (counts.sum(-1, keepdims=True, dtype=jnp.int32) - 1) // 2
    return jnp.take_along_axis(jnp.sort(jnp.where(counts, x, jnp.inf), -1), jnp.maximum(middle, 0), -1)


def normalized_entropy(chunks: kv.Array, is_real: kv.Array) -> kv.Array:
    """f32[B U]: the entropy of each chunk's scores [B U c], 0 to 1; negative scores are moved up to 0 first."""
    lowest = jnp.minimum(jnp.where(is_real, chunks, jnp.inf).min(-1, keepdims=True), 0.0)
    shifted = jnp.where(is_real, chunks - lowest, 0.0)
    p = shifted / (shifted.sum(-1, keepdims=True) + EPSILON)
    entropy = -(p * jnp.log(p + EPSILON)).sum(-1)
    num_tokens = jnp.maximum(is_real.sum(-1, dtype=jnp.int32), 1).astype(jnp.float32)
    return jnp.where(num_tokens > 1, jnp.clip(entropy / jnp.log(jnp.maximum(num_tokens, 2.0)), 0.0, 1.0), 0.0)


@kv.register_method(example="snapkv:budget=512,per=layer + entropy_gated_chunks", family="component over a selection")
def entropy_gated_chunks(chunk: int = 10, kept: int = 4) -> kv.Method:
    """Keeps whole chunks of an eviction method's best tokens, and of a chunk that few tokens carry only these.

    Use it as in 'snapkv:budget=512,per=layer + entropy_gated_chunks': all heads keep the same tokens, so that their
    positions are stored once with per=layer. `chunkkv` keeps all chunks whole.

    Formula:
      chunks in the order of their mean scores; a chunk with a mean of at least the median and an entropy of
      p = score / sum below the median gives its best `kept` tokens, another one all; then the best of all others

    Differs:
      The scorer's window and sinks always stay and are counted first, where kvpress (EntropyGatedChunkKVPress) ranks
      the chunks that hold them, so that a chunk with a part of the window may lose some of it. Each sequence chooses
      for itself; kvpress chooses by the first of a batch.

    Args:
      chunk: tokens of a chunk, counted from the first token (kvpress: 10).
      kept: best tokens that an important chunk with uneven scores gives (kvpress: 4).

    Reference:
      EntropyGatedChunkKVPress of kvpress, after ChunkKV, Liu et al. 2025, arXiv 2502.00299
    """
    if kept >= chunk:
        raise kv.KvjaxError(
            f"kept={kept} tokens are no part of a chunk of {chunk}; use kept={max(chunk - 1, 1)} or less"
        )
    return kv.Method(second_stage=EntropyGate(chunk, kept))
