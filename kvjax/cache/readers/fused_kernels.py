"""Reading keys and values together with their codecs in one kernel: a register of such forms, by codecs and backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from kvjax.errors import KvjaxError

KERNELS = ("auto", "xla", "pallas")


class Form(NamedTuple):
    """One kernel: for which codecs it is, and how it reads a block of queries."""

    fits: Callable[[Any, Any], bool]  # (key codec, value codec)
    read: Callable[..., Any]  # (layer, state, q, q_pos) -> Partial
    queries: int  # that it takes at a time


FORMS: dict[str, list[Form]] = {}


def register(backend: str, form: Form) -> None:
    """Adds a form for a backend ("gpu"); the first one that fits is taken."""
    FORMS.setdefault(backend, []).append(form)


def find(kernel: str, k: Any, v: Any) -> Form | None:
    """The form for these codecs here; "pallas" takes one of any backend, which is interpreted elsewhere, slowly."""
    backends = FORMS if kernel == "pallas" else [jax.default_backend()] if kernel == "auto" else []
    found = next((form for b in backends for form in FORMS.get(b, []) if form.fits(k, v)), None)
    if kernel == "pallas" and found is None:
        raise KvjaxError(
            f"kernel='pallas' reads KIVI codes of equal bits on the device, not {k} and {v}; use kernel='auto'"
        )
    return found
