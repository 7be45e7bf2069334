"""The component `read` of a method: which slots a query attends to, and the arithmetic that all readers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.core.attention import MASKED_LOGIT, scores, split_blocks, visible
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import IncompatibleMethod, KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer

QUERY_BLOCK = 512
"""Queries that attend to all slots at a time, so that a long chunk needs no T x S array of logits."""


class ReadResult(NamedTuple):
    """The result of `Reader.read`."""

    part: Partial  # attention over the slots that were read
    reader_state: Any = None  # the reader's new state
    weights: Array | None = None  # f32[B K G 1 S], softmax of a single query over the slots; for decode policies
    cross_layer: Any = None  # for the layer above


class Reader:
    """Attends queries to the stored keys and values; the base keeps no state of its own.

    A reader is a frozen dataclass that defines `read`. Its argument `layer` has the codecs `k` and `v` and the `spec`,
    see `kvjax.cache.bound_layer.MethodLayer`. A reader with a state, such as an index of the keys, also defines
    `init_state` and `append`.
    """

    draft_tokens = 0  # predicted tokens that each decode step carries along
    sequential_writes = False  # whether `append` takes at most one token per call
    supports_eviction = True  # whether tokens can leave the slots, and enter them in any order
    prompt_chunk = 0  # above 0, prompts are read through the reader too, in chunks of this many tokens
    unbounded_length = False  # whether relative positions stay in the trained range at any length, as in `Needs`
    num_queries: int | None = 0  # last prompt queries of each sequence that `init_state` observes, as in `Needs`

    def init_state(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Any:
        """Returns the reader's state after a prompt [B K S H], left-aligned; `observation` has its last queries."""
        return None

    def append(self, reader_state: Any, new: KVBlock, at: Array, spec: LayerSpec) -> Any:
        """Returns the state after tokens [B K T H] that are now in the slots from i32[B 1|K] on; T may be 0."""
        return reader_state

    def used_part(self, reader_state: Any, num_tokens: int) -> Any:
        """The arrays, or parts of them, that a cache with `num_tokens` slots would have; as in `Codec.used_part`."""
        return reader_state

    def crop(self, layer: MethodLayer, state: LayerState) -> Any:
        """Returns the reader's state after its last tokens were rolled back; `state.pos` says which are left."""
        if state.reader_state is None:
            return None
        raise IncompatibleMethod(
            f"component `read`, {type(self).__name__}, keeps something of all tokens, which none can be taken out of; "
            "a context is a value: keep the one of before, or fork it"
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
        """Attends queries to the visible slots.

        Args:
          layer: the bound layer.
          state: its state, to which the tokens of this call have been appended.
          q: [B K G T H].
          q_pos: i32[B T].
          other_partial: attention to tokens of this call that are not kept, for a reader that needs a softmax over all.
          cross_layer: value from the layer below in this step, None in layer 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `read`")


def logits(layer: MethodLayer, state: LayerState, q: Array, q_pos: Array, keys: Any) -> Array:
    """f32[B K G T S]: scaled dot products with all keys (in device memory) plus bias, MASKED_LOGIT where hidden."""
    if layer.method.positions == "cache":
        # Keys are stored before RoPE; keys and queries are rotated to their index in the cache (StreamingLLM).
        assert layer.method.decode is not None
        rope, policy = layer.spec.rope, layer.method.decode
        rotated_k = rope.rotate(layer.k.decode(keys), policy.cache_positions(layer, state.pos, state.pos))
        query_index = policy.cache_positions(layer, state.pos, q_pos[:, None])[:, 0]
        rotated_q = rope.rotate_queries(rope.unrotate_queries(q, q_pos), query_index)
        s = scores(rotated_q, rotated_k)
    elif layer.k.pre_rope:
        s = scores(q, layer.decode_keys(keys, state.pos))
    else:
        s = layer.k.scores(q, keys)
    if state.bias is not None:
        expected = (*s.shape[:2], s.shape[4])
        if state.bias.shape != expected:
            raise KvjaxError(
                f"`state.bias` is added to the logits of slots, and must be f32[B K S], here {expected}; got "
                f"{jax.typeof(state.bias)}"
            )
        s = s + state.bias[:, :, None, None]
    return jnp.where(visible(state.pos, q_pos, layer.spec.window), s, MASKED_LOGIT)


def normalize_weights(p: Array, l: Array) -> Array | None:
    """The softmax weights of a single query, from exponentials and sum; None for several, which no policy asks for."""
    return p / jnp.maximum(l, 1e-30)[..., None] if p.shape[3] == 1 else None


def map_query_blocks(attend: Callable[..., Any], q: Array, q_pos: Array, n: int, *more: Array) -> Any:
    """Computes attend(q, q_pos, *more) for n queries at a time, one block after the other.

    `attend` returns a pytree of arrays [B K G T ...], such as a Partial; `more` are further arrays [B K G T ...].
    """
    T = q.shape[3]
    if T <= n:
        return attend(q, q_pos, *more)
    blocks = split_blocks(q, 3, n), split_blocks(q_pos, 1, n, -1), *(split_blocks(x, 3, n) for x in more)

    def join_blocks(x: Array) -> Array:  # [count B K G n ...] -> [B K G T ...]
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :T]

    return jax.tree.map(join_blocks, lax.map(lambda block: attend(*block), blocks))
