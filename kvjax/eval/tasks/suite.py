"""All tasks by name, and the cases of a choice of them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence

from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.eval.tasks import examples, haystack, ruler, symbols, texts
from kvjax.eval.tasks.case import Case, Maker, Spec, TooShort, bind_maker
from kvjax.eval.tasks.essays import ESSAYS
from kvjax.eval.tasks.humaneval import HUMANEVAL
from kvjax.eval.tasks.own_questions import QUESTIONS
from kvjax.eval.tasks.ruler_questions import FILES, RULER_QUESTIONS
from kvjax.eval.tasks.xsum import XSUM
from kvjax.models.model import Model
from kvjax.utils.arguments import suggest_name

RECALL_TASKS = {
    "turns": "A conversation of recall questions about one context (after SCBench).",
    "shared": "The same questions, each asked of the context's own state (after SCBench).",
    "ruler.niah_single_1": "RULER: a number in repeated sentences.",
    "ruler.niah_single_2": "RULER: a number in a long text.",
    "ruler.niah_single_3": "RULER: a long value in a long text.",
    "ruler.niah_multikey_1": "RULER: one of four keys in a long text.",
    "ruler.niah_multikey_2": "RULER: one of many keys.",
    "ruler.niah_multikey_3": "RULER: one of very many or long keys.",
    "ruler.niah_multivalue": "RULER: all values of one key.",
    "ruler.niah_multiquery": "RULER: the values of four keys in one question.",
    "ruler.vt": "RULER: variable tracking along a chain of assignments.",
    "ruler.cwe": "RULER: the most common words.",
    "ruler.fwe": "RULER: the three most frequent words of a Zipf text.",
    "symbols.recall": "The shipped model: values of keys scattered in code or noise.",
    "symbols.copying": "The shipped model: how a run of symbols goes on.",
    "symbols.variables": "The shipped model: variable tracking, the whole chain.",
}
"""Tasks that exist as text and in the shipped model's symbols. RULER's names are those of its standard tasks; the two
that need a data set are in `RULER_QUESTIONS`."""


def _make_recall_cases(name: str, model: Model, spec: Spec) -> Iterator[Case]:
    if symbols.knows_symbols(model):
        return symbols.SYMBOL_TASKS[name].cases(name, spec)
    if name not in ruler.TASKS:
        similar = {"symbols.recall": "shared", "symbols.variables": "ruler.vt"}.get(name, "ruler")
        raise KvjaxError(f"task {name!r} is written in the shipped model's vocabulary; use {similar!r} instead")
    return ruler.TASKS[name].cases(name, model, spec)


SYNTHETIC: dict[str, Maker] = {
    "niah": haystack.niah,
    **{name: bind_maker(_make_recall_cases, name, doc) for name, doc in RECALL_TASKS.items()},
    "ppl": texts.ppl,
    "long_answer": texts.long_answer,
    **texts.COMPLETION,
}
"""The tasks that need no download."""

BENCHMARKS: dict[str, Maker] = {**XSUM, **QUESTIONS}
"""Tasks that are read from local files (`Spec.data`): XSUM, which lm-evaluation-harness lacks, and one's own."""


def makers() -> dict[str, Maker]:
    """Name -> maker of every task: first tasks without a download, then those of packages, then those of files."""
    return {**SYNTHETIC, **RULER_QUESTIONS, **ESSAYS, **HUMANEVAL, **BENCHMARKS}


def describe_tasks() -> dict[str, str]:
    """Name -> the first line of the maker's docstring."""
    return {name: (inspect.getdoc(maker) or "").partition("\n")[0] for name, maker in makers().items()}


def split_words(text: str) -> list[str]:
    """Splits a list at its commas; empty words are dropped. Raises KvjaxError where something else separates them."""
    words = [w.strip() for w in text.split(",") if w.strip()]
    if any(re.search(r"[\s;|+]", word) for word in words):
        written = ",".join(re.findall(r"[^\s;|+,]+", text))
        raise KvjaxError(f"{text!r:.200} is no list: commas separate its words; write {written!r:.200}")
    return words


def expand(names: str | Sequence[str], left_out: Callable[[str], None] | None = None) -> list[str]:
    """Returns task names, each once; a name like "ruler" stands for all "ruler.*" whose data are installed.

    Args:
      names: several, or a string in which commas separate them.
      left_out: called with a line for the tasks of a family whose package is not installed, which are then left out.

    Raises:
      KvjaxError: no name, or an unknown one; the message has the nearest known name.

    Warns:
      KvjaxWarning: tasks are left out, and there is no `left_out`.
    """
    known, names = list(makers()), split_words(names) if isinstance(names, str) else names
    expanded: list[str] = []
    for name in names or [""]:
        matches = [name] if name in known else [t for t in known if t.startswith(f"{name}.")]
        if not matches:
            families = dict.fromkeys(t.partition(".")[0] for t in known)
            nearest = suggest_name(name, [*families, *known])
            raise KvjaxError(f"unknown task {name!r}{nearest or ';'} `kvjax eval --list` lists them all")
        absent = [t for t in matches if t != name and t in FILES and FILES[t].find() is None]
        if absent and len(absent) < len(matches):
            note = f"left out: {', '.join(absent)}, whose questions are in a package: {FILES[absent[0]].install}"
            left_out(note) if left_out is not None else warnings.warn(note, KvjaxWarning, stacklevel=2)
            matches = [t for t in matches if t not in absent]
        expanded += matches
    return list(dict.fromkeys(expanded))


def cases(model: Model, names: Sequence[str], spec: Spec, left_out: Callable[[str], None] | None = None) -> list[Case]:
    """Returns the cases of all named tasks, in order.

    Args:
      model: the cases are in its vocabulary.
      names: task names, as `expand` takes them.
      spec: lengths, numbers and sources of the cases.
      left_out: called with a line for each task and length that do not fit together, which are then left out, and for
        each task whose prompts lack solved examples.

    Raises:
      KvjaxError: an unknown name, any error of a maker, a task that does not fit a length without `left_out`, or no
        task that fits any length.

    Warns:
      KvjaxWarning: prompts lack solved examples, and there is no `left_out`.
    """
    made = [case for name in expand(names, left_out) for case in _make_fitting_cases(name, model, spec, left_out)]
    if not made and left_out is not None:
        raise KvjaxError("no task fits in any of the lengths; use others, as the lines about what is left out say")
    for note in examples.missing_example_notes((case.task, case.about) for case in made):
        left_out(note) if left_out is not None else warnings.warn(note, KvjaxWarning, stacklevel=2)
    return made


def _make_fitting_cases(name: str, model: Model, spec: Spec, left_out: Callable[[str], None] | None) -> list[Case]:
    """Makes one task's cases of the lengths that it fits in."""
    maker = makers()[name]
    try:
        return list(maker(model, spec))
    except TooShort:
        if left_out is None:
            raise
    made: list[Case] = []
    for length in spec.lengths:
        try:
            made += maker(model, dataclasses.replace(spec, lengths=(length,)))
        except TooShort as e:
            left_out(f"left out: {e}")
    return made
