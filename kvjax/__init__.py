"""kvjax: the JAX/Flax home of KV-cache methods."""

from kvjax.api import extend, logits, prefill, score
from kvjax.generate import Result, generate, stream
from kvjax.kv import Method, State, compose, kept_positions, parse, parse_many, planned_bytes, state_bytes, zoo
from kvjax.model import Model, load, random_model
from kvjax.models import Config
from kvjax.types import IncompatibleMethod, KvjaxError

__all__ = [
    "Config",
    "IncompatibleMethod",
    "KvjaxError",
    "Method",
    "Model",
    "Result",
    "State",
    "compose",
    "extend",
    "generate",
    "kept_positions",
    "load",
    "logits",
    "parse",
    "parse_many",
    "planned_bytes",
    "prefill",
    "random_model",
    "score",
    "state_bytes",
    "stream",
    "zoo",
]
