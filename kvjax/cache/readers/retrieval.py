"""Retrieval: an index on the device scores units of past tokens, and attention fetches only the best ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs.plain import Plain
from kvjax.cache.components import Reader, ReadResult
from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.cache.readers.query_blocks import map_query_blocks
from kvjax.cache.storage import KVStorage
from kvjax.core import memory
from kvjax.core.attention import MASKED_LOGIT, weights
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.step_bytes import StepBytes
from kvjax.core.top_k import top_k
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import IncompatibleMethod
from kvjax.utils.abstract import abstract
from kvjax.utils.parameter_types import NonNegativeInt, PositiveInt, check_fields

RETRIEVAL_QUERY_BLOCK = 16
"""Queries that retrieve at a time: each fetches keys and values of its own."""


class Index:
    """Summaries of units of `size` consecutive slots, in device memory.

    An index is a frozen dataclass with the field `size` that defines `summarize`, `join` and `score`. Summaries are any
    pytree of arrays [B K U W] for U units; joining the summary of a unit without tokens must change nothing. An index
    whose summaries cannot be joined overrides `build` and `append` instead.
    """

    size: int
    num_queries: int | None = 0  # last prompt queries of each sequence that `fit` observes, as in `Needs`
    shares_scores = False  # whether `score` gives the query heads of a key/value head the same scores

    @abstract
    def summarize(self, keys: Array, real: Array) -> Any:
        """Summarizes units of keys [B K U size H]; only the places that are real, bool[B 1|K U size], hold tokens."""
        ...

    @abstract
    def join(self, before: Any, more: Any) -> Any:
        """Joins the summaries of units with those of the tokens that were added to them."""
        ...

    @abstract
    def score(self, summary: Any, q: Array) -> Array:
        """Scores each unit for queries q [B K G T H]: f32[B 1|K 1|G T U], 1 where heads have scores in common."""
        ...

    def rescale(self, score: Array, candidates: Array) -> Array:
        """Rescales scores by those of the other candidates bool[B 1|K 1 T U]; the base returns them unchanged."""
        return score

    def load(self, reader_state: Any) -> Any:
        """Returns the summaries as `score` takes them, from the stored form of `build` and `append`."""
        return memory.map_buffers(memory.unpack, reader_state)

    def fit(self, block: KVBlock, observation: Observation | None) -> Any:
        """`build` for a prompt; override it in an index that observes the prompt's queries."""
        return self.build(block)

    def rebuild(self, reader_state: Any, block: KVBlock) -> Any:
        """`build` for the tokens that are left after the last ones were rolled back."""
        return self.build(block)

    def build(self, block: KVBlock) -> Any:
        """Summarizes a block [B K S H], in buffers."""
        num_units = -(-block.pos.shape[2] // self.size)
        keys, real = self.split_units(block, jnp.zeros((block.pos.shape[0], 1), jnp.int32), num_units)
        return jax.tree.map(memory.pack, self.summarize(keys, real))

    def append(self, reader_state: Any, new: KVBlock, at: Array) -> Any:
        """Adds the tokens [B K T H], which are now in the slots from at i32[B 1] on."""
        B, K, T, _ = new.k.shape
        if not T:
            return reader_state
        num_units = (T + self.size - 2) // self.size + 1  # the most units that T consecutive tokens touch
        first = at // self.size
        touched = first[:, :, None] + jnp.arange(num_units, dtype=jnp.int32)[None, None]
        touched = jnp.broadcast_to(touched, (B, K, num_units))
        # All units that T tokens can touch are written, as shapes are static; joining no token changes no summary.
        before = memory.map_buffers(lambda buffer: memory.gather_tokens(buffer, touched), reader_state)
        after = self.join(before, self.summarize(*self.split_units(new, at % self.size, num_units)))
        return memory.map_buffers(lambda buffer, summary: memory.append(buffer, summary, first), reader_state, after)

    def split_units(self, block: KVBlock, offset: Array, num_units: int) -> tuple[Array, Array]:
        """Keys [B K U size H], and which of them are tokens; the block begins at place offset i32[B 1] of a unit."""
        place = jnp.arange(num_units * self.size, dtype=jnp.int32)[None, None] - offset[:, :, None]
        idx = jnp.clip(place, 0, block.pos.shape[2] - 1)
        pos = jnp.take_along_axis(block.pos, jnp.broadcast_to(idx, (*block.pos.shape[:2], idx.shape[2])), 2)
        real = (place == idx) & (pos >= 0)
        keys = memory.take(block.k, idx)
        B, K, _, H = keys.shape
        return keys.reshape(B, K, num_units, self.size, H), real.reshape(B, -1, num_units, self.size)


@dataclasses.dataclass(frozen=True)
class Retrieve(Reader):
    """Attends each query to the units before it with the highest scores, and to sinks and recent tokens.

    The unit that contains the query's own token is always read, up to that token. Each slot counts once. A unit is a
    candidate from the query after its last token on, when its summary is complete, so that a chunk of tokens reads what
    single steps read. Units that have left the layer's sliding window are no candidates.

    Args:
      index: scores the units.
      units: how many units a query retrieves.
      sinks: first slots that are always read.
      recent: last slots that are always read, the query's own included.
      per: "query", each query head retrieves its own units; "head", the query heads of a key/value head retrieve those
        with the highest score of any of them.
    """

    index: Index
    units: PositiveInt
    sinks: NonNegativeInt = 0
    recent: NonNegativeInt = 0
    per: Literal["query", "head"] = "query"

    supports_eviction = False  # a unit consists of neighbors

    __post_init__ = check_fields

    @property
    def num_queries(self) -> int | None:
        return self.index.num_queries

    def init_state(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Any:
        # Summaries only decide what is read, and a choice has no gradient.
        return self.index.fit(jax.tree.map(lax.stop_gradient, block), observation)

    def append(self, reader_state: Any, new: KVBlock, at: Array, spec: LayerSpec) -> Any:
        return self.index.append(reader_state, jax.tree.map(lax.stop_gradient, new), at)

    def read_bytes(self, storage: KVStorage, state: LayerState) -> StepBytes:
        """The whole index, and the tokens of each set of slots: `attend_slots` takes empty ones too."""
        size = self.index.size
        num_units = min(self.units, -(-state.pos.shape[2] // size))
        tokens = self.sinks + max(size, self.recent) + num_units * size
        sets = 1 if self.per == "head" or self.index.shares_scores else storage.spec.num_groups
        return storage.read_bytes(state, sets * tokens) + StepBytes.of_all(state.reader_state)

    def crop(self, storage: KVStorage, state: LayerState) -> Any:
        if (codec := storage.k.on_device()) != Plain():
            raise IncompatibleMethod(
                f"component `k`, {type(codec).__name__}, holds keys inexactly, and the summaries of the "
                "exact ones cannot be made again without the last tokens; keep the context of before"
            )
        keys = storage.decode_keys(state.k, state.pos)
        return self.index.rebuild(state.reader_state, KVBlock(keys, keys, state.pos))

    def read(
        self,
        storage: KVStorage,
        state: LayerState,
        q: Array,
        q_pos: Array,
        other_partial: Partial | None = None,
        cross_layer: Any = None,
    ) -> ReadResult:
        part = self.attend_retrieved(storage, state, q, q_pos, q, state.reader_state)
        return ReadResult(part, state.reader_state, cross_layer=cross_layer)

    def attend_retrieved(
        self, storage: KVStorage, state: LayerState, q: Array, q_pos: Array, search_q: Array, reader_state: Any
    ) -> Partial:
        """Attends queries to the units that search queries [B K G T H] find in the index for them."""
        # What only chooses is a constant, in codes too.
        summary = self.index.load(jax.tree.map(lax.stop_gradient, reader_state))
        lookup_slot = slot_lookup(state, q_pos)

        def attend(q: Array, q_pos: Array, search_q: Array) -> Partial:
            with jax.named_scope("retrieve"):
                own = lookup_slot(q_pos)
                # From this slot to the query's own everything is read: its unit, or the recent slots if they begin
                # earlier. Retrieved units end before it, so that no slot is read twice.
                start = jnp.maximum(jnp.minimum(own // self.index.size * self.index.size, own + 1 - self.recent), 0)
                best = self._best_slots(storage, state, self.index.score(summary, search_q), q_pos, start)
                best = jnp.broadcast_to(best, (*q.shape[:2], *best.shape[2:]))
                # Always read: the sinks, and what follows them from `start` to the query's own slot.
                sinks = jnp.broadcast_to(jnp.arange(self.sinks, dtype=jnp.int32)[None, None], (*own.shape, self.sinks))
                num_recent = max(self.index.size, self.recent)
                recent = start[..., None] + jnp.arange(num_recent, dtype=jnp.int32)[None, None]
                always = jnp.concatenate([sinks, jnp.where(recent >= self.sinks, recent, -1)], -1)
                always = jnp.where(always <= own[..., None], always, -1)[:, None, None]
                slots = jnp.concatenate([jnp.broadcast_to(always, (*best.shape[:4], always.shape[-1])), best], -1)
            return attend_slots(storage, state, q, q_pos, slots)

        return map_query_blocks(attend, q, q_pos, RETRIEVAL_QUERY_BLOCK, search_q)

    def _best_slots(self, storage: KVStorage, state: LayerState, score: Array, q_pos: Array, start: Array) -> Array:
        """i32[B 1|K 1|G T n], -1 where unused: slots of the best units that begin before slot start i32[B T]."""
        size, S, window = self.index.size, state.pos.shape[2], storage.spec.rule.window
        first = jnp.arange(score.shape[-1], dtype=jnp.int32) * size
        is_candidate = (first[None, None] < start[..., None]) & (first[None, None] + size > self.sinks)
        is_candidate = is_candidate[:, None, None]  # [B 1 1 T U]
        if window is not None:
            newest = state.pos[:, :, jnp.minimum(first + size, S) - 1]
            is_candidate &= newest[:, :, None, None] > q_pos[:, None, None, :, None] - window
        score = self.index.rescale(score, is_candidate)
        if self.per == "head":
            score = score.max(2, keepdims=True)
        best, unit = top_k(jnp.where(is_candidate, score, -jnp.inf), min(self.units, score.shape[-1]))
        slots = unit[..., None] * size + jnp.arange(size, dtype=jnp.int32)[None, None, None, None, None]
        is_between = (slots >= self.sinks) & (slots < start[:, None, None, :, None, None])
        slots = jnp.where((best > -jnp.inf)[..., None] & is_between, slots, -1)
        return slots.reshape(*slots.shape[:4], -1)


def slot_lookup(state: LayerState, q_pos: Array) -> Callable[[Array], Array]:
    """Returns a function from positions i32[B T] of queries of this call to the slots of their tokens.

    Tokens of this call that are not kept count as if they followed the last slot. It holds while decoding, when tokens
    after the prompt are at consecutive positions in consecutive slots. `state` has the tokens of this call appended;
    `q_pos` i32[B T] are the positions of all its queries.
    """
    newest = over_heads.max(state.pos.max(2))  # [B 1]
    first_unkept = jnp.where(q_pos > newest, q_pos, jnp.iinfo(jnp.int32).max).min(1, keepdims=True)
    assert state.n is not None
    n = state.n[:, None]
    return lambda pos: jnp.where(pos > newest, n + pos - first_unkept, n - 1 + pos - newest)


def attend_slots(storage: KVStorage, state: LayerState, q: Array, q_pos: Array, slots: Array) -> Partial:
    """Attends each query to slots of its own; only these are fetched from the codecs.

    Args:
      storage: the layer's codecs and spec.
      state: its state.
      q: [B K G T H].
      q_pos: i32[B T].
      slots: i32[B K G|1 T n], no slot twice, -1 where unused.
    """
    B, K, G, T, H = q.shape
    sets, n = slots.shape[2], slots.shape[4]  # sets of slots per key/value head, each for G / sets query heads
    # One gather for all queries of a head, so that the host is asked once; an unused place reads any slot, unseen.
    idx = jnp.maximum(slots, 0).reshape(B, K, -1)
    fetched_pos = jnp.take_along_axis(jnp.broadcast_to(state.pos, (B, K, state.pos.shape[2])), idx, 2, mode="clip")
    pos = jnp.where(slots >= 0, fetched_pos.reshape(slots.shape), -1)
    k, v = storage.gather(state, idx, fetched_pos)
    k, v = (x.reshape(B, K, sets, T, n, -1) for x in (k, v))
    v = jnp.where((pos >= 0)[..., None], v, jnp.zeros((), v.dtype))  # an empty slot may hold inf, and 0 * inf is NaN
    by_set = q.reshape(B, K, sets, G // sets, T, H)
    s = jnp.einsum("bksgth,bkstnh->bksgtn", by_set, k, preferred_element_type=jnp.float32) * H**-0.5
    s = storage.spec.rule.cap(s)
    if state.bias is not None:
        bias = jnp.take_along_axis(state.bias, idx, 2, mode="clip")
        s = s + bias.reshape(B, K, sets, 1, T, n)
    t = q_pos[:, None, None, :, None]
    is_visible = (pos >= 0) & (pos <= t)
    if (window := storage.spec.rule.window) is not None:
        is_visible &= pos > t - window
    p, m, l = weights(jnp.where(is_visible[:, :, :, None], s, MASKED_LOGIT))
    o = jnp.einsum("bksgtn,bkstnh->bksgth", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Partial(o.reshape(B, K, G, T, -1), m.reshape(q.shape[:4]), l.reshape(q.shape[:4]))
