"""Questions about needles in a text, as instances of `kvjax.testbed.tasks`: for models that know no symbols.

Facts and questions are those of the evaluation's tasks, through the model's chat template where it has one; each
question ends with the first words of its answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

import numpy as np

from kvjax import KvjaxError, Model
from kvjax.eval.run.harness import reference_ids
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Case, Spec
from kvjax.eval.tasks.chat_format import chat_format
from kvjax.eval.tasks.symbols import knows_symbols
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
    frame = chat_format(model, spec)
    first, later = (frame.encode_question("What", is_first=is_first) for is_first in (True, False))
    between = later[: len(later) - len(first)]
    return [_instance(model, case, between) for case in suite.cases(model, [task], spec)]


def _instance(model: Model, case: Case, between: np.ndarray) -> tasks.Instance:
    found = (tasks.Question(ask.prompt, reference_ids(model, ask), ask.about["depth"]) for ask in case.asks)
    return tasks.Instance(case.task, case.context, tuple(found), between)
