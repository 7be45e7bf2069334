"""GSM8K (Cobbe et al., 2021) from local files, in the format of lm-evaluation-harness's task gsm8k (version 3).

Eight solved examples, as in KCache's Table 2, or as many as `Spec.lengths` has room for, are the context, and the
question follows. The examples are the first of train.jsonl; lm-evaluation-harness draws them at random.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvjax.errors import KvjaxError
from kvjax.eval.tasks.case import Ask, Case, Maker, Spec, TooShort, bind_maker
from kvjax.eval.tasks.data_files import read_json_lines
from kvjax.eval.tasks.examples import describe_examples, fit_examples
from kvjax.models.model import Model

NUM_EXAMPLES = 8
NEW_TOKENS = 256
STOP = ("Question:", "</s>", "<|im_end|>")
FIELDS = {"question": str, "answer": str}
SOURCE = (
    "test.jsonl, and for solved examples train.jsonl, of grade_school_math/data in the GitHub repository "
    "openai/grade-school-math at DATA/gsm8k/"
)


def make(metric: str, model: Model, spec: Spec) -> Iterator[Case]:
    """Makes the first `spec.contexts` test questions at each length, for "gsm8k_strict" or "gsm8k_flexible"."""
    directory = Path(spec.data or "DATA") / "gsm8k"
    train, test = directory / "train.jsonl", directory / "test.jsonl"
    examples = []
    if train.is_file():
        examples = list(itertools.islice(read_json_lines(train, FIELDS, SOURCE), NUM_EXAMPLES))
    rows = list(itertools.islice(read_json_lines(test, FIELDS, SOURCE), spec.contexts))
    task = metric.replace("_", ".")
    for length, (i, row) in itertools.product(spec.lengths, enumerate(rows)):
        if "#### " not in row["answer"]:
            raise KvjaxError(f"answer {i} of {test} has no line '#### number'")
        make_text = functools.partial(make_prompt, question=row["question"])
        num_used, text, encoded = fit_examples(model, examples, make_text, length)
        if len(encoded.ids) > length:
            raise TooShort(
                f"length {length} is too short: the question {row['question']!r:.60} alone takes {len(encoded.ids)} "
                "tokens; raise it"
            )
        # A context must not be empty: without examples it is the question, and "Answer:" is asked.
        asked = make_prompt((), row["question"]) if num_used else "\nAnswer:"
        context, question = encoded.split(len(text) - len(asked))
        ask = Ask(question, metric, (row["answer"],), NEW_TOKENS, STOP)
        about = {"length": length, **describe_examples(num_used, NUM_EXAMPLES, len(examples), train, length)}
        yield Case(task, f"{task}/{length}/{i}", context, (ask,), about=about)


def make_prompt(examples: Sequence[dict], question: str) -> str:
    """Joins solved examples and the question."""
    solved = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in examples)
    return f"{solved}Question: {question}\nAnswer:"


GSM8K: dict[str, Maker] = {
    "gsm8k.strict": bind_maker(make, "gsm8k_strict", "GSM8K from local files, 8-shot: the number after '#### '."),
    "gsm8k.flexible": bind_maker(make, "gsm8k_flexible", "GSM8K from local files, 8-shot: the last number."),
}
