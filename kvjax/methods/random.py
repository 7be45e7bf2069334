"""Random tokens: the baseline."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.cache.components import Scorer, Scores
from kvjax.cache.eviction.budgets import TokenBudget
from kvjax.cache.eviction.scorers import token_scores
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.random import draw
from kvjax.core.types import KVBlock
from kvjax.registry.registration import register_method


@dataclasses.dataclass(frozen=True)
class Random(Scorer):
    """Draws scores in [0, 1) by seed, key/value head and position alone, so that all layers draw alike."""

    seed: int = 0

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        pos = jnp.broadcast_to(block.pos, block.k.shape[:3])
        head = over_heads.first_head(pos.shape[1]) + jnp.arange(pos.shape[1], dtype=jnp.int32)[None, :, None]
        bits = draw(self.seed, jnp.broadcast_to(head, pos.shape), pos) >> 8
        return token_scores(bits.astype(jnp.float32) * np.float32(2**-24), block)


@register_method(example="random:budget=512,sinks=4,recent=64", family="eviction after the prompt")
def random(budget: TokenBudget = 1024, sinks: int = 0, recent: int = 0, seed: int = 0, unit: str = "token") -> Method:
    """Keeps prompt tokens drawn at random by seed, head and position.

    Formula:
      score_s uniform in [0, 1) by seed, head and position

    Differs:
      None; it is a baseline.

    Args:
      budget, sinks, recent, unit: as in `make_selection`.
      seed: seed of the draws.

    Reference:
      the baseline of chance
    """
    return Method(select=make_selection(Random(seed), budget, sinks, recent, unit, "head"))
