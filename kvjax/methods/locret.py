"""Locret: the tokens of which a trained network expects that later queries will look for them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.eviction.budgets import TokenBudget
from kvjax.cache.eviction.retaining import RetainingHeads, group_by_head, retained
from kvjax.cache.eviction.scorers import Scorer, Scores, token_scores
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import KVBlock
from kvjax.methods.registry import register_method


@dataclasses.dataclass(frozen=True)
class RetainingScorer(Scorer):
    """The causal importance of a token: fc2 silu(fc1 [q, k, v]), a number for each key/value head (2410.01805).

    q, k and v are those of the token itself, in all heads and before rotation: what follows changes nothing of it.
    """

    given: TableFile
    num_queries: ClassVar[int | None] = None

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        K, columns = spec.num_kv_heads, (spec.num_kv_heads * spec.num_groups + 2 * spec.num_kv_heads) * spec.head_dim
        fc1, fc2 = self.given.layer_arrays(spec, fc1=(None, columns), fc2=(K, None)).values()
        weights = (jnp.asarray(x, jnp.float32) for x in (group_by_head(fc1, spec), fc2))
        fc1, fc2 = (over_heads.local_part(x, block.k.shape[1]) for x in weights)
        return token_scores(retained(block, self.require_observation(observation), fc1, fc2, spec.rope), block)


@register_method(example="locret:budget=512", family="eviction after the prompt")
def locret(
    budget: TokenBudget = 6100,
    recent: int = 100,
    sinks: int = 0,
    unit: str = "token",
    per: str = "head",
    table: str = "shipped",
) -> Method:
    """Keeps the prompt tokens that a trained network scores highest, and the local tokens.

    Formula:
      score of token s in key/value head h = (fc2 silu(fc1 [q_s, k_s, v_s]))_h, of all heads, before rotation

    Differs:
      The prompt attends exactly and is pruned once, at its end; the public code prunes after each chunk of 3,072 tokens
      and lets the last 2,500 stay until the next. Scores never change, so apart from the effect of pruning on later
      keys the two differ only in tokens that those 2,500 displaced. Calibrated heads are linear.

    Args:
      budget: as in `make_selection`; the last `recent` tokens are included (the public code: 6,000 and 100 local
        tokens).
      recent: as in `make_selection`.
      sinks: as in `make_selection` (the public code: none).
      unit, per: as in `make_selection`.
      table: a file of kind `locret`; the shipped tables are fitted by linear regression, as `kvjax calibrate locret`
        does, where the paper trains for 3,000 steps.

    Reference:
      Locret, Huang et al. 2024, arXiv 2410.01805, section 3.3; its public code, huangyuxiang03/Locret
    """
    scorer = RetainingScorer(RetainingHeads.table_file(table))
    return Method(select=make_selection(scorer, budget, sinks, recent, unit, per))
