"""KV-cache methods: codecs, readers, the method that combines them, and the zoo of published ones."""

from kvjax.cache.accounting import kept_positions, planned_bytes, state_bytes
from kvjax.cache.compose import compose
from kvjax.cache.contract import LayerState, State
from kvjax.cache.method import Method
from kvjax.methods import zoo
from kvjax.methods.strings import parse, parse_many

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
