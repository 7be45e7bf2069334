"""Questions about needles in a text as instances of `kvjax.testbed.tasks`, for models without the symbols vocabulary.

Facts and questions are the evaluation's, through the model's chat template if it has one; each question ends with the
first words of its answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

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
"""Tasks whose answer is one value that continues the question, with the same number of questions in all contexts."""
QUESTIONS = 4  # per context, for tasks with several


def select_tasks(model: Model, names: Sequence[str], known: Collection[str] = tuple(tasks.TASKS)) -> list[str]:
    """Selects the tasks of `names` that fit the model: `known` ones for the shipped model, TASKS for all others.

    Raises:
      KvjaxError: for a name that is neither.
    """
    unknown = [name for name in names if name not in (*known, *TASKS)]
    if unknown:
        raise KvjaxError(f"unknown task {unknown[0]!r}; use {', '.join((*known, *TASKS))}")
    fitting = known if knows_symbols(model) else TASKS
    return [name for name in names if name in fitting]


def in_text(args: argparse.Namespace, model: Model, task: str) -> list[tasks.Instance]:
    """Makes `args.contexts` instances of one of TASKS in `args.text`, at most `args.length` tokens with a question."""
    spec = Spec((args.length,), args.contexts, QUESTIONS, seed=args.seed, text=args.text)
    frame = chat_format(model, spec)
    # The template's words around a later question; "What" stands for any question, and cancels out.
    first, later = (frame.encode_question("What", is_first=is_first) for is_first in (True, False))
    between = later[: len(later) - len(first)]  # the template's tokens between an answer and the next question

    def to_instance(case: Case) -> tasks.Instance:
        found = (tasks.Question(ask.prompt, reference_ids(model, ask), ask.about["depth"]) for ask in case.asks)
        return tasks.Instance(case.task, case.context, tuple(found), between)

    return [to_instance(case) for case in suite.cases(model, [task], spec)]
