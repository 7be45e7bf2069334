"""Two methods as one: the slots that either fills."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.cache.codecs.base import Codec, Host, Plain
from kvjax.cache.method import Method
from kvjax.cache.protocol import KVMethod
from kvjax.errors import ComponentConflict, IncompatibleMethod


def compose(a: KVMethod, b: KVMethod) -> Method:
    """A method that fills the slots of both; raises IncompatibleMethod when both fill the same slot differently.

    A codec and a placement combine (`Host(Plain())` with an `x` on the device is `Host(x)`).
    """
    for x, y in ((a, b), (b, a)):
        if not isinstance(x, Method):
            raise IncompatibleMethod(
                f"{x} is no kvjax.Method, so {_called(y)} finds no slot of it to fill; leave one of them out"
            )
    assert isinstance(a, Method) and isinstance(b, Method)
    default = Method()
    merged: dict[str, Any] = {}
    for field in dataclasses.fields(Method):
        if not field.compare:
            continue
        x, y, empty = (getattr(m, field.name) for m in (a, b, default))
        if field.name in ("k", "v"):
            merged[field.name] = _codec(field.name, x, y, a, b)
        elif x == empty or y == empty or x == y:
            merged[field.name] = y if x == empty else x
        else:
            raise _clash(field.name, x, y, a, b)
    return Method(**merged, recipe=" + ".join(m.recipe for m in (a, b) if m.recipe))


def _codec(slot: str, x: Codec, y: Codec, a: Method, b: Method) -> Codec:
    inner = {c.on_device() for c in (x, y)} - {Plain()}
    if len(inner) > 1:
        raise _clash(slot, x, y, a, b)
    codec = inner.pop() if inner else Plain()
    return Host(codec) if isinstance(x, Host) or isinstance(y, Host) else codec


def _clash(slot: str, x: Any, y: Any, a: Method, b: Method) -> ComponentConflict:
    return ComponentConflict(
        slot,
        f"{_called(a)} and {_called(b)} both fill the slot `{slot}`: {x} and {y}; "
        f"leave one of them out, or set the slot with dataclasses.replace",
    )


def _called(method: KVMethod) -> str:
    return method.recipe if isinstance(method, Method) and method.recipe else str(method)
