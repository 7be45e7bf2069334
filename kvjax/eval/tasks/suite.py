"""All tasks by name, and the cases of a choice of them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import warnings
from collections.abc import Callable, Sequence

from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.eval.tasks import examples
from kvjax.eval.tasks.case import Case, Maker, Spec, TooShort
from kvjax.models.model import Model


def makers() -> dict[str, Maker]:
    """Name -> maker of every task: those that need nothing, those that need a package, those that need files."""
    from kvjax.eval.tasks.essays import ESSAYS
    from kvjax.eval.tasks.humaneval import HUMANEVAL
    from kvjax.eval.tasks.public import PUBLIC
    from kvjax.eval.tasks.synthetic import SYNTHETIC

    return {**SYNTHETIC, **ESSAYS, **HUMANEVAL, **PUBLIC}


def described() -> dict[str, str]:
    """Name -> the first line of the maker's docstring."""
    return {name: (inspect.getdoc(maker) or "").partition("\n")[0] for name, maker in makers().items()}


def words(text: str) -> list[str]:
    """Comma-separated words."""
    return [w.strip() for w in text.split(",") if w.strip()]


def expand(names: str | Sequence[str]) -> list[str]:
    """Task names, each once; a name like "ruler" stands for all "ruler.*". Raises KvjaxError with the nearest name.

    names: several, or a string in which commas separate them.
    """
    known, names = list(makers()), words(names) if isinstance(names, str) else names
    if not names:
        raise KvjaxError(f"no task was named; for example {known[0]!r}, and `kvjax eval --list` lists them all")
    found = [t for name in names for t in _matching(name, known)]
    return list(dict.fromkeys(found))


def _matching(name: str, known: Sequence[str]) -> list[str]:
    if name in known:
        return [name]
    family = [t for t in known if t.startswith(f"{name}.")]
    if not family:
        families = dict.fromkeys(t.partition(".")[0] for t in known)
        close = difflib.get_close_matches(name, [*families, *known], 1, 0.5)
        nearest = f"; did you mean {close[0]!r}?" if close else ""
        raise KvjaxError(f"unknown task {name!r}{nearest}; `kvjax eval --list` lists them all")
    return family


def _of(name: str, model: Model, spec: Spec, left_out: Callable[[str], None] | None) -> list[Case]:
    """One task's cases, of the lengths that it fits in."""
    maker, found = makers()[name], []
    try:
        return list(maker(model, spec))
    except TooShort:
        if left_out is None:
            raise
    for length in spec.lengths:
        try:
            found += maker(model, dataclasses.replace(spec, lengths=(length,)))
        except TooShort as e:
            left_out(f"left out: {e}")
    return found


def cases(model: Model, names: Sequence[str], spec: Spec, left_out: Callable[[str], None] | None = None) -> list[Case]:
    """The cases of all named tasks, in order; raises KvjaxError for an unknown name and what the makers raise.

    left_out: is told of each task and length that do not fit together, and the others are made; if none fits, or
    without `left_out`, that is an error. It is told of tasks whose prompts lack solved examples, too; without it that
    is a KvjaxWarning.
    """
    found = [case for name in expand(names) for case in _of(name, model, spec, left_out)]
    if not found and left_out is not None:
        raise KvjaxError("no task fits in any of the lengths; use longer ones")
    for note in examples.notes((case.task, case.about) for case in found):
        left_out(note) if left_out is not None else warnings.warn(note, KvjaxWarning, stacklevel=2)
    seen: set[tuple[str, str]] = set()
    for case in found:
        if (case.task, case.key) in seen:
            raise KvjaxError(f"task {case.task!r} made two cases with the key {case.key!r}; a key names one instance")
        seen.add((case.task, case.key))
    return found
