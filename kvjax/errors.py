"""The errors and warnings of kvjax. Every error is a `KvjaxError`, and that is a `ValueError`."""

from __future__ import annotations

__all__ = [
    "ComponentConflict",
    "GradientThroughBits",
    "IncompatibleMethod",
    "KvjaxError",
    "KvjaxWarning",
    "OtherWeights",
    "ProcessLost",
    "TracedCall",
    "UnknownKeyword",
    "escape_unprintable",
]


def escape_unprintable(text: str, keep: str = "") -> str:
    """Returns `text` with control characters spelled out, but for the characters in `keep`.

    Names in checkpoints and records come from other people, and a terminal obeys an escape code in an error message.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class KvjaxError(ValueError):
    """An input that kvjax cannot use; the message names the value and the remedy."""

    def __str__(self) -> str:
        return escape_unprintable(super().__str__(), keep="\n")


class KvjaxWarning(UserWarning):
    """A request that kvjax carries out, though the result is likely to disappoint."""


class IncompatibleMethod(KvjaxError):
    """Components of a method that cannot work together, or a method that cannot do what a call needs."""


class ComponentConflict(IncompatibleMethod):
    """Two composed methods that define the same component differently; `component` is its field in `Method`."""

    def __init__(self, component: str, message: str):
        super().__init__(message)
        self.component = component


class OtherWeights(KvjaxError):
    """A cache that was filled by a model of other weights, configuration or dtype."""


class ProcessLost(KvjaxError):
    """A run of several processes of which one died, hangs, or ended by an error of its own; the message names it."""


class UnknownKeyword(KvjaxError, TypeError):
    """Arguments that a call does not take; the message names the keyword that is meant, where one is near."""


class TracedCall(KvjaxError):
    """A convenience call under a JAX transformation; the message names its counterpart in `kvjax.functional`."""


class GradientThroughBits(KvjaxError):
    """A gradient that would pass through integers and be wrong without notice; `holder` names the integers."""

    def __init__(self, holder: str):
        super().__init__(
            f"a gradient would pass through {holder}: integers, which carry none, so that it would be wrong; bind the "
            "method with differentiable=True in kvjax.functional.bind, or put jax.lax.stop_gradient around what is no "
            "variable"
        )
