"""Questions about needles in a text, as instances of `kvjax.testbed.tasks`: for models that know no symbols.

Facts and questions are those of the evaluation's tasks, through the model's chat template where it has one. The scripts
compare an answer token by token, so its tokens are made here; each question ends with the first words of its answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

import numpy as np

from kvjax import KvjaxError, Model
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Ask, Case, Spec
from kvjax.eval.tasks.frame import framed
from kvjax.eval.tasks.symbols import knows_symbols
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import tasks

SINGLES = tuple(f"ruler.niah_single_{i}" for i in (1, 2, 3))
MULTIKEYS = tuple(f"ruler.niah_multikey_{i}" for i in (1, 2))
TASKS = ("shared", *SINGLES, *MULTIKEYS)
"""Those whose answer is one value that goes on from the question, and whose contexts are asked equally many."""
QUESTIONS = 4  # per context, of a task that can ask several


def asked(model: Model, names: Sequence[str], known: Collection[str] = tuple(tasks.TASKS)) -> list[str]:
    """Those tasks of `names` that the model can be asked: `known` ones only the shipped model, TASKS all others.

    Raises KvjaxError for a name that is neither.
    """
    unknown = [name for name in names if name not in (*known, *TASKS)]
    if unknown:
        raise KvjaxError(f"unknown task {unknown[0]!r}; use {', '.join((*known, *TASKS))}")
    fitting = known if knows_symbols(model) else TASKS
    return [name for name in names if name in fitting]


def in_text(args: argparse.Namespace, model: Model, task: str) -> list[tasks.Instance]:
    """`args.contexts` instances of one of TASKS in `args.text`, of at most `args.length` tokens with a question."""
    spec = Spec((args.length,), args.contexts, QUESTIONS, seed=args.seed, text=args.text)
    frame = framed(model, spec)
    first, later = (frame.question("What", turn=turn) for turn in (0, 1))
    between = later[: len(later) - len(first)]
    return [_instance(case, frame.tokenizer, between) for case in suite.cases(model, [task], spec)]


def _instance(case: Case, tokenizer: Tokenizer, between: np.ndarray) -> tasks.Instance:
    questions = tuple(_question(ask, tokenizer) for ask in case.asks)
    return tasks.Instance(case.task, case.context, questions, between)


def _question(ask: Ask, tokenizer: Tokenizer) -> tasks.Question:
    (value,) = ask.references
    return tasks.Question(ask.prompt, _behind_a_word(value, tokenizer), ask.about["depth"])


def _behind_a_word(value: str, tokenizer: Tokenizer) -> np.ndarray:
    """The ids i32[T] of a space and a value, as they go on from a question that ends in "is"."""
    word, whole = (tokenizer.encode(text, special_tokens=False) for text in ("is", f"is {value}"))
    return np.array(whole[len(word) :], np.int32)
