"""kvjax: the JAX/Flax home of KV-cache methods.

Most programs need only the names here. The rest is in modules that are imported when they are used: `kvjax.methods`
(every published method), `kvjax.method_api` (to write a method of one's own), `kvjax.functional` (pure functions for
jit, grad, vmap and scan), `kvjax.eval`, `kvjax.testing`, `kvjax.errors`, `kvjax.cache_ops`, `kvjax.speculative`,
`kvjax.reuse` and `kvjax.cachegen`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time `__getattr__` gives the same
    from kvjax import cache_ops as cache_ops
    from kvjax import cachegen as cachegen
    from kvjax import errors as errors
    from kvjax import eval as eval
    from kvjax import functional as functional
    from kvjax import method_api as method_api
    from kvjax import methods as methods
    from kvjax import reuse as reuse
    from kvjax import speculative as speculative
    from kvjax import testing as testing
    from kvjax.cache.accounting import CacheBytes, kept_positions, state_bytes
    from kvjax.cache.method import Method
    from kvjax.cache.protocol import Cache
    from kvjax.engine.sampling import SamplingParams
    from kvjax.errors import IncompatibleMethod, KvjaxError, KvjaxWarning
    from kvjax.generation.chat import chat, stream_chat
    from kvjax.generation.context import Context, read, resume
    from kvjax.generation.generate import generate, stream, stream_text
    from kvjax.generation.memory_plan import planned_bytes
    from kvjax.generation.model_calls import extend, logits, prefill, score
    from kvjax.generation.options import GenerateOptions
    from kvjax.generation.result import Result
    from kvjax.models.config import Config
    from kvjax.models.model import Model, load, random_model
    from kvjax.registry.strings import compose, name_of, parse

    __version__: str

__all__ = [
    "Cache",
    "CacheBytes",
    "Config",
    "Context",
    "GenerateOptions",
    "IncompatibleMethod",
    "KvjaxError",
    "KvjaxWarning",
    "Method",
    "Model",
    "Result",
    "SamplingParams",
    "chat",
    "compose",
    "extend",
    "generate",
    "kept_positions",
    "load",
    "logits",
    "methods",
    "name_of",
    "parse",
    "planned_bytes",
    "prefill",
    "random_model",
    "read",
    "resume",
    "score",
    "state_bytes",
    "stream",
    "stream_chat",
    "stream_text",
]

_MODULES = "cache_ops cachegen errors eval functional method_api methods reuse speculative testing".split()
_HOMES = {
    "kvjax.cache.accounting": ("CacheBytes", "kept_positions", "state_bytes"),
    "kvjax.cache.protocol": ("Cache",),
    "kvjax.cache.method": ("Method",),
    "kvjax.errors": ("IncompatibleMethod", "KvjaxError", "KvjaxWarning"),
    "kvjax.registry.strings": ("compose", "name_of", "parse"),
    "kvjax.models.config": ("Config",),
    "kvjax.models.model": ("Model", "load", "random_model"),
    "kvjax.generation.model_calls": ("extend", "logits", "prefill", "score"),
    "kvjax.generation.chat": ("chat", "stream_chat"),
    "kvjax.generation.context": ("Context", "read", "resume"),
    "kvjax.generation.generate": ("generate", "stream", "stream_text"),
    "kvjax.generation.memory_plan": ("planned_bytes",),
    "kvjax.generation.options": ("GenerateOptions",),
    "kvjax.generation.result": ("Result",),
    "kvjax.engine.sampling": ("SamplingParams",),
}
"""The module that defines each name at the top; importing it waits for the first use, since Flax takes a while."""


if not TYPE_CHECKING:  # type checkers, shown this, would accept any name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"kvjax.{name}")
        if name == "__version__":
            from importlib import metadata  # which takes longer to import than kvjax, and few ask

            try:
                return metadata.version("kvjax")
            except metadata.PackageNotFoundError:  # a folder on the path, not installed
                return "0+unknown"
        for module, names in _HOMES.items():
            if name in names:
                value = globals()[name] = getattr(importlib.import_module(module), name)
                return value
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
