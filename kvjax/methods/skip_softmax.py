"""BLASST, or skip softmax: a query of the prompt leaves out tiles of keys whose weights would be small."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class SkippedTiles:
    """Skips tiles of keys by their largest logits, in the prompt's own attention; see `TileSkipping`.

    Args:
      threshold: weight, relative to the largest one so far, under which all of a tile's weights are left out.
      tile: keys of a tile.
    """

    threshold: Annotated[float, kv.Within("[0, 1)")]
    tile: kv.PositiveInt

    __post_init__ = kv.check_fields

    def is_visible(self, s: kv.Array, t: kv.Array) -> kv.Array:
        """Whether a query at t can read the key at s: all, by their positions."""
        return jnp.ones(jnp.broadcast_shapes(s.shape, t.shape), bool)

    def block_visibility(
        self, first: kv.Array, last: kv.Array, start: kv.Array, end: kv.Array
    ) -> tuple[kv.Array, kv.Array]:
        """Says that positions rule out no pair of keys first..last and queries start..end."""
        return jnp.bool_(True), jnp.bool_(True)

    def skips(self, largest: kv.Array, before: kv.Array) -> kv.Array:
        """Whether exp(largest - before) is under the threshold."""
        return largest - before < (math.log(self.threshold) if self.threshold else -math.inf)


@kv.register_method(example="skip_softmax:tile=32", family="sparse reading")
def skip_softmax(threshold: Annotated[float, kv.Within("[0, 1)")] = 0.01, tile: int = 128) -> kv.Method:
    """Leaves out of the prompt's attention what a look at the logits of a tile shows to be small; decoding reads all.

    Values are not multiplied where all queries of a block skip a tile. Nothing leaves the cache.

    Formula:
      tile j of `tile` keys is skipped by a query where exp(m_j - max of m_1..m_j) < threshold, m_j the largest logit of
      the query to the tile's keys

    Differs:
      NVIDIA's kernels (TensorRT-LLM; Model-Optimizer, Apache-2.0) skip a tile where all queries of their own tile would
      skip it, and read it for all others; here each query decides for itself, so that its output depends neither on its
      neighbors nor on padding. They skip while decoding, too.

    Args:
      threshold: relative weight under which a tile is skipped; 0 skips nothing. The paper calibrates it for a model and
        finds it to be inverse to the length: TensorRT-LLM divides a factor by the number of tokens. With a wrong one
        answers fail, so measure.
      tile: keys that are skipped together (the kernels': 128, or 64).

    Reference:
      BLASST, 2025, arXiv 2512.12087; TensorRT-LLM, SkipSoftmaxAttentionConfig
    """
    return kv.Method(attend=SkippedTiles(threshold, tile))
