"""The reader of all slots, the default of every method."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from kvjax.cache.components import Reader, ReadResult
from kvjax.cache.protocol import LayerState
from kvjax.cache.readers import fused_kernels
from kvjax.cache.readers.query_blocks import QUERY_BLOCK, logits, map_query_blocks, normalize_weights
from kvjax.cache.storage import KVStorage
from kvjax.core.attention import weights
from kvjax.core.types import Array, Partial
from kvjax.utils.parameter_types import check_fields


@dataclasses.dataclass(frozen=True)
class Full(Reader):
    """Attends to all slots; keys and values in host memory are copied to the device whole.

    Args:
      kernel: how quantized keys and values are read. "xla": decoded tile by tile, on any device; "pallas": by one
        kernel, made for NVIDIA GPUs and interpreted elsewhere, slowly; "auto": that kernel where there is such a GPU.
    """

    kernel: Literal["auto", "xla", "pallas"] = "auto"

    chooses_slots = False

    __post_init__ = check_fields

    def read(
        self,
        storage: KVStorage,
        state: LayerState,
        q: Array,
        q_pos: Array,
        other_partial: Partial | None = None,
        cross_layer: Any = None,
    ) -> ReadResult:
        # A decode policy, under which no number says which slots are in use, needs the weights, and a bias belongs to
        # single slots: the kernels know neither.
        needs_logits = state.n is None or state.bias is not None
        fused = None if needs_logits else fused_kernels.find_kernel(self.kernel, storage, q.shape[3])
        if fused:
            part = map_query_blocks(lambda q, t: fused.read(storage, state, q, t), q, q_pos, fused.max_queries)
            return ReadResult(part, cross_layer=cross_layer)
        keys, values = storage.load(state)

        def attend(q: Array, q_pos: Array) -> ReadResult:
            p, m, l = weights(logits(storage, state, q, q_pos, keys))
            return ReadResult(Partial(storage.v.mix(p, values), m, l), weights=normalize_weights(p, l))

        return map_query_blocks(attend, q, q_pos, QUERY_BLOCK)._replace(cross_layer=cross_layer)
