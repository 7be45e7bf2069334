"""The table of all methods: a new method is one new row."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from kvjax.cache import Method, compose
from kvjax.core.types import IncompatibleMethod
from kvjax.methods import zoo
from tests.contract.layer import LENGTHS, G

LONGEST = int(LENGTHS.max())

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


PLAIN = Held()


@dataclasses.dataclass(frozen=True)
class Row:
    """A method, the same at its exact limit (from decode step `exact_from` on), and what the recipe says it takes.

    k, v: what keys and values take. host: which of "kv" are on the host. beside: what the reader keeps on the device.
    budget: prompt tokens that stay. per_head: whether each head has its own. again: tokens until the next selection, by
    the last two queries. constant: slots that never grow, and
    marks: bytes beside each of them (per key/value head). All this is from the recipe: not from the code.
    """

    method: Any
    limit: Any
    k: Held = PLAIN
    v: Held = PLAIN
    host: frozenset = frozenset()
    beside: Count = NOTHING
    exact_from: int = 0
    budget: int | None = None
    per_head: bool = False
    again: int | None = None
    constant: int | None = None
    marks: int = 0

    def bytes(self, B: int, K: int, S: int, H: int, size: int) -> dict[str, int]:
        """Of one layer's state, by memory kind."""
        if self.constant is not None:
            each = (4 if self.per_head else 0) + self.marks
            shared = 0 if self.per_head else 4 * B * self.constant
            return {"device": B * K * self.constant * (2 * H * size + each) + shared, "pinned_host": 0}
        seen = 0
        if self.budget is not None:
            S += min(self.budget, LONGEST) - LONGEST
        if self.again is not None:
            S, seen = min(S, self.budget + self.again), B * 2 * (K * G * H * size + 4)
        args, held = (B, K, S, H, size), {"k": self.k, "v": self.v}
        book = 4 * B * S * (K if self.per_head else 1) + 4 * B  # positions of the slots, and one length per row
        moves = {name: h.moves(*args) for name, h in held.items()}
        stays = sum(h.stays(*args) for h in held.values()) + self.beside(*args) + book + seen
        on_host = sum(moves[name] for name in self.host)
        return {"device": sum(moves.values()) - on_host + stays, "pinned_host": on_host}


def _kcache(**fields) -> Row:
    fields = {"device_layers": 0, **fields}
    return Row(zoo.kcache(n=3, **fields), zoo.kcache(n=100, **fields), host=frozenset("v"))


def _low_bits(bits: int, group: int, residual: int) -> tuple[Held, Held]:
    """Words, a scale and a minimum per group; R keys, or R + 1 values, in full precision; a count per row."""

    def moves(B, K, S, H, size):
        S = max(-(-(S // residual * residual) // whole), 1) * whole  # what may leave the residual, in whole words
        return B * K * S * H * bits // 8 + 2 * B * K * (S * H // group) * size

    def stays(extra):
        return lambda B, K, S, H, size: B * K * (residual + extra) * H * size + 4 * B

    whole = math.lcm(32 // bits, group)
    return Held(moves, stays(0)), Held(moves, stays(1))


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
    return Row(make(topk), make(100), host=frozenset("kv"), beside=beside, exact_from=int(speculative))


def _evicts(make: Callable[[int], Method], budget: int, rest: Method | None = None, **fields) -> Row:
    over = lambda m: compose(m, rest) if rest else m  # noqa: E731
    return Row(over(make(budget)), over(make(100)), budget=budget, **{"per_head": True, **fields})


def _snapkv(budget: int) -> Method:
    return zoo.snapkv(budget, window=2, kernel=3)


def _paged(budget: int) -> Method:
    return zoo.accumulated(budget, recent=2, sinks=2, unit="page2")


MAIN: dict[str, Row] = {
    "full": Row(zoo.full(), zoo.full()),
    "offload": Row(zoo.offload(), zoo.offload(), host=frozenset("kv")),
    "kcache": _kcache(),
    "kivi 4 bits": _kivi(4),
    "specache": _specache(),
    "snapkv": _evicts(_snapkv, 6),
    "h2o": Row(zoo.h2o(3, 2), zoo.h2o(90, 10), constant=6, per_head=True, marks=4),
}

ROWS: dict[str, Row] = {
    **MAIN,
    "kcache renormalised": _kcache(renormalise=True),
    "kcache per kv head": _kcache(granularity="kv"),
    "kivi 2 bits": _kivi(2, group=8, residual=8),
    "kivi 1 bit": _kivi(1),
    "specache 2 bits max": _specache(2, reduce="max"),
    "specache waiting": _specache(speculative=False),
    "pyramidkv": _evicts(lambda budget: zoo.pyramidkv(budget, window=2, kernel=3, pool="avg"), 6),
    "accumulated": _evicts(lambda budget: zoo.accumulated(budget, recent=2, normalise="visible", decay=0.9), 5),
    "keynorm per layer": _evicts(lambda budget: zoo.keynorm(budget, per="layer"), 5, per_head=False),
    "random": _evicts(lambda budget: zoo.random(budget, sinks=1, recent=1), 5),
    "sinks and recent": _evicts(lambda budget: zoo.sinks_and_recent(budget, sinks=2), 5, per_head=False),
    "kvcrush": _evicts(_snapkv, 7, zoo.kvcrush(0.5)),
    "kvcrush in pages": _evicts(_paged, 8, zoo.kvcrush(0.5, anchor="mean", rule="stride", bits="positions")),
    "kmeans": _evicts(_snapkv, 7, zoo.kmeans(0.5, iterations=2)),
    "snapkv again": _evicts(_snapkv, 6, zoo.recompress(3), again=3),
    "kvcrush again": _evicts(_snapkv, 7, compose(zoo.kvcrush(0.5), zoo.recompress(2)), again=2),
    "streaming_llm": Row(zoo.streaming_llm(3, 2), zoo.streaming_llm(90, 2), constant=6),
    "streaming_llm at true positions": Row(
        zoo.streaming_llm(3, 2, reindex=False), zoo.streaming_llm(90, 2, reindex=False), constant=6
    ),
    "h2o per layer": Row(
        zoo.h2o(3, 2, 0.9, "visible-count", "layer"), zoo.h2o(90, 10), constant=6, per_head=True, marks=4
    ),
    "scissorhands": Row(
        zoo.scissorhands(6, history=4, recent=2), zoo.scissorhands(90, recent=2), constant=7, per_head=True, marks=4
    ),
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
        max(x.exact_from, y.exact_from),
        x.budget if y.budget is None else y.budget,
        x.per_head or y.per_head,
        x.again if y.again is None else y.again,
        x.constant if y.constant is None else y.constant,
        x.marks or y.marks,
    )


PAIRS = {f"{a} + {b}": pair(MAIN[a], MAIN[b]) for a, b in itertools.combinations(MAIN, 2)}

CASES: dict[str, Row] = {**ROWS, **{name: row for name, row in PAIRS.items() if isinstance(row, Row)}}
