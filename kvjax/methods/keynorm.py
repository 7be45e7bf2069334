"""Key norm: keeps the tokens with the smallest keys."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class KeyNorm(kv.Scorer):
    """Scores a token by minus the norm of its key (Devoto et al. 2024, arXiv 2406.11430)."""

    is_comparable = False  # each layer's norms are on a scale of their own

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        return kv.token_scores(-jnp.sqrt(jnp.square(block.k.astype(jnp.float32)).sum(-1)), block)


@kv.register_method(example="keynorm:budget=512,sinks=4,recent=64", family="eviction after the prompt")
def keynorm(
    budget: kv.TokenBudget = 1024,
    sinks: int = 0,
    recent: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens with the smallest keys; it needs no queries.

    Formula:
      score_s = -|k_s|

    Differs:
      The authors' example (alessiodevoto/l2compress) compresses no tokens of layers 0 and 1; here, as under
      kvpress' `KnormPress`, all layers keep the same number.

    Args:
      budget, sinks, recent, unit, per: as in `make_selection`.

    Reference:
      Devoto et al. 2024, arXiv 2406.11430
    """
    return kv.Method(select=kv.make_selection(KeyNorm(), budget, sinks, recent, unit, per))
