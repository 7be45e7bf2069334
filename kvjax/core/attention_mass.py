"""The observation of a prompt's queries, and the attention weights that they give to each slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Float32, Int32

from kvjax.core.attention import MASKED_LOGIT, PLAIN, Rule, log_sum_exp, scores, softmax, split_blocks, visible
from kvjax.core.mesh import vary
from kvjax.core.types import Array, KVBlock, exportable

LogitTransform = Callable[[Array, Array, Array], Array]
"""(logits f32[B K G Q S], positions of the queries i32[B Q], of the slots i32[B 1|K S]) -> logits of the same shape."""


@exportable
class Observation(NamedTuple):
    """The last Q queries of each prompt after RoPE, and what else a component asked for; the rest is None.

    Where a component asks for W queries, Q is W, or more if another component of the method asks for more: the last
    query stands at the end, and a prompt of fewer tokens has padding in front of it. Where one asks for all (None), Q
    is the width of the padded prompts, and padding stands behind. Padding may hold anything.

    Attributes:
      q: queries in the model's dtype, not scaled by H ** -0.5; Q is 0 where components ask for something else alone.
      pos: positions in the prompt, -1 for padding; nothing else tells which queries are real.
      num_kept: tokens that each sequence, or each head, keeps of a budget that layers divide.
      measure: what this layer has measured of the prompt (`LayerBudgets.measure`), where it has a `num_kept`.
      output_projection: of the layer, for `needs_output`.
      hidden_states: what queries, keys and values of the tokens in the block were projected from, after the layer's
        norm, for `needs_hidden`; in `Scorer.update_scores`, those of the repeated tokens.
      replay_scores: scores of the tokens from a second pass over the prompt, for `Scorer.replay`.
      paired_block: the same prompt in the layer above or below, for a method that pairs layers (MiniCache).
      softmax_lse: the log-sum-exp of each query's logits to the whole prompt, the sinks, and a prefix that sequences
        share, where attention left it. `attention_mass` and `attention_rows` take it; it is None once tokens of the
        prompt are gone.
      sinks: logits of the layer that take weight in every softmax and give no value (gpt-oss); those of the model have
        an axis 0 of 1. None in a layer without.
      gradient_norms: in `Scorer.update_scores`, for `Replay.needs_gradients`: of each repeated token the norm of the
        gradient of the sum of squares of the model's last hidden states, by the layer's attention output.
    """

    q: Float[Array, "B K G Q H"]
    pos: Int32[Array, "B Q"]
    num_kept: Int32[Array, " B"] | Int32[Array, "B K"] | None = None
    measure: Any = None
    output_projection: Float[Array, "1 K G Hv D"] | None = None
    hidden_states: Float[Array, "B 1 T D"] | None = None
    replay_scores: Float32[Array, "B K S"] | None = None
    paired_block: KVBlock | None = None
    softmax_lse: Float32[Array, "B K G Q"] | None = None
    sinks: Float[Array, "#B K G"] | None = None
    gradient_norms: Float32[Array, "B Q"] | None = None


def attention_mass(
    block: KVBlock,
    observation: Observation,
    query_weights: Float32[Array, "B Q"],
    rule: Rule = PLAIN,
    block_size: int = 256,
    logit_transform: LogitTransform | None = None,
) -> tuple[Float32[Array, "B K G S"], Float32[Array, "B #K S"]]:
    """Sums the attention weights that each slot receives from the observed queries.

    The weights are those of the model's softmax, in whose sum learned sinks count (`Observation.sinks`). Attention is
    causal and inside the layer's sliding window. Padding queries see nothing, and empty slots receive 0.

    Args:
      block: keys of the prompt.
      observation: the queries.
      query_weights: by which each query's attention counts.
      rule: the layer's window and soft cap.
      block_size: memory grows with its square, never with Q x S.
      logit_transform: applied to the logits, after the soft cap and before the softmax, which is then one over the
        slots alone: what the transform makes of a sink is not defined.

    Returns:
      (weighted sums; for each slot, the sum of `query_weights` over the queries that see it).
    """

    def reduce_queries(p: Array, query_weights: Array, mask: Array) -> tuple[Array, Array]:
        query_weights = query_weights[:, None, None, :, None]
        return (p * query_weights).sum(3), jnp.where(mask, query_weights, 0.0).sum(3)[:, :, 0]

    return _sum_over_queries(
        reduce_queries, block, observation, query_weights, rule, block_size=block_size, transform=logit_transform
    )


def attention_rows(block: KVBlock, observation: Observation, rule: Rule = PLAIN) -> Float32[Array, "B K G Q S"]:
    """Computes the attention weights that each observed query gives to each slot.

    They are the weights that `attention_mass` sums. The result grows with Q x S, so observe few queries, or take some
    at a time.

    Args:
      block: keys of the prompt.
      observation: the queries.
      rule: the layer's window and soft cap.

    Returns:
      The weights, 0 in empty slots and for queries of padding.
    """
    logits = rule.logits(scores(observation.q, block.k), block.pos, observation.pos)
    if observation.softmax_lse is None:
        return softmax(logits, observation.sinks)
    return jnp.where(logits > MASKED_LOGIT / 2, jnp.exp(logits - observation.softmax_lse[..., None]), 0.0)


class Moments(NamedTuple):
    """Sums over queries of the attention weight p that each slot receives from them."""

    p: Float32[Array, "B K G S"]
    square: Float32[Array, "B K G S"]  # of p * p
    p_log_p: Float32[Array, "B K G S"]  # of p * ln(p + 1e-10)


def moments(block: KVBlock, observation: Observation, rule: Rule = PLAIN, block_size: int = 256) -> Moments:
    """Sums from which mean, variance and entropy of each slot's attention weights follow, over all real queries.

    The arguments are those of `attention_mass`.
    """
    return _sum_over_queries(
        lambda p, *_: Moments(p.sum(3), (p * p).sum(3), (p * jnp.log(p + 1e-10)).sum(3)),
        block,
        observation,
        jnp.ones(observation.pos.shape),
        rule,
        block_size=block_size,
    )


class _Queries(NamedTuple):
    """A block of queries."""

    q: Float[Array, "B K G T H"]
    pos: Int32[Array, "B T"]
    weights: Float32[Array, "B T"]
    lse: Float32[Array, "B K G T"] | None  # `Observation.softmax_lse`


class _Slots(NamedTuple):
    """A block of slots."""

    k: Float[Array, "B K S H"]
    pos: Int32[Array, "B #K S"]


_AFTER_ALL = np.int32(2**30)  # a position after all real ones


class _SlotBlocks(NamedTuple):
    """All slots, in blocks of equal size, and how queries see them."""

    slots: _Slots  # arrays [n ...], n blocks
    rule: Rule
    transform: LogitTransform | None
    sinks: Float[Array, "#B K G"] | None

    def logits(self, queries: _Queries, slots: _Slots) -> tuple[Array, Array]:
        """(f32[B K G T S], MASKED_LOGIT where a query does not see a slot; the mask bool[B 1|K 1 T S])."""
        mask, logits = visible(slots.pos, queries.pos, self.rule), self.rule.cap(scores(queries.q, slots.k))
        if self.transform is not None:
            logits = self.transform(logits, queries.pos, slots.pos)
        return jnp.where(mask, logits, MASKED_LOGIT), mask

    def if_any_visible(self, queries: _Queries, slots: _Slots, update: Callable[[Any], Any], carry: Any) -> Any:
        """Returns update(carry), or `carry` where causality and window hide all these slots from these queries."""
        # A short prompt is one block, which is never hidden; a `cond` would only keep XLA from fusing it.
        if self.slots.pos.shape[0] == 1:
            return update(carry)
        some = jnp.where(slots.pos < 0, _AFTER_ALL, slots.pos).min() <= queries.pos.max()
        if (window := self.rule.window) is not None:
            some &= slots.pos.max() > jnp.where(queries.pos < 0, _AFTER_ALL, queries.pos).min() - window
        return lax.cond(some, update, lambda carry: carry, carry)

    def log_sum_exp(self, queries: _Queries) -> Float32[Array, "B K G T"]:
        """The log-sum-exp of each query's logits, over all slots and the sinks."""
        if queries.lse is not None:
            return queries.lse

        def add_block(carry: tuple[Array, Array], slots: _Slots) -> tuple[tuple[Array, Array], None]:
            def update(carry: tuple[Array, Array]) -> tuple[Array, Array]:
                logits, _ = self.logits(queries, slots)
                # As in `attention.weights`: the result does not depend on m.
                m = jnp.maximum(carry[0], lax.stop_gradient(logits.max(-1)))
                return m, carry[1] * jnp.exp(carry[0] - m) + jnp.exp(logits - m[..., None]).sum(-1)

            return self.if_any_visible(queries, slots, update, carry), None

        shape = queries.q.shape[:-1]
        (m, l), _ = lax.scan(add_block, vary((jnp.full(shape, MASKED_LOGIT), jnp.zeros(shape))), self.slots)
        lse = log_sum_exp(m, l)
        return lse if self.sinks is None else jnp.logaddexp(lse, self.sinks.astype(jnp.float32)[..., None])


def _sum_over_queries(
    reduce_queries: Callable[[Array, Array, Array], Any],
    block: KVBlock,
    observation: Observation,
    query_weights: Array,
    rule: Rule,
    *,
    block_size: int,
    transform: LogitTransform | None = None,
) -> Any:
    """Sums reduce_queries(p f32[B K G T S], query_weights f32[B T], mask bool[B 1|K 1 T S]) -> [.. S] over blocks."""
    Q, S = observation.pos.shape[1], block.pos.shape[2]
    num_queries = min(block_size, Q)
    # Few observed queries (SnapKV's 32) get longer blocks of slots: what is bounded is the size of a tile of logits.
    num_slots = min(block_size * block_size // num_queries, S)
    # A transform changes the logits, and with them their sum.
    lse, sinks = (None, None) if transform is not None else (observation.softmax_lse, observation.sinks)
    query_blocks = _Queries(
        split_blocks(observation.q, 3, num_queries),
        split_blocks(observation.pos, 1, num_queries, -1),
        split_blocks(query_weights, 1, num_queries),
        None if lse is None else split_blocks(lse, 3, num_queries),
    )
    slots = _Slots(split_blocks(block.k, 2, num_slots), split_blocks(block.pos, 2, num_slots, -1))
    blocks = _SlotBlocks(slots, rule, transform, sinks)

    def reduce_block(queries: _Queries, slots: _Slots, lse: Array) -> Any:
        logits, mask = blocks.logits(queries, slots)
        p = jnp.where(logits > MASKED_LOGIT / 2, jnp.exp(logits - lse[..., None]), 0.0)
        return reduce_queries(p, queries.weights, mask)

    # Two passes over the slots: a weight is known when its query's logits to all slots have been summed. Where
    # attention left the sum in the observation, the first pass is saved.
    def add_queries(total: Any, queries: _Queries) -> tuple[Any, None]:
        lse = blocks.log_sum_exp(queries)

        def add_block(_: None, xs: tuple[_Slots, Any]) -> tuple[None, Any]:
            slots, subtotal = xs
            return None, blocks.if_any_visible(
                queries, slots, lambda total: jax.tree.map(jnp.add, total, reduce_block(queries, slots, lse)), subtotal
            )

        return lax.scan(add_block, None, (blocks.slots, total))[1], None

    # The callers' reductions differ in what they return, so the accumulator's shapes are asked of the first pair.
    queries, slots = jax.tree.map(lambda x: x[0], (query_blocks, blocks.slots))
    shapes = jax.eval_shape(lambda: reduce_block(queries, slots, blocks.log_sum_exp(queries)))
    zeros = jax.tree.map(lambda x: jnp.zeros((len(blocks.slots.pos), *x.shape), x.dtype), shapes)
    total = lax.scan(add_queries, vary(zeros), query_blocks)[0]
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)[..., :S], total)
