"""The table of all methods: a new method is one new row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvjax.kv import Method, compose, zoo
from kvjax.types import IncompatibleMethod

Bytes = Callable[[int, int, int, int, int], dict[str, int]]


@dataclasses.dataclass(frozen=True)
class Row:
    """A method, the same at its exact limit, and what the recipe says one layer's state takes.

    bytes(B, K, S, H, itemsize) -> {memory kind: bytes}, from the recipe: not from the code.
    """

    method: Method
    limit: Method
    bytes: Bytes


def _book(B: int, S: int) -> int:
    return 4 * B * S + 4 * B  # positions of the slots, and one length per row


def _all_device(B, K, S, H, size):
    return {"device": 2 * B * K * S * H * size + _book(B, S), "pinned_host": 0}


def _all_host(B, K, S, H, size):
    return {"device": _book(B, S), "pinned_host": 2 * B * K * S * H * size}


def _values_on_host(B, K, S, H, size):
    return {"device": B * K * S * H * size + _book(B, S), "pinned_host": B * K * S * H * size}


def _kcache(**fields) -> Row:
    fields = {"device_layers": 0, **fields}
    return Row(zoo.kcache(n=3, **fields), zoo.kcache(n=100, **fields), _values_on_host)


ROWS: dict[str, Row] = {
    "full": Row(zoo.full(), zoo.full(), _all_device),
    "offload": Row(zoo.offload(), zoo.offload(), _all_host),
    "kcache": _kcache(),
    "kcache renormalised": _kcache(renormalise=True),
    "kcache per kv head": _kcache(granularity="kv"),
}


def tailed(name: str, R: int = 4) -> Row:
    """A row with a dense tail of R tokens."""
    row = ROWS[name]

    def count(B, K, S, H, size):
        body = row.bytes(B, K, -(-S // R) * R, H, size)
        return {**body, "device": body["device"] + 2 * B * K * R * H * size + _book(B, R)}

    tail = lambda m: dataclasses.replace(m, tail=R)  # noqa: E731
    return Row(tail(row.method), tail(row.limit), count)


def pair(a: str, b: str) -> Row | IncompatibleMethod:
    """Two rows composed, or the error that says why they cannot be."""
    x, y = ROWS[a], ROWS[b]
    try:
        method, limit = compose(x.method, y.method), compose(x.limit, y.limit)
    except IncompatibleMethod as e:
        return e

    def count(B, K, S, H, size):
        on_host = max(m.bytes(B, K, S, H, size)["pinned_host"] for m in (x, y))  # a slot that either moves is moved
        return {"device": 2 * B * K * S * H * size - on_host + _book(B, S), "pinned_host": on_host}

    return Row(method, limit, count)


PAIRS = {f"{a} + {b}": pair(a, b) for i, a in enumerate(ROWS) for b in list(ROWS)[i + 1 :]}

CASES: dict[str, Row] = {
    **ROWS,
    **{f"{name}, tail 4": tailed(name) for name in ROWS},
    **{name: row for name, row in PAIRS.items() if isinstance(row, Row)},
}
