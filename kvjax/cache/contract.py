"""The KV cache as a pytree: of one layer, and of a model."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.core.types import Array, pytree


@pytree
class LayerState:
    """The cache of one layer: what the codecs hold, and what the reader keeps beside it."""

    k: Any  # stored by the method's key codec, S slots
    v: Any  # stored by the method's value codec, S slots
    pos: Array  # i32[B 1|K S], original positions, -1 empty
    n: Array  # i32[B], slots in use
    aux: Any = None  # of the reader
    seen: Any = None  # the latest queries, where the selection will be made again


@pytree
class State:
    """The cache of a model: one state per layer, and how many tokens of each row it has seen."""

    layers: tuple[LayerState, ...]
    length: Array  # i32[B], also the position of the next token
    capacity: int = dataclasses.field(metadata={"static": True})  # tokens per row
