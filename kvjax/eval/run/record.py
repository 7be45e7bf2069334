"""What a line of a run's records may say: whatever is read from disk is checked here, before anything is counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvjax.cache.contract import Traits

MOST = 2**53
"""Of any number: no run measures more, and up to here a float holds every integer."""

TRAITS = {field.name for field in dataclasses.fields(Traits)}


class Field(NamedTuple):
    """What the value of a field must be, and that in words."""

    suits: Callable[[Any], bool]
    words: str


def _integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= MOST


def _number(x: Any, most: float = MOST) -> bool:
    return _integer(x) and x <= most or isinstance(x, float) and 0 <= x <= most


def _list_of(suits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, list) and all(map(suits, x))


def _place(x: Any) -> bool:
    """What is said about a context or a question: what the page reads of it."""
    if not isinstance(x, dict):
        return False
    if "lacking" in x and not (isinstance(x["lacking"], str) and all(map(_integer, (x.get("shots"), x.get("wanted"))))):
        return False
    counts = all(x.get(name) is None or _integer(x[name]) for name in ("length", "turn"))
    return counts and (x.get("depth") is None or _number(x["depth"], 1))


TEXT = Field(lambda x: isinstance(x, str), "a string")
TIME = Field(_number, f"a number from 0 to {MOST}")
BYTES = Field(
    lambda x: isinstance(x, dict) and all(map(_integer, x.values())), f"bytes by memory kind, each from 0 to {MOST}"
)
NEEDED = {
    "method": TEXT,
    "task": TEXT,
    "key": TEXT,
    "scores": Field(_list_of(lambda x: _number(x, 1)), "a list of numbers from 0 to 1"),
    "bytes": BYTES,
}
OPTIONAL = {
    "room": BYTES,
    "dtype": TEXT,
    "bfloat16_fraction": Field(
        lambda x: isinstance(x, dict) and all(_number(v, MOST) for v in x.values()),
        "fractions of the exact bfloat16 cache by memory kind",
    ),
    "case": TEXT,
    "meant": TEXT,
    "metric": TEXT,
    "about": Field(
        _place,
        "an object in which length is a number of tokens, depth from 0 to 1, and examples that are lacking are counted",
    ),
    "asks": Field(_list_of(_place), "a list of objects in which turn is a number, and depth from 0 to 1"),
    "predictions": Field(_list_of(lambda x: isinstance(x, str)), "a list of strings"),
    "likeliest": Field(_list_of(_integer), "a list of ids"),
    "bits": TIME,
    "tokens": Field(_integer, "a number of tokens"),
    "turns": Field(lambda x: isinstance(x, bool), "true or false"),
    "prefill_seconds": TIME,
    "tokens_per_second": TIME,
    "traits": Field(
        lambda x: isinstance(x, dict) and x.keys() <= TRAITS and all(isinstance(v, bool) for v in x.values()),
        f"an object of {', '.join(sorted(TRAITS))}, each true or false",
    ),
}


def problem(record: Any) -> str:
    """What is wrong with a line, in words that follow its name; empty where nothing is."""
    if not isinstance(record, Mapping):
        return f"is {type(record).__name__}, not a record"
    for name, (suits, words) in NEEDED.items():
        if name not in record:
            return f"has no {name!r} ({words})"
        if not suits(record[name]):
            return f"has {record[name]!r:.60} as {name!r}, which must be {words}"
    for name, (suits, words) in OPTIONAL.items():
        if name in record and not suits(record[name]):
            return f"has {record[name]!r:.60} as {name!r}, which must be {words}"
    if record.get("asks") and len(record["asks"]) != len(record["scores"]):
        return f"has {len(record['scores'])} scores for {len(record['asks'])} questions"
    return ""
