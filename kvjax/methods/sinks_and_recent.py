"""A prompt's first and last tokens: StreamingLLM as a baseline that only shortens the prompt."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.contract import LayerSpec
from kvjax.cache.method import Method
from kvjax.cache.select.scorers import Scorer, Scores, by_tokens
from kvjax.cache.select.select import selecting
from kvjax.core.observe import Obs
from kvjax.core.types import Block
from kvjax.methods.catalogue import recipe
from kvjax.methods.trial import Trial, selected


@dataclasses.dataclass(frozen=True)
class Newest(Scorer):
    """The later a token, the more it matters."""

    def scores(self, block: Block, seen: Obs | None, spec: LayerSpec) -> Scores:
        return by_tokens(jnp.broadcast_to(block.pos, block.k.shape[:3]).astype(jnp.float32), block)


@recipe(
    "StreamingLLM as a prompt-only baseline (KVCache-Factory, kvpress)",
    Trial("sinks_and_recent:budget=5,sinks=2", "sinks_and_recent:budget=100,sinks=2", selected(5, per_head=False)),
    formula="s < sinks or s >= T - (budget - sinks)",
    example="sinks_and_recent:budget=512",
    family="eviction after the prompt",
)
def sinks_and_recent(budget: int = 1024, sinks: int = 4) -> Method:
    """After the prompt only its first and last tokens stay, at their true positions; all that is decoded stays too."""
    return Method(select=selecting(Newest(), budget, sinks, max(budget - sinks, 0), "token", "layer"))
