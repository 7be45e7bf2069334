"""The names of kvjax and the modules that define them; `kvjax/__init__.py` reads them from here."""

from . import cache_ops as cache_ops
from . import cachegen as cachegen
from . import custom_decoder as custom_decoder
from . import errors as errors
from . import eval as eval
from . import functional as functional
from . import method_api as method_api
from . import methods
from . import reuse as reuse
from . import speculative as speculative
from . import testing as testing
from .cache.accounting import CacheBytes, kept_positions, state_bytes
from .cache.method import Method
from .cache.protocol import Cache
from .core.step_bytes import StepBytes
from .engine.sampling import SamplingParams
from .errors import IncompatibleMethod, KvjaxError, KvjaxWarning
from .generation.context import Context, read, resume
from .generation.generate import chat, generate, stream, stream_chat, stream_text
from .generation.memory_plan import planned_bytes, step_bytes
from .generation.model_calls import extend, logits, prefill, score
from .generation.options import GenerateOptions
from .generation.result import Result
from .models.config import Config
from .models.model import Model, load, random_model
from .registry.strings import compose, name_of, parse

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
    "StepBytes",
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
    "step_bytes",
    "stream",
    "stream_chat",
    "stream_text",
]
