"""A prompt's first and last tokens: StreamingLLM as a baseline that only shortens the prompt."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class Recency(kv.Scorer):
    """Scores a token by its position."""

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        return kv.token_scores(jnp.broadcast_to(block.pos, block.k.shape[:3]).astype(jnp.float32), block)


@kv.register_method(example="sinks_and_recent:budget=512", family="eviction after the prompt")
def sinks_and_recent(budget: int = 1024, sinks: int = 4) -> kv.Method:
    """Keeps only the prompt's first and last tokens, at their true positions, and all decoded tokens.

    Formula:
      s < sinks or s >= T - (budget - sinks)

    Differs:
      No difference from kvpress' StreamingLLMPress is known; StreamingLLM itself, which also evicts while decoding, is
      `streaming_llm`.

    Args:
      budget: prompt tokens kept per layer and key/value head, the sinks included.
      sinks: as in `make_selection`.

    Reference:
      StreamingLLM as a prompt-only baseline (KVCache-Factory, kvpress)
    """
    return kv.Method(select=kv.make_selection(Recency(), budget, sinks, max(budget - sinks, 0), "token", "layer"))
