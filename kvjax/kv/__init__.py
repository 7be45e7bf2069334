"""KV-cache methods: codecs, readers, the method that combines them, and the zoo of published ones."""

from kvjax.kv import zoo
from kvjax.kv.accounting import kept_positions, planned_bytes, state_bytes
from kvjax.kv.compose import compose
from kvjax.kv.method import Method
from kvjax.kv.state import LayerState, State
from kvjax.kv.strings import parse, parse_many

__all__ = [
    "LayerState",
    "Method",
    "State",
    "compose",
    "kept_positions",
    "parse",
    "parse_many",
    "planned_bytes",
    "state_bytes",
    "zoo",
]
