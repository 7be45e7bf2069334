"""The names of kvjax and the modules that define them; `kvjax/__init__.py` reads them from here."""

from . import cache_ops as cache_ops
from . import cachegen as cachegen
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
from .core.rope import Rope, RopeScaling
from .core.step_bytes import StepBytes
from .engine.sampling import SamplingParams
from .errors import IncompatibleMethod, KvjaxError, KvjaxWarning
from .generation.chat import chat, stream_chat
from .generation.context import Context, read, resume
from .generation.generate import generate, stream, stream_text
from .generation.memory_plan import planned_bytes, step_bytes
from .generation.model_calls import extend, logits, prefill, score
from .generation.options import GenerateOptions
from .generation.result import Result
from .layer_cache import LayerCache, attach, attend, finish, specs_of
from .models.config import Config
from .models.model import Model, load, random_model
from .registry.strings import compose, name_of, parse
from .rope_check import check_rope

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
    "LayerCache",
    "Method",
    "Model",
    "Result",
    "Rope",
    "RopeScaling",
    "SamplingParams",
    "StepBytes",
    "attach",
    "attend",
    "chat",
    "check_rope",
    "compose",
    "extend",
    "finish",
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
    "specs_of",
    "state_bytes",
    "step_bytes",
    "stream",
    "stream_chat",
    "stream_text",
]
