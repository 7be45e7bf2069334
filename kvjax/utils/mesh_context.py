"""The mesh that a caller has set, which kvjax' own calls leave."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def outside_callers_mesh() -> Iterator[None]:
    """Leaves the mesh of `jax.set_mesh`, as arrays on another one, a model's, take part in no operation within it.

    Within a trace, whose arrays lie on that mesh, nothing changes.
    """
    with contextlib.ExitStack() as stack:
        if not jax.sharding.get_abstract_mesh().empty:
            # JAX refuses within a trace, and has no public question that tells one.
            with contextlib.suppress(ValueError):
                stack.enter_context(jax.set_mesh(None))
        yield


def leaves_callers_mesh(call: Callable[P, R]) -> Callable[P, R]:
    """Decorates a call that runs outside its caller's mesh; a frame of kvjax, which `caller_level` passes over."""

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with outside_callers_mesh():
            return call(*args, **kwargs)

    return run


def keeps_callers_mesh(call: Callable[P, R]) -> Callable[P, R]:
    """Marks a public call that runs functions of the caller's, which are written for the mesh that is set."""
    call.keeps_callers_mesh = True  # type: ignore[attr-defined]
    return call
