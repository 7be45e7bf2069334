"""DropKV: keeps the tokens without which the attention output of the last queries would move furthest."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.scorers import pool_scores
from kvjax.methods.recompress import latest_queries

EPSILON = 1e-6  # of the authors' code, added to 1 - p


@dataclasses.dataclass(frozen=True)
class DropKV(kv.Scorer):
    """Scores a token by how far the outputs of the window's queries move if it alone leaves (Zhang et al. 2026).

    Without token j the other weights of a query grow by 1 / (1 - p_j), so that its output o moves by
    p_j / (1 - p_j) (o - v_j). The squares of these distances are summed over the window's queries, averaged over the
    query heads of a key/value head, and averaged over `kernel` neighbors.
    """

    num_queries: kv.PositiveInt = 8
    kernel: Annotated[int, kv.Odd()] = 11

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        block, window = block.clean(), latest_queries(self.require_observation(observation), self.num_queries)
        values = block.v.astype(jnp.float32)

        # One query at a time: differences of values and an output, unlike their expanded squares, keep their digits
        # where a weight is near 1, and those of all queries at once would outgrow the prompt.
        def add(total: kv.Array, query: tuple[kv.Array, kv.Array]) -> tuple[kv.Array, None]:
            q, pos = query
            p = kv.attention_rows(block, kv.Observation(q, pos, sinks=window.sinks), spec.rule)[:, :, :, 0]
            output = jnp.einsum("bkgs,bksh->bkgh", p, values)
            distances = jnp.square(values[:, :, None] - output[:, :, :, None]).sum(-1)
            return total + jnp.square(p / (1.0 - p + EPSILON)) * distances, None

        queries = kv.attention.split_blocks(window.q, 3, 1), kv.attention.split_blocks(window.pos, 1, 1, -1)
        zeros = kv.vary(jnp.zeros((*window.q.shape[:3], block.k.shape[2])))
        heads = lax.scan(add, zeros, queries)[0]
        is_real = jnp.broadcast_to(block.pos >= 0, block.k.shape[:3])
        return kv.head_scores(heads, pool_scores(heads.mean(2), is_real, self.kernel, "avg"), block)


@kv.register_method(example="dropkv:budget=512", family="eviction after the prompt")
def dropkv(
    budget: kv.TokenBudget = 1024,
    window: int = 8,
    kernel: int = 11,
    sinks: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens that the attention output of its last queries needs most, and these queries' window.

    Scores are squared distances of outputs, the same unit in all heads, so that 'dropkv + adakv' compares like with
    like.

    Formula:
      score_s = avg over neighbors, and over a head's query heads, of the sum over the window's queries of
      (p_s / (1 - p_s))^2 |o - v_s|^2, o = sum p v

    Differs:
      The authors' code rounds weights to the model's dtype, and expands the square; here weights and distances are
      float32. Its eviction between the chunks of a prompt is not here.

    Args:
      budget: as in `make_selection`; the window is included.
      window: last queries of the prompt that score the others; their own tokens always stay (authors: 8).
      kernel: neighbors over which scores are averaged, odd (authors: 11).
      sinks, unit, per: as in `make_selection`.

    Reference:
      DropKV, Zhang et al. 2026 (NeurIPS), OpenReview UVbaJoD3Qa; constants of its public code, AozhongZhang/DropKV,
      which has no licence and was read only
    """
    return kv.Method(select=kv.make_selection(DropKV(window, kernel), budget, sinks, window, unit, per))
