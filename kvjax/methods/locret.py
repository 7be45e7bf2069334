"""Locret: the tokens of which a trained network expects that later queries will look for them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache.calibration.table_file import Given
from kvjax.cache.eviction.budgets import TokenBudget
from kvjax.cache.eviction.retaining import RetainingHeads, group_by_head, retained
from kvjax.cache.eviction.scorers import Scorer, Scores, token_scores
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import KVBlock
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Trial, selected


@dataclasses.dataclass(frozen=True)
class RetainingScorer(Scorer):
    """The causal importance of a token: fc2 silu(fc1 [q, k, v]), a number for each key/value head (2410.01805).

    q, k and v are those of the token itself, in all heads and before rotation: what follows changes nothing of it.
    """

    given: Given
    num_queries: ClassVar[int | None] = None

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        K, columns = spec.num_kv_heads, (spec.num_kv_heads * spec.num_groups + 2 * spec.num_kv_heads) * spec.head_dim
        fc1, fc2 = self.given.of(spec, fc1=(None, columns), fc2=(K, None)).values()
        weights = (jnp.asarray(x, jnp.float32) for x in (group_by_head(fc1, spec), fc2))
        fc1, fc2 = (over_heads.own(x, block.k.shape[1]) for x in weights)
        return token_scores(retained(block, self.require_observation(observation), fc1, fc2, spec.rope), block)


@recipe(
    "Locret, Huang et al. 2024, arXiv 2410.01805, section 3.3; its public code, huangyuxiang03/Locret",
    Trial("locret:budget=5,recent=2", "locret:budget=100,recent=2", selected(5)),
    formula="score of token s in key/value head h = (fc2 silu(fc1 [q_s, k_s, v_s]))_h, of all heads, before rotation",
    differs="The prompt attends exactly and is pruned once, at its end; the public code prunes after each chunk of "
    "3,072 tokens and lets the last 2,500 stay until the next. Scores never change, so beside what pruning makes of "
    "later keys the two differ only in tokens that those 2,500 displaced. Calibrated heads are linear.",
    example="locret:budget=512",
    family="eviction after the prompt",
)
def locret(
    budget: TokenBudget = 6100,
    recent: int = 100,
    sinks: int = 0,
    unit: str = "token",
    per: str = "head",
    table: str = "shipped",
) -> Method:
    """After the prompt each head keeps its local tokens, and those that a trained network scores highest.

    budget: prompt tokens kept per layer and key/value head, the last `recent` of them included (the public code: 6,000
    and 100 local tokens). sinks: first tokens that always stay (it has none). unit, per as in `snapkv`. table: a file
    of kind `locret`, whose class says how released weights are laid out; those that ship with kvjax are fitted, as
    `kvjax calibrate locret` does, by linear regression where the paper trains for 3,000 steps.
    """
    scorer = RetainingScorer(RetainingHeads.given(table))
    return Method(select=make_selection(scorer, budget, sinks, recent, unit, per))
