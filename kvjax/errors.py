"""The errors and warnings of kvjax, by name. All errors are `KvjaxError`, which is a `ValueError`."""

from __future__ import annotations

__all__ = [
    "GradientThroughBits",
    "IncompatibleMethod",
    "KvjaxError",
    "KvjaxWarning",
    "OtherWeights",
    "ComponentConflict",
    "TracedCall",
    "escape_unprintable",
]


def escape_unprintable(text: str, keep: str = "") -> str:
    """A text with whatever a terminal would obey (escape codes, line ends) spelled out, but for the characters `keep`.

    Names in files are other people's text, and may hold such things.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class KvjaxError(ValueError):
    """An input that kvjax cannot use; the message says which value, and what to do."""

    def __str__(self) -> str:
        return escape_unprintable(super().__str__(), keep="\n")


class KvjaxWarning(UserWarning):
    """What kvjax does as it was told, though it is likely to disappoint."""


class IncompatibleMethod(KvjaxError):
    """Two slots of a method that cannot work together."""


class OtherWeights(KvjaxError):
    """A cache that a model of other weights, configuration or dtype filled."""


class TracedCall(KvjaxError):
    """A convenient call within a JAX transformation; `kvjax.functional` has the function to use there."""


class GradientThroughBits(KvjaxError):
    """A gradient that would pass through integers, which carry none; `holder` says what these are."""

    def __init__(self, holder: str):
        super().__init__(
            f"a gradient would pass through {holder}: integers, which carry none, so that it would be wrong; bind the "
            "method with differentiable=True in kvjax.functional.bind, or put jax.lax.stop_gradient around what is no "
            "variable"
        )


class ComponentConflict(IncompatibleMethod):
    """Two methods that fill the same slot differently."""

    def __init__(self, component: str, message: str):
        super().__init__(message)
        self.component = component
