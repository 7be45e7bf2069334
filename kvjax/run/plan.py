"""A method on a model: bound to each of its layers, checked, and held against caches."""

from __future__ import annotations

from kvjax.cache.contract import Cache, KVMethod, LayerSpec
from kvjax.core import memory
from kvjax.core.types import KvjaxError
from kvjax.methods.strings import method_of, name_of
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.run.forward import Plan


def specs(config: Config) -> tuple[LayerSpec, ...]:
    """What a method may know of each layer."""
    return tuple(
        LayerSpec(
            index=i,
            layers=config.layers,
            kv_heads=config.kv_heads,
            groups=config.groups,
            head_dim=config.head_dim,
            window=config.window(i),
            rope=config.rope,
        )
        for i in range(config.layers)
    )


def bind(method: str | KVMethod, config: Config) -> Plan:
    """A method, or its string, bound to every layer; raises KvjaxError where it cannot serve the model."""
    method = method_of(method)
    if method.traits.host:
        memory.require_host_memory()
    return tuple(method.bind(spec) for spec in specs(config))


def checked(model: Model, cache: Cache, method: str | KVMethod | None = None) -> Cache:
    """The cache; raises KvjaxError unless this model, and this method where one is given, made it."""
    if not isinstance(cache, Cache):
        raise KvjaxError(f"a cache is what kvjax.prefill returns, got {type(cache).__name__}")
    cache.check_whole()
    if cache.config != model.config:
        raise KvjaxError("this cache was filled by another model; prefill the prompt with this one")
    if method is not None and bind(method, model.config) != cache.plan:
        raise KvjaxError(
            f"this cache was filled under another method than {name_of(method_of(method))}; go on without naming a "
            "method, or prefill the prompt under this one"
        )
    return cache
