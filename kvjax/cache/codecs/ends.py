"""A codec for all layers of a model but the first and the last ones."""

from __future__ import annotations

import dataclasses

from kvjax.cache.binding import bind_component
from kvjax.cache.codecs.base import Codec, Plain
from kvjax.cache.protocol import LayerSpec
from kvjax.errors import KvjaxError


@dataclasses.dataclass(frozen=True)
class ExactEndLayers(Codec):
    """`inner`, except in so many layers at each end of a model, which hold rows as they are.

    At most half of all layers count to each end, so that a model of twice as many layers, or fewer, is exact throughout
    (vLLM's rule for TurboQuant). This is the codec of a whole model: `at` gives that of a layer, which holds the rows.
    """

    inner: Codec
    layers: int = 2

    def __post_init__(self):
        if self.layers < 0:
            raise KvjaxError(f"the exact layers at each end must be 0 or more, got {self.layers}; vLLM uses 2")

    @property
    def is_smooth(self) -> bool:
        return self.inner.is_smooth

    def at(self, spec: LayerSpec) -> Codec:
        assert spec.index is not None
        exact = min(self.layers, spec.num_layers // 2)
        return bind_component(self.inner, spec) if exact <= spec.index < spec.num_layers - exact else Plain()

    def on_device(self) -> Codec:
        return ExactEndLayers(self.inner.on_device(), self.layers)

    def on_host(self) -> Codec:
        return ExactEndLayers(self.inner.on_host(), self.layers)
