"""Whether a cache is one that this model, under this method, goes on from."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax

from kvjax.cache.contract import Cache, KVMethod, Layer, NumberRead, slots_of, unnumbered
from kvjax.core.arguments import DTYPES
from kvjax.core.memory import Buffer
from kvjax.core.types import KvjaxError
from kvjax.methods.strings import method_of, name_of
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.run.plan import bind
from kvjax.run.planned import abstract_state

TRACED = 256
"""Tokens of the prompt by which it is found out in what dtypes a method holds things."""


def checked(model: Model, cache: Cache, method: str | KVMethod | None = None) -> Cache:
    """The cache; raises KvjaxError for that of another configuration, dtype, or, where one is named, method.

    A model of equal configuration and dtype but other weights is not noticed: a cache does not know the weights. One
    that holds nothing but codes, as under int4 or fp8, is the same in every dtype, and is taken.
    """
    if not isinstance(cache, Cache):
        raise KvjaxError(f"a cache is what kvjax.prefill returns, got {type(cache).__name__}")
    cache.check_whole()
    if cache.config != model.config:
        raise KvjaxError("this cache was filled by another model; prefill the prompt with this one")
    dtype = _other_dtype(model, cache)
    if dtype is not None:
        raise KvjaxError(
            f"this cache was filled by a model in {dtype} and this one is in {model.dtype}; prefill the prompt with "
            f"this one, or load it with dtype={dtype!r}"
        )
    if method is not None and bind(method, model.config) != cache.plan:
        raise KvjaxError(
            f"this cache was filled under another method than {name_of(method_of(method))}; go on without naming a "
            "method, or prefill the prompt under this one"
        )
    return cache


def _other_dtype(model: Model, cache: Cache) -> str | None:
    """The dtype of the model that filled a cache, where it is another than this one's and its arrays show that."""
    for layer, state in zip(cache.plan, cache.layers, strict=True):
        for part, held in _parts(layer, state):
            found = _dtypes(held)
            for dtype in sorted(set(found) & set(DTYPES) - {model.dtype.name}):
                here, there = (_expected(part, cache.config, d) for d in (model.dtype.name, dtype))
                if found == there != here:
                    return dtype
    return None


def _parts(layer: Layer, state: Any) -> list[tuple[Layer, Any]]:
    """A layer and its state; of one that consists of layers, each of these."""
    if not hasattr(layer, "parts"):
        return [(layer, state)]
    prefix, own = layer.parts
    return _parts(prefix, state.prefix) + _parts(own, state.own)


def _dtypes(state: Any) -> list[str]:
    """Of each array or buffer of a state, the dtype of what it holds."""
    return [str(x.dtype) for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Buffer))]


def _expected(layer: Layer, config: Config, dtype: str) -> list[str] | None:
    """`_dtypes` of a layer's state under a model in this dtype; None where a method does not tell for that size."""
    try:
        return _traced(unnumbered(layer), config, dtype)
    except NumberRead:
        return _traced(layer, config, dtype)


@functools.lru_cache(maxsize=1024)
def _traced(layer: Layer, config: Config, dtype: str) -> list[str] | None:
    with contextlib.suppress(ValueError, TypeError):
        arrays, tree = abstract_state(layer, config, TRACED, slots_of(layer, (TRACED,), TRACED), 1, dtype)
        return _dtypes(jax.tree.unflatten(tree, arrays))
    return None
