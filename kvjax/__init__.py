"""kvjax: the JAX/Flax home of KV-cache methods."""

from kvjax.cache import Method, State, compose, kept_positions, parse, parse_many, planned_bytes, state_bytes
from kvjax.core.types import IncompatibleMethod, KvjaxError
from kvjax.methods import zoo
from kvjax.models import Config
from kvjax.models.model import Model, load, random_model
from kvjax.run.api import extend, logits, prefill, score
from kvjax.run.generate import Result, generate, stream

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
