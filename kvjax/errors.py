"""The errors and warnings of kvjax, by name. All errors are `KvjaxError`, which is a `ValueError`."""

from kvjax.core.types import (
    GradientThroughBits,
    IncompatibleMethod,
    KvjaxError,
    KvjaxWarning,
    OtherWeights,
    SlotTaken,
    TracedCall,
)

__all__ = [
    "GradientThroughBits",
    "IncompatibleMethod",
    "KvjaxError",
    "KvjaxWarning",
    "OtherWeights",
    "SlotTaken",
    "TracedCall",
]
