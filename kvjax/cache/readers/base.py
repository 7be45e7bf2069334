"""Which slots a query reads: what all readers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.core.attention import MASKED_LOGIT, scores, visible, weights
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import IncompatibleMethod

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer


class ReadResult(NamedTuple):
    """What a reader gives back."""

    part: Partial  # attention over the slots that were read
    reader_state: Any = None  # what the reader keeps from now on
    weights: Array | None = None  # of a single query, f32[B K G 1 S]: softmax over the slots; for policies
    cross_layer: Any = None  # for the layer above


class Reader:
    """Attends queries to what the codecs hold. This base keeps nothing of its own beside it.

    A reader is a frozen dataclass with the method `read`. The layer that it is handed has the codecs `k` and `v` and
    the `spec`; see `kvjax.cache.bound_layer.MethodLayer`.
    """

    draft_tokens = 0  # guessed tokens that each decode step should carry
    sequential_writes = False  # whether fresh tokens must come one by one
    supports_eviction = True  # whether tokens may come and go in any order of slots
    prompt_chunk = 0  # above 0: prompts are read through it too, so many tokens at a time
    unbounded_length = False  # whether a query meets every token within a limited distance, as in `Needs`
    num_queries: int | None = 0  # of a row's last prompt queries, as in `Needs`, that `init_state` wants to see

    def init_state(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Any:
        """What the reader keeps after a prompt; block [B K S H] with the prompt at the front of each row.

        observation: the prompt's queries, where the reader asks for some; else None.
        """
        return None

    def append(self, reader_state: Any, new: KVBlock, at: Array, spec: LayerSpec) -> Any:
        """The same after the tokens [B K T H], now in the slots from at i32[B 1|K] on; T may be 0."""
        return reader_state

    def filled(self, reader_state: Any, num_tokens: int) -> Any:
        """The part of `reader_state` that the first tokens fill, as in `Codec.filled`."""
        return reader_state

    def crop(self, layer: MethodLayer, state: LayerState) -> Any:
        """What the reader keeps of a state whose last tokens have been taken back, `state.pos` says which are left."""
        if state.reader_state is None:
            return None
        raise IncompatibleMethod(
            f"slot `read`, {type(self).__name__}, keeps something of all tokens, which none can be taken out of; a "
            "context is a value: keep the one of before, or branch it"
        )

    def read(
        self,
        layer: MethodLayer,
        state: LayerState,
        q: Array,
        q_pos: Array,
        other_partial: Partial | None,
        cross_layer: Any,
    ) -> ReadResult:
        """Queries q [B K G T H] at q_pos i32[B T] over the visible slots.

        guessed: attention to tokens of this call that are not kept, for readers that need a softmax over everything.
        cross_layer: what the layer below handed up.
        """
        raise NotImplementedError


def logits(layer: MethodLayer, state: LayerState, q: Array, q_pos: Array, keys: Any) -> Array:
    """f32[B K G T S]: scaled dot products with all keys (in device memory) plus bias, MASKED_LOGIT where hidden."""
    if layer.method.positions == "cache":
        s = _indexed_scores(layer, state, q, q_pos, keys)
    elif layer.k.pre_rope:
        s = scores(q, layer.keys(keys, state.pos))
    else:
        s = layer.k.scores(q, keys)
    if state.bias is not None:
        s = s + state.bias[:, :, None, None]
    return jnp.where(visible(state.pos, q_pos, layer.spec.window), s, MASKED_LOGIT)


def _indexed_scores(layer: MethodLayer, state: LayerState, q: Array, q_pos: Array, keys: Any) -> Array:
    """Dot products of one query per row with keys held without rotation, both rotated to their index in the cache."""
    assert layer.method.decode is not None
    rope, index = layer.spec.rope, layer.method.decode.cache_positions
    turned = rope.rotate(layer.k.decode(keys), index(layer, state.pos, state.pos))
    bare = rope.unrotate_queries(q, q_pos)
    return scores(rope.rotate_queries(bare, index(layer, state.pos, q_pos[:, None])[:, 0]), turned)


def attended(s: Array, mix: Callable[[Array], Array]) -> ReadResult:
    """Masked logits f32[B K G T S], and what mixes values by weights of that shape -> the reading of all slots."""
    p, m, l = weights(s)
    return ReadResult(Partial(mix(p), m, l), weights=shares(p, l))


def shares(p: Array, l: Array) -> Array | None:
    """Softmax weights of a single query; None for several, which no policy asks for."""
    return p / jnp.maximum(l, 1e-30)[..., None] if p.shape[3] == 1 else None


def map_query_blocks(attend: Callable[..., Any], q: Array, q_pos: Array, n: int, *more: Array) -> Any:
    """attend(q, q_pos, *more), n queries at a time, so that a long chunk needs no T x S array.

    more: what belongs to the queries, [B K G T ...]. It gives arrays [B K G T ...] (a Partial, a Reading).
    """
    T = q.shape[3]
    if T <= n:
        return attend(q, q_pos, *more)
    parts = lax.map(lambda xs: attend(*xs), (cut(q, 3, n), cut(q_pos, 1, n, -1), *(cut(x, 3, n) for x in more)))
    return jax.tree.map(lambda x: joined(x, T), parts)


def cut(x: Array, axis: int, n: int, fill: int = 0) -> Array:
    """An axis as (count, n), padded with `fill`; count comes first."""
    T = x.shape[axis]
    x = jnp.pad(x, [(0, -T % n if i == axis else 0) for i in range(x.ndim)], constant_values=fill)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, n, *x.shape[axis + 1 :]), axis, 0)


def joined(x: Array, T: int) -> Array:
    """[count B K G n ...] -> [B K G T ...]."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :T]
