"""Attention-Gate: a small trained attention over the prompt's hidden states flags the tokens that each head keeps."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.eviction.flags import ThresholdBudgets
from kvjax.cache.eviction.gates import AttentionGateTable, gate_attention
from kvjax.cache.eviction.scorers import Scorer, Scores, token_scores
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.cache.side_store.paged_heads import PagedHeads
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@dataclasses.dataclass(frozen=True)
class Gate(Scorer):
    """The logit with which a token's gate is open, for each key/value head (Zeng et al. 2024, 2410.12876)."""

    given: TableFile
    needs_hidden: ClassVar[bool] = True

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        observation, K = self.require_observation(observation), spec.num_kv_heads
        assert observation.hidden_states is not None
        wide = (None, None, None)
        arrays = self.given.layer_arrays(
            spec, query=wide, key=wide, value=wide, output=(None, None, K), bias=(K,)
        ).values()
        query, key, value, output, bias = (jnp.asarray(x, jnp.float32) for x in arrays)
        if query.shape[1] != observation.hidden_states.shape[3]:
            raise KvjaxError(
                f"the gates in {self.given.path} read hidden states of {query.shape[1]} channels, and the model has "
                f"{observation.hidden_states.shape[3]}; make a table for this model, as with `kvjax calibrate "
                "attention_gate`"
            )
        mixed = gate_attention(observation.hidden_states, block.pos[:, 0], query, key, value)
        here = block.k.shape[1]
        output, bias = over_heads.local_part(jnp.moveaxis(output, 2, 0), here), over_heads.local_part(bias, here)
        logits = jnp.einsum("bate,kae->bkt", mixed, output, precision=lax.Precision.HIGHEST)
        return token_scores(logits + bias[None, :, None], block)


@register_method(example="attention_gate:budget=512", family="eviction after the prompt")
def attention_gate(
    budget: int = 1024, threshold: float = 0.5, sinks: int = 4, recent: int = 32, table: str = "shipped", page: int = 16
) -> Method:
    """Keeps the prompt tokens that each head's trained gate flags, up to a budget.

    Formula:
      gate of all heads = sigmoid(sum over a of softmax(x Q_a (x K_a)^T / sqrt(C)) x V_a O_a + b), x the hidden states
      of the prompt; a head keeps its tokens whose gate is above the threshold

    Differs:
      The paper has no public code. Unverified: the layout of the gate, its bias, that it sees no positions, and the
      threshold. The prompt attends exactly, where the paper also hides evicted tokens from later ones; grouped query
      heads share one gate. The budget, the sinks and the recent tokens are not in the paper.

    Args:
      budget: the most prompt tokens per layer and key/value head, on average over the heads; memory is reserved for
        them.
      threshold: gate value, 0 to 1, above which a token stays; 0 keeps all that the budget allows.
      sinks: first tokens that stay whatever the gate says.
      recent: last tokens that stay whatever the gate says.
      table: a file of kind `attention_gate`. The shipped tables are fitted by linear discriminants, as `kvjax calibrate
        attention_gate` does, where the paper trains through the model.
      page: slots of a page, in which heads of unequal length are stored.

    Reference:
      Attention-Gate, Zeng et al. 2024, arXiv 2410.12876
    """
    if not 0 <= threshold < 1:
        raise KvjaxError(
            f"threshold is a gate's least probability to keep a token, 0 <= threshold < 1, got {threshold}"
        )
    above = math.log(threshold / (1 - threshold)) if threshold else -math.inf
    select = make_selection(Gate(AttentionGateTable.table_file(table)), budget, sinks, recent)
    return Method(select=select, side_store=PagedHeads(ThresholdBudgets(above), page))
