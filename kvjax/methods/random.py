"""Random tokens: the baseline."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class Random(kv.Scorer):
    """Draws scores in [0, 1) by seed, key/value head and position alone, so that all layers draw alike."""

    seed: int = 0

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        pos = jnp.broadcast_to(block.pos, block.k.shape[:3])
        head = kv.over_heads.first_head(pos.shape[1]) + jnp.arange(pos.shape[1], dtype=jnp.int32)[None, :, None]
        bits = kv.draw(self.seed, jnp.broadcast_to(head, pos.shape), pos) >> 8
        return kv.token_scores(bits.astype(jnp.float32) * np.float32(2**-24), block)


@kv.register_method(example="random:budget=512,sinks=4,recent=64", family="eviction after the prompt")
def random(
    budget: kv.TokenBudget = 1024, sinks: int = 0, recent: int = 0, seed: int = 0, unit: str = "token"
) -> kv.Method:
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
    return kv.Method(select=kv.make_selection(Random(seed), budget, sinks, recent, unit, "head"))
