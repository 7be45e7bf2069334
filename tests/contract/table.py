"""The table of all methods: a new method is one new row."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

from kvjax.kv import Method, compose, zoo
from kvjax.types import IncompatibleMethod

Count = Callable[[int, int, int, int, int], int]
"""(B, K, S, H, itemsize) -> bytes."""


def NOTHING(*_) -> int:  # noqa: N802
    """No bytes."""
    return 0


@dataclasses.dataclass(frozen=True)
class Held:
    """What one of K or V takes: what moves to the host when the slot is placed there, and what never does."""

    moves: Count = lambda B, K, S, H, size: B * K * S * H * size
    stays: Count = NOTHING
    unit: int = 1


PLAIN = Held()


@dataclasses.dataclass(frozen=True)
class Row:
    """A method, the same at its exact limit (from decode step `exact_from` on), and what the recipe says it takes.

    k, v: what keys and values take. host: which of "kv" are on the host. beside: what the reader keeps on the device.
    All this is from the recipe: not from the code.
    """

    method: Method
    limit: Method
    k: Held = PLAIN
    v: Held = PLAIN
    host: frozenset = frozenset()
    beside: Count = NOTHING
    unit: int = 1
    exact_from: int = 0

    def bytes(self, B: int, K: int, S: int, H: int, size: int) -> dict[str, int]:
        """Of one layer's state, by memory kind."""
        unit = math.lcm(self.unit, self.k.unit, self.v.unit)
        S = -(-S // unit) * unit
        args, held = (B, K, S, H, size), {"k": self.k, "v": self.v}
        book = 4 * B * S + 4 * B  # positions of the slots, and one length per row
        moves = {name: h.moves(*args) for name, h in held.items()}
        stays = sum(h.stays(*args) for h in held.values()) + self.beside(*args) + book
        on_host = sum(moves[name] for name in self.host)
        return {"device": sum(moves.values()) - on_host + stays, "pinned_host": on_host}


def _kcache(**fields) -> Row:
    fields = {"device_layers": 0, **fields}
    return Row(zoo.kcache(n=3, **fields), zoo.kcache(n=100, **fields), host=frozenset("v"))


def _low_bits(bits: int, group: int, residual: int) -> tuple[Held, Held]:
    """Words, a scale and a minimum per group; R keys, or R + 1 values, in full precision; a count per row."""

    def moves(B, K, S, H, size):
        return B * K * S * H * bits // 8 + 2 * B * K * (S * H // group) * size

    def stays(extra):
        return lambda B, K, S, H, size: B * K * (residual + extra) * H * size + 4 * B

    unit = math.lcm(32 // bits, residual)
    return Held(moves, stays(0), unit), Held(moves, stays(1), unit)


def _kivi(bits: int, group: int = 4, residual: int = 4) -> Row:
    k, v = _low_bits(bits, group, residual)
    return Row(zoo.kivi(bits, group, residual), zoo.kivi(bits, group, 24), k, v)


def _specache(bits: int = 1, topk: int = 3, group: int = 4, residual: int = 4, **fields) -> Row:
    low = _low_bits(bits, group, residual)
    speculative = fields.get("speculative", True)

    def beside(B, K, S, H, size):
        copy = sum(held.moves(B, K, S, H, size) + held.stays(B, K, S, H, size) for held in low)
        return copy + speculative * B * K * topk * (2 * H * size + 4)

    make = lambda topk: zoo.specache(bits, group, topk, residual, **fields)  # noqa: E731
    return Row(
        make(topk), make(100), host=frozenset("kv"), beside=beside, unit=low[0].unit, exact_from=int(speculative)
    )


MAIN: dict[str, Row] = {
    "full": Row(zoo.full(), zoo.full()),
    "offload": Row(zoo.offload(), zoo.offload(), host=frozenset("kv")),
    "kcache": _kcache(),
    "kivi 4 bits": _kivi(4),
    "specache": _specache(),
}

ROWS: dict[str, Row] = {
    **MAIN,
    "kcache renormalised": _kcache(renormalise=True),
    "kcache per kv head": _kcache(granularity="kv"),
    "kivi 2 bits": _kivi(2, group=8, residual=8),
    "kivi 1 bit": _kivi(1),
    "specache 2 bits max": _specache(2, reduce="max"),
    "specache waiting": _specache(speculative=False),
}


def pair(x: Row, y: Row) -> Row | IncompatibleMethod:
    """Two rows composed, or the error that says why they cannot be."""
    try:
        method, limit = compose(x.method, y.method), compose(x.limit, y.limit)
    except IncompatibleMethod as e:
        return e
    fuller = lambda a, b, empty: b if a is empty else a  # noqa: E731
    return Row(
        method,
        limit,
        fuller(x.k, y.k, PLAIN),
        fuller(x.v, y.v, PLAIN),
        x.host | y.host,
        fuller(x.beside, y.beside, NOTHING),
        math.lcm(x.unit, y.unit),
        max(x.exact_from, y.exact_from),
    )


PAIRS = {f"{a} + {b}": pair(MAIN[a], MAIN[b]) for a, b in itertools.combinations(MAIN, 2)}

CASES: dict[str, Row] = {**ROWS, **{name: row for name, row in PAIRS.items() if isinstance(row, Row)}}
