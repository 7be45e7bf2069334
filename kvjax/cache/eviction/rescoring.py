"""A second look at what a selection is about to lose: a part of its tokens is kept by other scores than the rest."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from kvjax.cache.eviction.granularity import top
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock


class SecondStageScorer:
    """The `second_stage` slot of a method: new scores, by which a selection keeps the tokens that its own have not kept
    yet.

    A rule is a frozen dataclass with the field `share` and the method `scores`.
    """

    share: float  # of the tokens that a head keeps, sinks and recents among them: so many go by the scorer's own scores
    needs_output = False  # whether it looks at the layer's output projection, `Observation.output_projection`

    def scores(self, block: KVBlock, own: Array, observation: Observation | None, spec: LayerSpec) -> Array:
        """The new scores f32[B K S] of a block's tokens, from the scorer's own f32[B K S]; -inf at empty slots."""
        raise NotImplementedError


class TwoStage(NamedTuple):
    """What the second part of a selection goes by."""

    share: float  # of the tokens that the first part keeps
    by_units: Array  # f32[B K U], the new scores

    def scores(self, own: Array, allowed: Array, count: Array, beside: Array) -> Array:
        """f32[B K U]: the new scores of units, inf for those that a head keeps by its own.

        allowed bool[B 1 U]. Of the count i32[B ...] units that a head keeps, and the `beside` that it keeps in any
        case, so many go by their own scores; those that it keeps in any case come first.
        """
        first = jnp.clip(fraction_of(self.share, count + beside) - beside, 0, count)
        return jnp.where(top(own, allowed, first), jnp.inf, self.by_units)
