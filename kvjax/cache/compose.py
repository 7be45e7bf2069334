"""Composes two methods by merging the components that each defines."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.cache.codecs.plain import Host, Plain
from kvjax.cache.method import Method
from kvjax.cache.protocol import KVMethod
from kvjax.cache.storage import Codec
from kvjax.errors import ComponentConflict, IncompatibleMethod


def compose(a: KVMethod, b: KVMethod) -> Method:
    """Returns the method with the components of both.

    A codec and a placement combine: `Host(Plain())` and a codec `x` on the device make `Host(x)`.

    Raises:
      IncompatibleMethod: where both define the same component differently (`ComponentConflict`), or one is no
        `kvjax.Method`.
    """
    for x, y in ((a, b), (b, a)):
        if not isinstance(x, Method):
            raise IncompatibleMethod(
                f"{x} is no kvjax.Method, so {_name(y)} finds no component of it to fill; leave one of them out"
            )
    assert isinstance(a, Method) and isinstance(b, Method)
    default = Method()
    merged: dict[str, Any] = {}
    for field in dataclasses.fields(Method):
        if not field.compare:
            continue
        x, y, empty = (getattr(m, field.name) for m in (a, b, default))
        if field.name in ("k", "v"):
            # A placement is no codec of its own: 'offload + int4' keeps int4 codes on the host.
            codecs = {codec.on_device() for codec in (x, y)} - {Plain()}
            is_taken = len(codecs) > 1
            codec: Codec = codecs.pop() if codecs else Plain()
            merged[field.name] = Host(codec) if isinstance(x, Host) or isinstance(y, Host) else codec
        else:
            is_taken = x not in (empty, y) and y != empty
            merged[field.name] = y if x == empty else x
        if is_taken:
            raise ComponentConflict(
                field.name,
                f"{_name(a)} and {_name(b)} both fill the component `{field.name}`: {x} and {y}; "
                "leave one of them out, or set the component with dataclasses.replace",
            )
    return Method(**merged, string=" + ".join(m.string for m in (a, b) if m.string))


def _name(method: KVMethod) -> str:
    return method.string if isinstance(method, Method) and method.string else str(method)
