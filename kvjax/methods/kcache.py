"""KCache: stores keys on the device and values on the host, and fetches only the values that count."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.readers.query_blocks import logits, normalize_weights


@dataclasses.dataclass(frozen=True)
class TopValues(kv.Reader):
    """Attends exactly to all keys, and reads only the values of the n heaviest slots (KCache, section 3.1).

    The fields are the arguments of `kcache`.
    """

    n: kv.PositiveInt
    renormalise: bool = False
    granularity: Literal["query", "kv"] = "query"

    __post_init__ = kv.check_fields

    def read_bytes(self, storage: kv.KVStorage, state: kv.LayerState) -> kv.StepBytes:
        sets = storage.spec.num_groups if self.granularity == "query" else 1
        tokens = sets * min(self.n, state.pos.shape[2])
        return storage.k.read_bytes(state.k) + storage.v.read_bytes(state.v, tokens)

    def read(
        self,
        storage: kv.KVStorage,
        state: kv.LayerState,
        q: kv.Array,
        q_pos: kv.Array,
        other_partial: kv.Partial | None = None,
        cross_layer: Any = None,
    ) -> kv.ReadResult:
        keys = kv.memory.load(state.k)

        def attend(q: kv.Array, q_pos: kv.Array, *others: kv.Array) -> kv.ReadResult:
            B, K, G, T, _ = q.shape
            p, m, l = kv.attention.weights(logits(storage, state, q, q_pos, keys))
            n = min(self.n, p.shape[-1])
            importance = p
            if self.granularity == "kv":
                # Query heads have maxima of their own, so their weights are comparable only once they sum to 1.
                importance = p / jnp.maximum(l, 1e-30)[..., None]
                if others:
                    # A query head gives a part of its weight to what is in no slot, and these parts differ.
                    _, m_others, l_others = others
                    lse, lse_others = kv.attention.log_sum_exp(m, l), kv.attention.log_sum_exp(m_others, l_others)
                    importance = importance * kv.attention.weight_share(lse, lse_others)[..., None]
                importance = importance.sum(2, keepdims=True)
            idx = kv.top_k(importance, n)[1]  # [B K G|1 T n]
            values = storage.v.gather(state.v, idx.reshape(B, K, -1)).reshape(*idx.shape, -1)
            values = jnp.broadcast_to(values, (B, K, G, T, n, values.shape[-1])).astype(jnp.float32)
            heaviest = jnp.take_along_axis(p, jnp.broadcast_to(idx, (B, K, G, T, n)), -1)
            mixed = jnp.einsum("bkgtn,bkgtnh->bkgth", heaviest, values)
            total = heaviest.sum(-1) if self.renormalise else l
            return kv.ReadResult(kv.Partial(mixed, m, total), weights=normalize_weights(p, l))

        # `map_query_blocks` cuts arrays into blocks, so that the other partial is given as its arrays.
        result = kv.map_query_blocks(attend, q, q_pos, 64, *(other_partial or ()))
        return result._replace(cross_layer=cross_layer)


@kv.register_method(example="kcache:n=32", family="host memory")
def kcache(
    n: int = 128, device_layers: int = 1, renormalise: bool = False, granularity: Literal["query", "kv"] = "query"
) -> kv.Method:
    """Keeps keys on the device and values in pinned host memory, and reads only the n values of the largest weights.

    Scores are exact.

    Formula:
      p = softmax(q_t k_s / sqrt(H)) over all s <= t; out = sum of p_s v_s over the n largest p_s

    Differs:
      The paper's formula leaves the weights as they are, its text suggests dividing by their sum: see renormalise. No
      public code is known.

    Args:
      n: values read per head and step (the paper: 32, 64, 128).
      device_layers: first layers that keep their values on the device and read all of them (the paper: 0 to 3, and 1 in
        its detailed table).
      renormalise: whether weights are divided by their sum over the n slots (the paper's formula does not, so that the
        output shrinks by the weight left out; its text suggests it).
      granularity: "query", one set per query head (the paper), or "kv", one per key/value head, by the weight summed
        over its query heads.

    Reference:
      KCache, He & Wu 2024, arXiv 2404.18057, sections 3.1 and 4.1
    """
    return kv.Method(v=kv.Host(kv.Plain()), read=TopValues(n, renormalise, granularity), device_layers=device_layers)
