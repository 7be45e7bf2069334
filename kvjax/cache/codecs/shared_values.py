"""`SharedValues`: values that are channels of the keys, and are stored once for both."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.codecs.plain import CodecWrapper
from kvjax.cache.protocol import LayerSpec
from kvjax.cache.storage import Codec, ReadsKeys
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array


@dataclasses.dataclass(frozen=True)
class SharedValues(CodecWrapper, ReadsKeys):
    """Stores no values: they are channels of the keys (`LayerSpec.values_from`), and are read off the stored keys.

    In the multi-head latent attention of DeepSeek-V2, 512 of the 576 numbers of a key are the value: a token then takes
    576 numbers and not 1,088. Binding puts this codec in the place of the method's value codec where both codecs of the
    method are equal, wherever they place their buffers, and no tokens are merged. A method whose codecs treat keys and
    values differently, such as KIVI's, stores values by its own codec, and so does one that merges tokens, whose values
    are then no longer channels of their keys.

    The stored form is here that of the keys, which `KVStorage.open_values` passes.

    Args:
      inner: the codec of the keys.
      spec: the layer, without its index.
    """

    inner: Codec
    spec: LayerSpec

    def encode(self, x: Array, pos: Array) -> None:
        return None

    def append(self, stored: None, x: Array, at: Array) -> None:
        return None

    def decode(self, stored: Any) -> Array:
        return self.spec.values_of(self.inner.decode(stored))

    def gather(self, stored: Any, idx: Array) -> Array:
        return self.spec.values_of(self.inner.gather(stored, idx))

    def mix(self, p: Array, stored: Any) -> Array:
        # All channels are mixed and some are dropped: a slice of the keys would be a copy of most of them.
        return self.spec.values_of(self.inner.mix(p, stored))

    def num_committed(self, stored: None, n: Array) -> Array:
        return jnp.zeros_like(n)  # the codec of the keys says which tokens are

    def used_part(self, stored: None, num_tokens: int) -> None:
        return None

    def read_bytes(self, stored: Any, tokens: int | None = None) -> StepBytes:
        return StepBytes()  # keys are read once for both

    def in_pages(self, page: int) -> Codec | None:
        inner = self.inner.in_pages(page)
        return None if inner is None else dataclasses.replace(self, inner=inner)
