"""The reader of all slots, the default of every method."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvjax.cache.components import Reader, ReadResult
from kvjax.cache.protocol import LayerState
from kvjax.cache.readers import fused_kernels
from kvjax.cache.readers.query_blocks import QUERY_BLOCK, logits, map_query_blocks, normalize_weights
from kvjax.core.attention import weights
from kvjax.core.types import Array, Partial
from kvjax.errors import KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer


@dataclasses.dataclass(frozen=True)
class Full(Reader):
    """Attends to all slots; keys and values in host memory are copied to the device whole.

    Args:
      kernel: how quantized keys and values are read. "xla": decoded tile by tile, on any device; "pallas": by one
        kernel, made for NVIDIA GPUs and interpreted elsewhere, slowly; "auto": that kernel where there is such a GPU.
    """

    kernel: str = "auto"

    def __post_init__(self):
        if self.kernel not in fused_kernels.CHOICES:
            raise KvjaxError(f"kernel must be one of {', '.join(fused_kernels.CHOICES)}, got {self.kernel!r}")

    def read(
        self,
        layer: MethodLayer,
        state: LayerState,
        q: Array,
        q_pos: Array,
        other_partial: Partial | None = None,
        cross_layer: Any = None,
    ) -> ReadResult:
        # A decode policy needs the weights, and a bias belongs to single slots: the kernels know neither.
        needs_logits = layer.method.decode or state.bias is not None
        fused = None if needs_logits else fused_kernels.find_kernel(self.kernel, layer.k, layer.v)
        if fused:
            part = map_query_blocks(lambda q, t: fused.read(layer, state, q, t), q, q_pos, fused.max_queries)
            return ReadResult(part, cross_layer=cross_layer)
        keys, values = layer.k.load(state.k), layer.v.load(state.v)

        def attend(q: Array, q_pos: Array) -> ReadResult:
            p, m, l = weights(logits(layer, state, q, q_pos, keys))
            return ReadResult(Partial(layer.v.mix(p, values), m, l), weights=normalize_weights(p, l))

        return map_query_blocks(attend, q, q_pos, QUERY_BLOCK)._replace(cross_layer=cross_layer)
