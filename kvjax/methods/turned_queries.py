"""Turned queries: keeps the tokens that the prompt's own queries attend to from a position after the prompt."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.competition import level_components
from kvjax.cache.eviction.future_queries import visible_to_next_query

QUERIES_AT_ONCE = 64  # a block of [64, T] weights is in memory, not one of [T, T]


@dataclasses.dataclass(frozen=True)
class TurnedQueries(kv.Scorer):
    """Scores a token by the most attention that any of the prompt's queries pays it from after the prompt.

    The rotary embedding of each query is replaced by that of one position after the prompt, its length + `ahead`. Each
    query then attends to the whole prompt, without a causal mask, as a later reader at that position would. So early
    queries, which never saw the tokens that follow them, take part. A key/value head takes the greatest over its query
    heads. The fields are arguments of `turned_queries`.
    """

    num_queries: ClassVar[int | None] = None
    ahead: kv.NonNegativeInt = 32
    reduce: Literal["mean", "max"] = "max"
    stride: kv.PositiveInt = 1
    last: Annotated[float, kv.Within("(0, 1]")] = 1.0

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        block, observation = block.clean(), self._sample(self.require_observation(observation))
        # The number of tokens does not tell the end: a cache that is compressed again has evicted tokens in between.
        end = observation.pos.max(1) + 1  # i32[B]
        is_query = observation.pos >= 0
        target_pos = jnp.where(is_query, (end + self.ahead)[:, None], -1)
        # Tokens outside a sliding window of the next query are never seen again, so they score nothing.
        readable = visible_to_next_query(block, spec.rule)[:, :, :, None]

        def add(total: kv.Array, queries: tuple[kv.Array, kv.Array, kv.Array]) -> tuple[kv.Array, None]:
            q, pos, target_pos = queries
            pre_rope = spec.rope.unrotate_queries(q, jnp.maximum(pos, 0))
            turned = spec.rope.rotate_queries(pre_rope, jnp.maximum(target_pos, 0)).astype(q.dtype)
            is_visible = kv.attention.visible(block.pos, target_pos) & readable
            logits = spec.rule.cap(kv.attention.scores(turned, block.k))
            # f32[B K G 64 S]
            p = kv.attention.softmax(jnp.where(is_visible, logits, kv.MASKED_LOGIT), observation.sinks)
            return (jnp.maximum(total, p.max(3)) if self.reduce == "max" else total + p.sum(3)), None

        blocks = (
            kv.attention.split_blocks(observation.q, 3, QUERIES_AT_ONCE),
            kv.attention.split_blocks(observation.pos, 1, QUERIES_AT_ONCE, -1),
            kv.attention.split_blocks(target_pos, 1, QUERIES_AT_ONCE, -1),
        )
        heads, _ = lax.scan(add, kv.vary(jnp.zeros((*observation.q.shape[:3], block.k.shape[2]))), blocks)
        if self.reduce == "mean":
            heads = heads / jnp.maximum(is_query.astype(jnp.float32).sum(-1), 1.0)[:, None, None, None]
        return kv.head_scores(heads, heads.max(2), block)

    def _sample(self, observation: kv.Observation) -> kv.Observation:
        """Takes the queries that take part."""
        if self.stride == 1 and self.last == 1:
            return observation
        width, newest = observation.pos.shape[1], observation.pos.max(1, keepdims=True)
        most = max(int(kv.fraction_of(self.last, width)), 1)
        age = jnp.arange(0, most, self.stride, dtype=jnp.int32)[None]
        takes_part = age < jnp.maximum(kv.fraction_of(self.last, newest + 1), 1)
        # A query lies at its position, or, in the ring of a cache that is compressed again, at that modulo the width.
        at = (newest - age) % width
        pos = jnp.where(takes_part, jnp.take_along_axis(observation.pos, at, 1), -1)
        return observation._replace(q=jnp.take_along_axis(observation.q, at[:, None, None, :, None], 3), pos=pos)


@kv.register_method(example="turned_queries:budget=512", family="eviction after the prompt")
def turned_queries(
    budget: kv.TokenBudget = 1024,
    ahead: int = 32,
    sinks: int = 4,
    recent: int = 0,
    reduce: Literal["mean", "max"] = "max",
    stride: int = 1,
    last: float = 1.0,
    level: Literal["model", "layer", "head"] = "model",
    page: int = 16,
) -> kv.Method:
    """Keeps the tokens that the prompt's own queries would attend to if they came after it.

    It costs one more attention pass over the prompt, and no run of the model. With level=model bytes are planned as an
    upper bound.

    Formula:
      score_s = max over queries t of the prompt, and over query heads, of softmax_s(R(T + ahead) R(-t) q_t . k_s) over
      all T tokens, R(p) the rotation of position p; the L K budget pairs of the highest scores stay, of all heads of
      all layers

    Differs:
      There is no paper. KVzip's scores come from queries of a repetition of the prompt; these come from the prompt's
      own queries, so that the model runs once. Early layers get more tokens than by KVzip's division, and late ones
      fewer. At an eighth of the bytes this loses answers on Qwen2.5-Coder-0.5B, where `kvzip` keeps them
      (`docs/divisions.md`): take `level=head + head_shares` there, with a table that `kvjax calibrate
      head_shares` has made once and that ships for this model, or `kvzip` and its second pass.

    Args:
      budget: as in `make_selection`, on average over the heads that share it; tokens that always stay are included.
      ahead: tokens between the prompt's end and the position that its queries are rotated to.
      sinks, recent: as in `make_selection`.
      reduce: "max" or "mean" over the queries.
      stride: every stride-th query is used, counted from the last one, and costs fall in proportion.
      last: fraction of the prompt, at its end, whose queries are used; at least one query is.
      level: the heads that share the budget by one ranking of scores: "model", all heads of all layers, for which it is
        made; "layer", all heads of a layer; or "head", where every head keeps the same number of tokens.
      page: slots of a page, in which heads of unequal length are stored, unless level is "head".

    Reference:
      kvjax's own
    """
    return kv.Method(
        select=kv.make_selection(TurnedQueries(ahead, reduce, stride, last), budget, sinks, recent),
        **level_components(level, page),
    )
