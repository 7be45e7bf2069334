"""The tasks that need no download, by name."""

from __future__ import annotations

from collections.abc import Iterator

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import haystack, ruler, symbols, texts
from kvjax.eval.tasks.case import Case, Maker, Spec
from kvjax.models.model import Model

MEANING = {
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


def _maker(name: str) -> Maker:
    def maker(model: Model, spec: Spec) -> Iterator[Case]:
        if symbols.knows_symbols(model):
            return symbols.FAMILIES[name].cases(name, spec)
        if name not in ruler.TASKS:
            raise KvjaxError(f"task {name!r} is written in the shipped model's vocabulary; use {_like(name)!r} instead")
        return ruler.TASKS[name].cases(name, model, spec)

    maker.__doc__ = MEANING[name]
    return maker


def _like(name: str) -> str:
    return {"symbols.recall": "shared", "symbols.variables": "ruler.vt"}.get(name, "ruler")


SYNTHETIC: dict[str, Maker] = {
    "niah": haystack.niah,
    **{name: _maker(name) for name in MEANING},
    "ppl": texts.ppl,
    "completion": texts.completion,
    "completion.exact": texts.completion_exact,
}
"""RULER's names are those of its standard tasks, without the two that need a data set."""
