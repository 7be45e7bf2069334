"""Reading the best units of the past: summaries on the device say which, and the codecs fetch their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs.base import Plain
from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.cache.readers.base import Reader, ReadResult, map_query_blocks
from kvjax.core import memory
from kvjax.core.attention import MASKED_LOGIT, weights
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import IncompatibleMethod, KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer


class Index:
    """Summaries of units of `size` consecutive slots, kept in device memory.

    An index is a frozen dataclass with the field `size` and three methods: `summarise`, `join` and `score`. A summary
    is any pytree of arrays [B K U W], U units; that of a unit without tokens must be what `join` leaves unchanged. An
    index whose summaries cannot be joined gives its own `build` and `append` instead.
    """

    size: int
    num_queries: int | None = 0  # of a row's last prompt queries, as in `Needs`, that `fit` wants to see

    def summarise(self, keys: Array, real: Array) -> Any:
        """Units of keys [B K U size H], of which only real bool[B 1|K U size] are tokens -> their summaries."""
        raise NotImplementedError

    def join(self, before: Any, more: Any) -> Any:
        """The summaries of units to which tokens have come, from those of the tokens before and of the new ones."""
        raise NotImplementedError

    def score(self, summary: Any, q: Array) -> Array:
        """Queries q [B K G T H] -> how much each unit may matter to them, f32[B 1|K 1|G T U]: 1 where heads share."""
        raise NotImplementedError

    def among(self, score: Array, candidates: Array) -> Array:
        """Scores, weighed against those of the other candidates bool[B 1|K 1 T U]; the base leaves them as they are."""
        return score

    def load(self, reader_state: Any) -> Any:
        """The summaries as `score` takes them, from what `build` and `append` gave."""
        return memory.map_buffers(memory.unpack, reader_state)

    def fit(self, block: KVBlock, observation: Observation | None) -> Any:
        """`build` of what a prompt leaves, by an index that asks for its queries."""
        return self.build(block)

    def rebuild(self, reader_state: Any, block: KVBlock) -> Any:
        """`build` once more, of the tokens that are left when the last ones have been taken back."""
        return self.build(block)

    def build(self, block: KVBlock) -> Any:
        """The summaries of a block [B K S H], in buffers."""
        units = -(-block.pos.shape[2] // self.size)
        keys, real = self.split_units(block, jnp.zeros((block.pos.shape[0], 1), jnp.int32), units)
        return jax.tree.map(memory.pack, self.summarise(keys, real))

    def append(self, reader_state: Any, new: KVBlock, at: Array) -> Any:
        """The same after the tokens [B K T H], now in the slots from at i32[B 1] on."""
        B, K, T, _ = new.k.shape
        if not T:
            return reader_state
        units = (T + self.size - 2) // self.size + 1  # that T tokens touch at most
        first = at // self.size
        touched = jnp.broadcast_to(first[:, :, None] + jnp.arange(units, dtype=jnp.int32)[None, None], (B, K, units))
        before = memory.map_buffers(lambda buffer: memory.gather_tokens(buffer, touched), reader_state)
        after = self.join(before, self.summarise(*self.split_units(new, at % self.size, units)))
        return memory.map_buffers(lambda buffer, rows: memory.append(buffer, rows, first), reader_state, after)

    def split_units(self, block: KVBlock, offset: Array, units: int) -> tuple[Array, Array]:
        """Keys [B K U size H], and which of them are tokens; the block's first goes to place offset i32[B 1]."""
        place = jnp.arange(units * self.size, dtype=jnp.int32)[None, None] - offset[:, :, None]
        count = block.pos.shape[2]
        at = jnp.clip(place, 0, count - 1)
        pos = jnp.take_along_axis(block.pos, jnp.broadcast_to(at, (*block.pos.shape[:2], at.shape[2])), 2)
        real = (place == at) & (pos >= 0)
        keys = memory.take(block.k, at)
        B, K, _, H = keys.shape
        return keys.reshape(B, K, units, self.size, H), real.reshape(B, -1, units, self.size)


@dataclasses.dataclass(frozen=True)
class Retrieve(Reader):
    """Attends each query to the `units` units before it that score highest, and to those that are always read.

    Always read are the first `sinks` slots, the last `recent` ones (the query's own included), and the unit in which
    the query's own token lies. Each slot counts once. A unit is scored from the query after its last token on, when its
    summary is complete, so that a chunk of tokens reads what single steps read. Units that have left the layer's
    sliding window are no candidates. per: "query", each query head its own units; "head", those with the highest score
    over the query heads of a key/value head.
    """

    index: Index
    units: int
    sinks: int = 0
    recent: int = 0
    per: str = "query"

    supports_eviction = False  # units are made of neighbours

    def __post_init__(self):
        if self.units < 1 or min(self.sinks, self.recent) < 0:
            raise KvjaxError(
                "retrieval needs at least 1 unit and no negative number of sinks and recents, got "
                f"units={self.units}, sinks={self.sinks}, recent={self.recent}"
            )
        if self.per not in ("query", "head"):
            raise KvjaxError(f"per must be 'query' or 'head', got {self.per!r}")

    @property
    def num_queries(self) -> int | None:
        return self.index.num_queries

    def init_state(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Any:
        # A summary only says which rows are read, and a choice has no gradient.
        return self.index.fit(jax.tree.map(lax.stop_gradient, block), observation)

    def append(self, reader_state: Any, new: KVBlock, at: Array, spec: LayerSpec) -> Any:
        return self.index.append(reader_state, jax.tree.map(lax.stop_gradient, new), at)

    def crop(self, layer: MethodLayer, state: LayerState) -> Any:
        """The summaries of the tokens that are left, from their keys, where these are held exactly."""
        if layer.k.on_device() != Plain():
            raise IncompatibleMethod(
                f"slot `k`, {type(layer.k.on_device()).__name__}, holds keys inexactly, and the summaries of the exact "
                "ones cannot be made again without the last tokens; keep the context of before"
            )
        keys = layer.keys(state.k, state.pos)
        return self.index.rebuild(state.reader_state, KVBlock(keys, keys, state.pos))

    def read(
        self,
        layer: MethodLayer,
        state: LayerState,
        q: Array,
        q_pos: Array,
        other_partial: Partial | None = None,
        cross_layer: Any = None,
    ) -> ReadResult:
        return ReadResult(
            self.found(layer, state, q, q_pos, q, state.reader_state), state.reader_state, cross_layer=cross_layer
        )

    def found(
        self, layer: MethodLayer, state: LayerState, q: Array, q_pos: Array, asking: Array, reader_state: Any
    ) -> Partial:
        """Attention of queries to what others, asking [B K G T H] in their place, find in the index."""
        summary, own_slots = self.index.load(reader_state), slot_lookup(state, q_pos)

        def attend(q: Array, q_pos: Array, asking: Array) -> Partial:
            with jax.named_scope("retrieve"):
                own = own_slots(q_pos)
                start = jnp.maximum(jnp.minimum(own // self.index.size * self.index.size, own + 1 - self.recent), 0)
                best = self._best(layer, state, self.index.score(summary, asking), q_pos, start)
                best = jnp.broadcast_to(best, (*q.shape[:2], *best.shape[2:]))
                always = jnp.broadcast_to(self._always(own, start)[:, None, None], (*best.shape[:4], self._always_read))
                slots = jnp.concatenate([always, best], -1)
            return attend_slots(layer, state, q, q_pos, slots)

        return map_query_blocks(attend, q, q_pos, 16, asking)

    @property
    def _always_read(self) -> int:
        return self.sinks + max(self.index.size, self.recent)

    def _always(self, own: Array, start: Array) -> Array:
        """Slots i32[B T n], -1 in unused places: the sinks, and from start i32[B T] to the query's own."""
        sinks = jnp.broadcast_to(jnp.arange(self.sinks, dtype=jnp.int32)[None, None], (*own.shape, self.sinks))
        recent = start[..., None] + jnp.arange(self._always_read - self.sinks, dtype=jnp.int32)[None, None]
        recent = jnp.where(recent >= self.sinks, recent, -1)
        slots = jnp.concatenate([sinks, recent], -1)
        return jnp.where(slots <= own[..., None], slots, -1)

    def _best(self, layer: MethodLayer, state: LayerState, score: Array, q_pos: Array, start: Array) -> Array:
        """Slots i32[B 1|K 1|G T n], -1 in unused places, of the best units that begin before slot start i32[B T]."""
        size, S, window = self.index.size, state.pos.shape[2], layer.spec.window
        first = jnp.arange(score.shape[-1], dtype=jnp.int32) * size
        candidate = (first[None, None] < start[..., None]) & (first[None, None] + size > self.sinks)
        candidate = candidate[:, None, None]  # [B 1 1 T U]
        if window is not None:
            newest = state.pos[:, :, jnp.minimum(first + size, S) - 1]
            candidate &= newest[:, :, None, None] > q_pos[:, None, None, :, None] - window
        score = self.index.among(score, candidate)
        if self.per == "head":
            score = score.max(2, keepdims=True)
        best, unit = lax.top_k(jnp.where(candidate, score, -jnp.inf), min(self.units, score.shape[-1]))
        slots = unit[..., None] * size + jnp.arange(size, dtype=jnp.int32)[None, None, None, None, None]
        between = (slots >= self.sinks) & (slots < start[:, None, None, :, None, None])
        slots = jnp.where((best > -jnp.inf)[..., None] & between, slots, -1)
        return slots.reshape(*slots.shape[:4], -1)


def slot_lookup(state: LayerState, q_pos: Array) -> Callable[[Array], Array]:
    """What gives the slots i32[B T] in which the tokens of some of the queries at q_pos i32[B T] lie.

    Tokens of this call that are not kept count as if they lay behind the last one. Holds while decoding: what has come
    after the prompt lies at consecutive positions in consecutive slots.
    """
    newest = over_heads.max(state.pos.max(2))  # [B 1]
    ahead = jnp.where(q_pos > newest, q_pos, jnp.iinfo(jnp.int32).max).min(1, keepdims=True)
    assert state.n is not None
    n = state.n[:, None]

    def slots(some: Array) -> Array:
        return jnp.where(some > newest, n + some - ahead, n - 1 + some - newest)

    return slots


def attend_slots(layer: MethodLayer, state: LayerState, q: Array, q_pos: Array, slots: Array) -> Partial:
    """Queries q [B K G T H] at q_pos i32[B T] over slots of their own, i32[B K G|1 T n], -1 in unused places.

    Only these rows are fetched from the codecs. No slot may be named twice.
    """
    B, K, G, T, H = q.shape
    sets, n = slots.shape[2], slots.shape[4]
    at = jnp.maximum(slots, 0).reshape(B, K, -1)
    held = jnp.take_along_axis(jnp.broadcast_to(state.pos, (B, K, state.pos.shape[2])), at, 2, mode="clip")
    pos = jnp.where(slots >= 0, held.reshape(slots.shape), -1)
    k, v = layer.key_rows(state.k, at, held), layer.v.gather(state.v, at)
    k, v = (x.reshape(B, K, sets, T, n, H) for x in (k, v))
    v = jnp.where((pos >= 0)[..., None], v, jnp.zeros((), v.dtype))  # what is empty may hold anything
    by_set = q.reshape(B, K, sets, G // sets, T, H)
    s = jnp.einsum("bksgth,bkstnh->bksgtn", by_set, k, preferred_element_type=jnp.float32) * H**-0.5
    if state.bias is not None:
        bias = jnp.take_along_axis(state.bias, at, 2, mode="clip")
        s = s + bias.reshape(B, K, sets, 1, T, n)
    t = q_pos[:, None, None, :, None]
    seen = (pos >= 0) & (pos <= t)
    if layer.spec.window is not None:
        seen &= pos > t - layer.spec.window
    p, m, l = weights(jnp.where(seen[:, :, :, None], s, MASKED_LOGIT))
    o = jnp.einsum("bksgtn,bkstnh->bksgth", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Partial(o.reshape(q.shape), m.reshape(q.shape[:4]), l.reshape(q.shape[:4]))
