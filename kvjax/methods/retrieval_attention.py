"""RetrievalAttention: searches keys on the host, and joins the best to the first and last tokens on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv


@kv.pytree
class StaticTokens:
    """A second copy of the first and last tokens on the device, in the P places of a `RingBuffer`."""

    k: kv.memory.Buffer  # [B K P H]
    v: kv.memory.Buffer  # [B K P H]


@dataclasses.dataclass(frozen=True)
class HostSearch(kv.Reader):
    """Reads static tokens, and the `topk` others of the largest q k (Liu et al. 2024, arXiv 2409.10516, section 3).

    Each query head searches all keys between the first `sinks` and the last `recent` tokens, exactly.
    """

    topk: kv.PositiveInt
    sinks: kv.NonNegativeInt
    recent: kv.PositiveInt

    sequential_writes = True  # the ring has room for the last tokens of one query only
    supports_eviction = False  # the last slots are the last tokens

    __post_init__ = kv.check_fields

    def init_state(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> StaticTokens:
        ring = self._ring(block.pos.shape[2])
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        slots = ring.slots(length, jnp.full_like(length, ring.sinks))
        return StaticTokens(ring.fill(block.k, slots), ring.fill(block.v, slots))

    def append(self, reader_state: StaticTokens, new: kv.KVBlock, at: kv.Array, spec: kv.LayerSpec) -> StaticTokens:
        ring = self._ring(reader_state.k.data.shape[2])
        slot = at[:, :, None] + jnp.arange(new.pos.shape[2], dtype=jnp.int32)[None, None]
        place = jnp.where(new.pos >= 0, ring.place(slot), ring.places)  # padding is dropped
        return StaticTokens(ring.put(reader_state.k, new.k, place), ring.put(reader_state.v, new.v, place))

    def read_bytes(self, storage: kv.KVStorage, state: kv.LayerState) -> kv.StepBytes:
        B, _, S = state.pos.shape
        searched, tokens = storage.k.read_bytes(state.k), storage.spec.num_groups * min(self.topk, S)
        found = dataclasses.replace(storage.k.read_bytes(state.k, tokens), device=0)  # the device reads all keys once
        if searched.link and _is_exact(storage.k):
            products = 4 * B * storage.spec.num_kv_heads * storage.spec.num_groups * S
            searched = kv.StepBytes(device=searched.device, link=products, host=searched.link)
        return searched + found + storage.v.read_bytes(state.v, tokens) + kv.StepBytes.of_all(state.reader_state)

    def read(
        self,
        storage: kv.KVStorage,
        state: kv.LayerState,
        q: kv.Array,
        q_pos: kv.Array,
        other_partial: kv.Partial | None = None,
        cross_layer: Any = None,
    ) -> kv.ReadResult:
        assert state.n is not None
        S, rule = state.pos.shape[2], storage.spec.rule
        ring = self._ring(state.reader_state.k.data.shape[2])
        static_slots = ring.slots(state.n, jnp.full_like(state.n, ring.sinks))

        def take_static(x: kv.Array) -> kv.Array:  # [B 1|K S] -> [B 1|K P]
            at = jnp.broadcast_to(static_slots, (*x.shape[:2], static_slots.shape[2]))
            return jnp.take_along_axis(x, at, 2, mode="clip")

        static = kv.KVBlock(
            kv.memory.unpack(state.reader_state.k),
            kv.memory.unpack(state.reader_state.v),
            jnp.where(static_slots >= 0, take_static(state.pos), -1),
            None if state.bias is None else take_static(state.bias),
        )
        slot = jnp.arange(S, dtype=jnp.int32)[None, None, None, None]
        is_searched = (slot >= ring.sinks) & (slot < (state.n - ring.size)[:, None, None, None, None])

        def attend(q: kv.Array, q_pos: kv.Array) -> kv.Partial:
            with jax.named_scope("search"):
                # The search only chooses which tokens are read, so no gradient passes through it.
                search_q = lax.stop_gradient(q)
                if _is_exact(storage.k):  # the host itself multiplies, so that products cross the bus and no keys
                    s = kv.memory.dot_products(state.k, search_q) * search_q.shape[-1] ** -0.5
                elif storage.k.pre_rope:
                    s = kv.attention.scores(search_q, storage.decode_keys(state.k, state.pos))
                else:
                    s = storage.k.scores(search_q, kv.memory.load(state.k))
                s = rule.logits(s, state.pos, q_pos, state.bias, is_searched)
                s = jnp.where(s > kv.MASKED_LOGIT / 2, s, -jnp.inf)
                best, slots = kv.top_k(s, min(self.topk, S))
            others = kv.attend_slots(storage, state, q, q_pos, jnp.where(best > -jnp.inf, slots, -1))
            return kv.attention.combine(kv.attention.attend_dense(q, static, q_pos, rule), others)

        return kv.ReadResult(kv.map_query_blocks(attend, q, q_pos, 16), state.reader_state, cross_layer=cross_layer)

    def _ring(self, slots: int) -> kv.RingBuffer:
        """Returns the ring of a layer with this many slots; a ring with as many slots as places is the same."""
        places = min(slots, self.sinks + self.recent)
        sinks = min(self.sinks, places - 1)
        return kv.RingBuffer(sinks, places - sinks)


def _is_exact(codec: kv.Codec) -> bool:
    """Whether a codec stores keys as they are, on the device or on the host."""
    return codec.on_device() == kv.Plain()


@kv.register_method(example="retrieval_attention:sinks=64,recent=256", family="host memory")
def retrieval_attention(topk: int = 100, sinks: int = 128, recent: int = 512) -> kv.Method:
    """Stores keys and values on the host, where each query head's best keys are found by exact search.

    Attention in the prompt is exact. The host computes the products of a search; only they and the token vectors found
    cross the bus.

    Formula:
      a query reads s < sinks, s > t - recent, and of the others the topk of the largest q_t k_s

    Differs:
      The search is exact, over all keys on the host, like the flat index of Microsoft's code; the paper's is
      approximate, by an index that follows the distribution of queries.

    Args:
      topk: keys that a query head finds (unverified: the paper's; Microsoft's code takes 2,000).
      sinks: first tokens, which also lie on the device and are always read.
      recent: last tokens, which also lie on the device and are always read.

    Reference:
      RetrievalAttention, Liu et al. 2024, arXiv 2409.10516, section 3; static tokens of Microsoft's MInference
    """
    return kv.Method(k=kv.Host(kv.Plain()), v=kv.Host(kv.Plain()), read=HostSearch(topk, sinks, recent))
