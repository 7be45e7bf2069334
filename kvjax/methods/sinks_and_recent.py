"""A prompt's first and last tokens: StreamingLLM as a baseline that only shortens the prompt."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.eviction.scorers import Scorer, Scores, token_scores
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Trial, selected


@dataclasses.dataclass(frozen=True)
class Recency(Scorer):
    """Scores a token by its position."""

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        return token_scores(jnp.broadcast_to(block.pos, block.k.shape[:3]).astype(jnp.float32), block)


@recipe(
    "StreamingLLM as a prompt-only baseline (KVCache-Factory, kvpress)",
    Trial("sinks_and_recent:budget=5,sinks=2", "sinks_and_recent:budget=100,sinks=2", selected(5, per_head=False)),
    formula="s < sinks or s >= T - (budget - sinks)",
    example="sinks_and_recent:budget=512",
    family="eviction after the prompt",
)
def sinks_and_recent(budget: int = 1024, sinks: int = 4) -> Method:
    """After the prompt only its first and last tokens stay, at their true positions; all that is decoded stays too."""
    return Method(select=make_selection(Recency(), budget, sinks, max(budget - sinks, 0), "token", "layer"))
