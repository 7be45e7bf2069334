"""Evaluation cases: a context with its questions, or with the text that follows it.

Inputs are token ids and outputs are text, so a task is the same for the shipped model, whose symbols are spelled
"<s17>", and for any real tokenizer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.models.model import Model
from kvjax.utils import arguments
from kvjax.utils.files import expand_user


@dataclasses.dataclass(frozen=True, eq=False)
class Ask:
    """One question: prompt ids i32[P] after the context, and how the text generated from it is scored."""

    prompt: np.ndarray
    metric: str  # a name in kvjax.eval.tasks.metrics.METRICS; its score is 0 (wrong) to 1 (right)
    references: tuple[str, ...]
    new_tokens: int
    stop: tuple[str, ...] = ()  # the answer ends before the first of these; a model's own end tokens always end it
    options: tuple[str, ...] = ()  # all classes, where the metric is of classification
    about: Mapping[str, float | int | str] = dataclasses.field(default_factory=dict)  # e.g. {"depth": 0.5}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One context i32[S] and its questions, or the tokens that follow it in a text."""

    task: str  # "niah", "ruler.vt", "xsum.rouge_1", ...
    key: str  # unique among all cases that a task can make, and the same in every run: it names the instance
    context: np.ndarray
    asks: tuple[Ask, ...] = ()
    # False: each question is asked of the context's own state, as if it were the first. True: a conversation, the first
    # question ends the prompt (so that a method sees it when it compresses), the others follow on the same state.
    turns: bool = False
    follows: np.ndarray | None = None  # i32[T], predicted token by token (teacher-forced); then there are no asks
    bytes: int = 0  # of the text of `follows`, so that models with different tokenizers compare
    about: Mapping[str, float | int | str] = dataclasses.field(default_factory=dict)  # {"length": 2048, "depth": 0.5}


def take_first(cases: Iterable[Case], count: int) -> list[Case]:
    """Takes the first `count` cases of each task and length."""
    groups: dict[tuple[str, object], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.task, case.about.get("length")), []).append(case)
    return [case for group in groups.values() for case in group[:count]]


class TooShort(KvjaxError):
    """The task does not fit in a context of this length, or does not fill it."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and sources of the cases that a run asks every task for."""

    lengths: tuple[int, ...] = (1024,)  # tokens of a context, the template around it included
    contexts: int = 8  # cases per task and length (and depth)
    questions: int = 4  # per context, where a task can ask several
    depths: int = 5  # of a needle, evenly from 0 to 1
    seed: int = 0
    text: Path | str | None = None  # a file, or "essays": for perplexity and haystacks (default: source code)
    data: Path | str | None = None  # the folder with the files of public benchmarks
    chat: bool | None = None  # questions go through the chat template (None: where the model has one)

    def __post_init__(self):
        if not isinstance(self.lengths, Sequence) or not len(self.lengths):
            raise KvjaxError(
                f"lengths are one number of tokens or more, as in lengths=(1024,), got {self.lengths!r:.80}"
            )
        for length in self.lengths:
            arguments.integer("a length", length)
        for name, least in (("contexts", 1), ("questions", 1), ("depths", 0)):
            arguments.integer(name, getattr(self, name), least)
        arguments.integer("seed", self.seed, 0, 2**64 - 1)
        for name in ("text", "data"):
            path = getattr(self, name)
            object.__setattr__(self, name, None if path is None else expand_user(path))


Maker = Callable[[Model, Spec], Iterable[Case]]
"""Makes the cases of one task for a model: a pure function, the same whenever it is called."""


def bind_maker(make: Callable[[str, Model, Spec], Iterator[Case]], name: str, doc: str) -> Maker:
    """Returns the maker of one of the tasks that `make` can make; `doc` is its line in lists of tasks."""
    maker = functools.partial(make, name)
    maker.__doc__ = doc
    return maker


def check_lengths(spec: Spec, least: int = 16) -> None:
    """Raises TooShort for a length that leaves no room for any prompt."""
    for length in spec.lengths:
        if length < least:
            raise TooShort(f"length {length} is too short for a prompt of this task; use {least} tokens or more")
