"""Solved examples before a question: how many a prompt has, and what is said where it lacks some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def shots(n: int, wanted: int, found: int, train: Path, length: int) -> dict[str, int | str]:
    """What `Case.about` says of a prompt with n examples of the `found` ones of a file, where `wanted` were meant."""
    if n == wanted:
        return {"shots": n}
    file = f"{train.parent.name}/{train.name}"  # below --data, wherever that is
    if n < found:
        why = f"no room for more in {length} tokens"
    else:
        why = f"{file} has no more that can be used" if train.is_file() else f"no {file} in the folder of --data"
    return {"shots": n, "wanted": wanted, "lacking": why}


def notes(told: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """A line for each task of which prompts lack examples, from (task, what is said about a case)."""
    short: dict[str, list[Mapping[str, Any]]] = {}
    for task, about in told:
        if "lacking" in about:
            short.setdefault(task, []).append(about)
    return [f"{task}: {_lack(cases)}" for task, cases in short.items()]


def _lack(cases: list[Mapping[str, Any]]) -> str:
    numbers = sorted({about["shots"] for about in cases})
    few = " to ".join(dict.fromkeys(str(n) for n in (numbers[0], numbers[-1])))
    why = ", ".join(dict.fromkeys(about["lacking"] for about in cases))
    return f"{few} of {cases[0]['wanted']} solved examples: {why}"
