"""TidalDecode: two layers attend to all tokens and select a few; the layers above them read only these."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.readers.query_blocks import logits


@dataclasses.dataclass(frozen=True)
class PersistentTokens(kv.Reader):
    """Reads the tokens that a layer below has selected for each query (Yang et al. 2024, 2410.05076, section 3).

    The first `dense` layers read all tokens. So do the next one and the layer `reselect`, and each selects, per query
    head, the topk - 1 earlier tokens with the highest logits. All other layers read these and the query's own token.
    The value that goes up is positions, because layers may keep different tokens: a layer skips a token that it has
    evicted, or that its sliding window hides. A layer that gets no selection makes one. The fields are the arguments of
    `tidal_decode`, and `chooses`, which `at` sets: whether this layer selects.
    """

    topk: kv.PositiveInt
    dense: kv.NonNegativeInt = 2
    reselect: kv.NonNegativeInt = 13
    chooses: bool = True

    supports_eviction = False  # positions are found by binary search, in slots that ascend
    cross_layer = True

    __post_init__ = kv.check_fields

    def at(self, spec: kv.LayerSpec) -> kv.Reader:
        if spec.place < self.dense:
            return kv.Full()
        # `dense` and `reselect` are dropped, so that layers that do the same are equal and share a compiled program.
        return PersistentTokens(self.topk, 0, 0, spec.place in (self.dense, self.reselect))

    def read_bytes(self, storage: kv.KVStorage, state: kv.LayerState) -> kv.StepBytes:
        if self.chooses:
            return super().read_bytes(storage, state)
        B, _, S = state.pos.shape
        tokens = storage.spec.num_groups * min(self.topk, S + 1)
        positions = 4 * B * storage.spec.num_kv_heads * (tokens - storage.spec.num_groups)  # which the layer below sent
        return storage.read_bytes(state, tokens) + kv.StepBytes(device=positions)

    def read(
        self,
        storage: kv.KVStorage,
        state: kv.LayerState,
        q: kv.Array,
        q_pos: kv.Array,
        other_partial: kv.Partial | None = None,
        cross_layer: Any = None,
    ) -> kv.ReadResult:
        if cross_layer is None or self.chooses:
            return self._attend_and_select(storage, state, q, q_pos)
        selected = jnp.moveaxis(cross_layer, 2, 3)

        def attend(q: kv.Array, q_pos: kv.Array, selected: kv.Array) -> kv.Partial:
            own = jnp.broadcast_to(q_pos[:, None, None, :, None], (*q.shape[:4], 1))
            return kv.attend_slots(
                storage, state, q, q_pos, _find_slots(state.pos, jnp.concatenate([selected, own], -1))
            )

        return kv.ReadResult(kv.map_query_blocks(attend, q, q_pos, 16, selected), cross_layer=cross_layer)

    def _attend_and_select(
        self, storage: kv.KVStorage, state: kv.LayerState, q: kv.Array, q_pos: kv.Array
    ) -> kv.ReadResult:
        """Attends to all tokens; the cross-layer value is positions, i32[B K T G n], -1 where unused."""
        keys, values = storage.load(state)
        count = min(self.topk - 1, state.pos.shape[2])

        def attend(q: kv.Array, q_pos: kv.Array) -> kv.ReadResult:
            s = logits(storage, state, q, q_pos, keys)
            p, m, l = kv.attention.weights(s)
            earlier = state.pos[:, :, None, None] < q_pos[:, None, None, :, None]
            best, slot = kv.top_k(jnp.where(earlier, s, kv.MASKED_LOGIT), count)
            pos = jnp.broadcast_to(state.pos, (*s.shape[:2], state.pos.shape[2]))
            pos = jnp.take_along_axis(pos, slot.reshape(*s.shape[:2], -1), 2).reshape(slot.shape)
            return kv.ReadResult(
                kv.Partial(storage.v.mix(p, values), m, l), cross_layer=jnp.where(best > kv.MASKED_LOGIT / 2, pos, -1)
            )

        result = kv.map_query_blocks(attend, q, q_pos, 64)
        return result._replace(cross_layer=jnp.moveaxis(result.cross_layer, 3, 2))


def _find_slots(slot_pos: kv.Array, pos: kv.Array) -> kv.Array:
    """Finds the slots of tokens at positions pos i32[B K ...] among slot_pos i32[B 1|K S]; -1 where there is none."""
    B, heads, S = slot_pos.shape
    flat = pos.reshape(B, heads, -1)
    order = jnp.where(slot_pos < 0, jnp.iinfo(jnp.int32).max, slot_pos)
    slot = jax.vmap(jax.vmap(jnp.searchsorted))(order, flat).astype(jnp.int32)
    exists = (flat >= 0) & (jnp.take_along_axis(slot_pos, jnp.minimum(slot, S - 1), 2) == flat)
    return jnp.where(exists, slot, -1).reshape(pos.shape)


@kv.register_method(example="tidal_decode:topk=256,dense=1,reselect=2", family="sparse reading")
def tidal_decode(topk: int = 256, dense: int = 2, reselect: int = 13) -> kv.Method:
    """Reads, in most layers, only the tokens that an earlier layer selected by its exact attention; no token is lost.

    Attention in the prompt is exact.

    Formula:
      layer l reads {t} and the topk - 1 tokens s < t of the highest q_t k_s in the last selecting layer below l

    Differs:
      A query's own token is always read and is one of the topk, as in the authors' CUDA code; their evaluation code may
      drop it.

    Args:
      topk: tokens that a query head reads in such a layer, its own included.
      dense: first layers that read everything; the next one does too, and it selects.
      reselect: the layer, counted from 0, that selects again (the authors' code: 13 for Llama 3 with 32 layers, 9 in an
        earlier version). A model of fewer layers has none.

    Reference:
      TidalDecode, Yang et al. 2024, arXiv 2410.05076, section 3
    """
    return kv.Method(read=PersistentTokens(topk, dense, reselect))
