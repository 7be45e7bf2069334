"""Reading all slots."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvjax.cache.protocol import LayerState
from kvjax.cache.readers import fused_kernels
from kvjax.cache.readers.base import Reader, ReadResult, attended, logits, map_query_blocks
from kvjax.core.types import Array, Partial
from kvjax.errors import KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer


@dataclasses.dataclass(frozen=True)
class Full(Reader):
    """All slots; what lives on the host is brought back whole.

    kernel: how packed codes are read. "xla": a piece at a time, on any device. "pallas": in one kernel, made for NVIDIA
    GPUs (elsewhere interpreted, slowly). "auto": the kernel where there is such a GPU.
    """

    kernel: str = "auto"

    def __post_init__(self):
        if self.kernel not in fused_kernels.KERNELS:
            raise KvjaxError(f"kernel must be one of {', '.join(fused_kernels.KERNELS)}, got {self.kernel!r}")

    def read(
        self,
        layer: MethodLayer,
        state: LayerState,
        q: Array,
        q_pos: Array,
        other_partial: Partial | None = None,
        cross_layer: Any = None,
    ) -> ReadResult:
        form = (
            None if layer.method.decode or state.bias is not None else fused_kernels.find(self.kernel, layer.k, layer.v)
        )
        if form:
            part = map_query_blocks(lambda q, t: form.read(layer, state, q, t), q, q_pos, form.queries)
            return ReadResult(part, cross_layer=cross_layer)
        keys, values = layer.k.load(state.k), layer.v.load(state.v)

        def attend(q: Array, q_pos: Array) -> ReadResult:
            return attended(logits(layer, state, q, q_pos, keys), lambda p: layer.v.mix(p, values))

        return map_query_blocks(attend, q, q_pos, 512)._replace(cross_layer=cross_layer)
