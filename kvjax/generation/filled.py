"""Whether a cache is one that this model, under this method, goes on from."""

from __future__ import annotations

from kvjax.cache.protocol import Cache, KVMethod
from kvjax.core.types import KvjaxError, OtherWeights
from kvjax.engine.plan import bind
from kvjax.methods.strings import method_of, name_of
from kvjax.models.model import Model


def checked(model: Model, cache: Cache, method: str | KVMethod | None = None) -> Cache:
    """The cache; raises OtherWeights for that of another model, and KvjaxError where another method is named."""
    if not isinstance(cache, Cache):
        raise KvjaxError(f"a cache is what kvjax.prefill returns, got {type(cache).__name__}")
    cache.check_whole()
    if cache.config != model.config:
        raise OtherWeights("this cache was filled by another model; prefill the prompt with this one")
    if cache.dtype != model.dtype.name:
        raise OtherWeights(
            f"this cache was filled by a model in {cache.dtype} and this one is in {model.dtype}; prefill the prompt "
            f"with this one, or load it with dtype={cache.dtype!r}"
        )
    if cache.weights not in ("", model.fingerprint):
        raise OtherWeights(
            "this cache was filled by a model of equal configuration and other weights; prefill the prompt with this "
            "one, or go on with that one"
        )
    if method is not None and bind(method, model.config) != cache.plan:
        raise KvjaxError(
            f"this cache was filled under another method than {name_of(method_of(method))}; go on without naming a "
            "method, or prefill the prompt under this one"
        )
    return cache
