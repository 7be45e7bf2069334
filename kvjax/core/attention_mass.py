"""What a prompt's queries say about its keys: the observation a scorer asks for, and blockwise passes over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.core.attention import MASKED_LOGIT, log_sum_exp, scores, visible
from kvjax.core.mesh import vary
from kvjax.core.types import Array, KVBlock, exportable


@exportable
class Observation(NamedTuple):
    """The last Q prompt queries of each row, after RoPE; only `pos` tells which of them are real."""

    q: Array  # [B K G Q H]
    pos: Array  # i32[B Q], positions in the prompt, -1 = padding
    # i32[B] tokens of each row, or i32[B K] of each head, that stay by all layers' measures
    num_kept: Array | None = None
    output_projection: Array | None = None  # [1 K G H D], the layer's output projection, where it is asked for
    # [B 1 Q D], what these queries, and their keys and values, are made of, likewise
    hidden_states: Array | None = None
    replay_scores: Array | None = None  # f32[B K S], what a second pass over the prompt said of its tokens, likewise
    paired_block: KVBlock | None = None  # the same prompt in the layer above or below, likewise
    # f32[B K G Q], each query's `attention.log_sum_exp` over the block, where it is known
    softmax_lse: Array | None = None


_NEVER = np.int32(2**30)  # a position behind all others


def attention_mass(
    block: KVBlock,
    observation: Observation,
    query_weights: Array,
    window: int | None = None,
    at_once: int = 256,
    logit_transform: Callable[[Array, Array, Array], Array] | None = None,
) -> tuple[Array, Array]:
    """The attention that each slot receives: float32 softmax weights, summed over queries that count `query_weights`
    f32[B Q].

    Causal, inside the layer's sliding window. Returns the sum f32[B K G S], and the sum of `query_weights` over the
    queries that see the slot f32[B 1|K S]. Padding queries see nothing and empty slots receive 0, whatever they hold.
    Memory grows with `at_once` squared, never with Q x S. logit_transform: what becomes, before the softmax, of the
    logits f32[B K G Q S] of queries at i32[B Q] to slots that hold i32[B 1|K S].
    """

    def received(p: Array, query_weights: Array, seen: Array) -> tuple[Array, Array]:
        query_weights = query_weights[:, None, None, :, None]
        return (p * query_weights).sum(3), jnp.where(seen, query_weights, 0.0).sum(3)[:, :, 0]

    return _summed(received, block, observation, query_weights, window, at_once, logit_transform)


class Moments(NamedTuple):
    """Sums over queries of the attention p that each slot receives from them, f32[B K G S]."""

    p: Array
    square: Array  # of p * p
    p_log_p: Array  # of p * ln(p + 1e-10)


def moments(block: KVBlock, observation: Observation, window: int | None = None, at_once: int = 256) -> Moments:
    """The sums from which mean, variance and entropy of the attention to each slot follow, over all real queries.

    Causal, inside the layer's sliding window; padding and memory as in `attention_mass`.
    """

    def received(p: Array, query_weights: Array, seen: Array) -> Moments:
        return Moments(p.sum(3), (p * p).sum(3), (p * jnp.log(p + 1e-10)).sum(3))

    return _summed(received, block, observation, jnp.ones(observation.pos.shape), window, at_once)


class _Asking(NamedTuple):
    """Some queries."""

    q: Array  # [B K G T H]
    pos: Array  # i32[B T]
    query_weights: Array  # f32[B T], what each of them counts
    sums: Array | None  # f32[B K G T], as in `Observation`


class _Slots(NamedTuple):
    """Some slots."""

    k: Array  # [B K S H]
    pos: Array  # i32[B 1|K S]


class _Look(NamedTuple):
    """How queries look at all slots, which come in pieces: slots [n ..], n pieces of equal size."""

    pieces: _Slots
    window: int | None
    logit_transform: Callable[[Array, Array, Array], Array] | None

    def logits(self, asking: _Asking, slots: _Slots) -> tuple[Array, Array]:
        """(f32[B K G T S], NEG where a query does not see a slot; whether it does, bool[B 1|K 1 T S])."""
        seen, found = visible(slots.pos, asking.pos, self.window), scores(asking.q, slots.k)
        if self.logit_transform is not None:
            found = self.logit_transform(found, asking.pos, slots.pos)
        return jnp.where(seen, found, MASKED_LOGIT), seen

    def if_seen(self, asking: _Asking, slots: _Slots, more: Callable[[Any], Any], before: Any) -> Any:
        """more(before), or `before` where no query can see a slot: those in the future, and those before the window."""
        if self.pieces.pos.shape[0] == 1:
            return more(before)
        some = jnp.where(slots.pos < 0, _NEVER, slots.pos).min() <= asking.pos.max()
        if self.window is not None:
            some &= slots.pos.max() > jnp.where(asking.pos < 0, _NEVER, asking.pos).min() - self.window
        return lax.cond(some, more, lambda same: same, before)

    def sums(self, asking: _Asking) -> Array:
        """The log of the sum of each query's softmax over all slots, f32[B K G T]."""
        if asking.sums is not None:
            return asking.sums

        def over(before: tuple[Array, Array], slots: _Slots) -> tuple[tuple[Array, Array], None]:
            def more(before: tuple[Array, Array]) -> tuple[Array, Array]:
                found, _ = self.logits(asking, slots)
                m = jnp.maximum(before[0], lax.stop_gradient(found.max(-1)))
                return m, before[1] * jnp.exp(before[0] - m) + jnp.exp(found - m[..., None]).sum(-1)

            return self.if_seen(asking, slots, more, before), None

        shape = asking.q.shape[:-1]
        (m, l), _ = lax.scan(over, vary((jnp.full(shape, MASKED_LOGIT), jnp.zeros(shape))), self.pieces)
        return log_sum_exp(m, l)

    def attention(self, asking: _Asking, slots: _Slots, sums: Array) -> tuple[Array, Array]:
        """(weights f32[B K G T S] of softmaxes with these sums; which slots are seen, bool[B 1|K 1 T S])."""
        found, seen = self.logits(asking, slots)
        return jnp.where(found > MASKED_LOGIT / 2, jnp.exp(found - sums[..., None]), 0.0), seen


def _summed(
    received: Callable[[Array, Array, Array], Any],
    block: KVBlock,
    observation: Observation,
    query_weights: Array,
    window: int | None,
    at_once: int,
    logit_transform: Callable[[Array, Array, Array], Array] | None = None,
) -> Any:
    """What slots have `received` from all queries: arrays [.. S].

    received(p f32[B K G T S], query_weights f32[B T], seen bool[B 1|K 1 T S]) is asked for some queries and some slots
    at a time, when the sum of these queries' softmax over all slots is known: what they see is read once for it where
    `observation` does not bring it, and once more; the rest is not read at all.
    """
    Q, S = observation.pos.shape[1], block.pos.shape[2]
    queries = min(at_once, Q)
    slots = min(at_once * at_once // queries, S)
    known = (
        None
        if observation.softmax_lse is None or logit_transform is not None
        else _pieces(observation.softmax_lse, 3, queries)
    )
    asked = _Asking(
        _pieces(observation.q, 3, queries),
        _pieces(observation.pos, 1, queries, -1),
        _pieces(query_weights, 1, queries),
        known,
    )
    look = _Look(_Slots(_pieces(block.k, 2, slots), _pieces(block.pos, 2, slots, -1)), window, logit_transform)

    def of_piece(asking: _Asking, slots: _Slots, sums: Array) -> Any:
        p, seen = look.attention(asking, slots, sums)
        return received(p, asking.query_weights, seen)

    def of_queries(total: Any, asking: _Asking) -> tuple[Any, None]:
        sums = look.sums(asking)

        def onto(_: None, xs: tuple[_Slots, Any]) -> tuple[None, Any]:
            slots, before = xs

            def more(before: Any) -> Any:
                return jax.tree.map(jnp.add, before, of_piece(asking, slots, sums))

            return None, look.if_seen(asking, slots, more, before)

        return lax.scan(onto, None, (look.pieces, total))[1], None

    asking, piece = jax.tree.map(lambda x: x[0], (asked, look.pieces))
    of_one = jax.eval_shape(lambda: of_piece(asking, piece, look.sums(asking)))
    nothing = jax.tree.map(lambda x: jnp.zeros((len(look.pieces.pos), *x.shape), x.dtype), of_one)
    total = lax.scan(of_queries, vary(nothing), asked)[0]
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)[..., :S], total)


def _pieces(x: Array, axis: int, size: int, fill: int = 0) -> Array:
    """x cut along an axis into n pieces of equal size, n comes first; the last one is filled up."""
    pad = [(0, -x.shape[axis] % size if a == axis else 0) for a in range(x.ndim)]
    x = jnp.pad(x, pad, constant_values=fill)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)
