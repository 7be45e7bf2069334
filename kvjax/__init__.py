"""kvjax: the JAX/Flax home of KV-cache methods."""

import importlib.metadata

from kvjax import methods, reuse
from kvjax.cache.accounting import CacheBytes, kept_positions, state_bytes
from kvjax.cache.contract import Cache
from kvjax.cache.contract import Cache as State
from kvjax.cache.method import Method
from kvjax.core.types import IncompatibleMethod, KvjaxError
from kvjax.methods.strings import compose, name_of, parse, parse_many
from kvjax.models.config import Config
from kvjax.models.model import Model, load, random_model
from kvjax.run import cachegen
from kvjax.run.calls import extend, logits, prefill, score
from kvjax.run.chat import chat, chat_ids
from kvjax.run.context import Context, read, resume
from kvjax.run.exact import Exact, read_exactly
from kvjax.run.generate import generate, stream, stream_text
from kvjax.run.packed import pack_exactly, read_packed
from kvjax.run.planned import planned_bytes
from kvjax.run.prefixes import read_batch
from kvjax.run.speculate import Speculation, speculate
from kvjax.run.splice import splice
from kvjax.run.states import branch, crop, join, rows

try:
    __version__ = importlib.metadata.version("kvjax")
except importlib.metadata.PackageNotFoundError:  # a folder on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "Cache",
    "CacheBytes",
    "Config",
    "Context",
    "Exact",
    "IncompatibleMethod",
    "KvjaxError",
    "Method",
    "Model",
    "Result",
    "Speculation",
    "State",
    "branch",
    "cachegen",
    "chat",
    "chat_ids",
    "compose",
    "crop",
    "extend",
    "generate",
    "join",
    "kept_positions",
    "load",
    "logits",
    "name_of",
    "pack_exactly",
    "parse",
    "parse_many",
    "planned_bytes",
    "prefill",
    "random_model",
    "read",
    "read_batch",
    "read_exactly",
    "read_packed",
    "resume",
    "reuse",
    "rows",
    "score",
    "speculate",
    "splice",
    "state_bytes",
    "stream",
    "stream_text",
    "methods",
]
