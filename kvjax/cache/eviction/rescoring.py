"""The component `second_stage`: keeps a part of a selection's tokens by its own scores, and the others by new ones."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from kvjax.cache.eviction.representatives import fraction_of
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array


class TwoStage(NamedTuple):
    """A second stage whose scores are known."""

    share: float  # as in `SecondStageScorer`
    unit_scores: Array  # f32[B K U], the new scores

    def rank(self, first_scores: Array, allowed: Array, num_units: Array, num_always: Array) -> Array:
        """Ranks units so that their best `num_units` are those of both stages.

        Args:
          first_scores: f32[B K U], of the first stage.
          allowed: bool[B 1 U], units that may be kept.
          num_units: i32[B ...], units that a head keeps.
          num_always: i32[B ...], units that it keeps in any case; they count as the first stage's.

        Returns:
          f32[B K U]: inf for the first stage's units, the new scores for all others.
        """
        num_first = jnp.clip(fraction_of(self.share, num_units + num_always) - num_always, 0, num_units)
        return jnp.where(top_k_mask(first_scores, allowed, num_first), jnp.inf, self.unit_scores)
