"""kvjax: the JAX/Flax home of KV-cache methods.

What most programs use is here. The rest is in modules that are imported when they are used: `kvjax.methods` (every
published method), `kvjax.eval`, `kvjax.parts` (what a method of one's own is written with), `kvjax.testing`,
`kvjax.cache_ops`, `kvjax.speculative`, `kvjax.reuse` and `kvjax.cachegen`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from kvjax import methods
from kvjax.cache.accounting import CacheBytes, kept_positions, state_bytes
from kvjax.cache.contract import Cache
from kvjax.cache.method import Method
from kvjax.core.types import IncompatibleMethod, KvjaxError, KvjaxWarning
from kvjax.methods.strings import compose, name_of, parse
from kvjax.models.config import Config
from kvjax.models.model import Model, load, random_model
from kvjax.run.calls import extend, logits, prefill, score
from kvjax.run.chat import chat
from kvjax.run.context import Context, read, resume
from kvjax.run.generate import generate, stream, stream_text
from kvjax.run.planned import planned_bytes
from kvjax.run.result import Result
from kvjax.run.sampling import SamplingParams

if TYPE_CHECKING:  # what `__getattr__` below gives
    from kvjax import cache_ops as cache_ops
    from kvjax import cachegen as cachegen
    from kvjax import eval as eval
    from kvjax import parts as parts
    from kvjax import reuse as reuse
    from kvjax import speculative as speculative
    from kvjax import testing as testing

    __version__: str

__all__ = [
    "Cache",
    "CacheBytes",
    "Config",
    "Context",
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
    "stream_text",
]

_SUBMODULES = ("cache_ops", "cachegen", "eval", "parts", "reuse", "speculative", "testing")


def __getattr__(name: str) -> ModuleType | str:
    if name in _SUBMODULES:
        return importlib.import_module(f"kvjax.{name}")
    if name == "__version__":
        from importlib import metadata  # 60 ms, and few ask

        try:
            return metadata.version("kvjax")
        except metadata.PackageNotFoundError:  # a folder on the path, not installed
            return "0+unknown"
    raise AttributeError(f"module 'kvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
