"""GSM8K (Cobbe et al., 2021) from local files, in the format of lm-evaluation-harness's task gsm8k (version 3).

Eight solved examples, as in KCache's Table 2, or as many as `Spec.lengths` has room for, are the context, and the
question follows. They are the first of train.jsonl, where lm-evaluation-harness draws them at random.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import examples
from kvjax.eval.tasks.case import Ask, Case, Maker, Spec, TooShort
from kvjax.eval.tasks.data_files import Encoded, encode, folder, lines, maker
from kvjax.models.model import Model

SHOTS = 8
NEW_TOKENS = 256
STOP = ("Question:", "</s>", "<|im_end|>")
FIELDS = {"question": str, "answer": str}
SOURCE = (
    "test.jsonl, and for solved examples train.jsonl, of grade_school_math/data in the GitHub repository "
    "openai/grade-school-math at DATA/gsm8k/"
)


def make(metric: str, model: Model, spec: Spec) -> Iterator[Case]:
    """The first `spec.contexts` test questions at each length, scored by "gsm8k_strict" or "gsm8k_flexible"."""
    directory = folder(spec, SOURCE) / "gsm8k"
    train = directory / "train.jsonl"
    shots = list(itertools.islice(lines(train, FIELDS, SOURCE), SHOTS)) if train.is_file() else []
    rows = list(itertools.islice(lines(directory / "test.jsonl", FIELDS, SOURCE), spec.contexts))
    task = metric.replace("_", ".")
    for length in spec.lengths:
        for i, row in enumerate(rows):
            if "#### " not in row["answer"]:
                raise KvjaxError(f"answer {i} of {directory / 'test.jsonl'} has no line '#### number'")
            encoded, n, at = _fitting(model, shots, row["question"], length)
            context, question = encoded.split(at)
            ask = Ask(question, metric, (row["answer"],), NEW_TOKENS, STOP)
            about = {"length": length, **examples.shots(n, SHOTS, len(shots), train, length)}
            yield Case(task, f"{task}/{length}/{i}", context, (ask,), about=about)


def prompt(shots: Sequence[dict], question: str) -> str:
    """Solved examples and the question."""
    solved = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in shots)
    return f"{solved}Question: {question}\nAnswer:"


def _fitting(model: Model, shots: Sequence[dict], question: str, length: int) -> tuple[Encoded, int, int]:
    """(ids, shots, where what is asked begins) with as many of the first shots as fit; raises if none do."""
    for n in range(len(shots), -1, -1):
        text = prompt(shots[:n], question)
        encoded = encode(model, text)
        if len(encoded.ids) <= length:
            return encoded, n, len(text) - len(prompt((), question) if n else "\nAnswer:")
    raise TooShort(
        f"length {length} is too short: the question {question!r:.60} alone takes {len(encoded.ids)} tokens; raise it"
    )


GSM8K: dict[str, Maker] = {
    "gsm8k.strict": maker(make, "gsm8k_strict", "GSM8K from local files, 8-shot: the number after '#### '."),
    "gsm8k.flexible": maker(make, "gsm8k_flexible", "GSM8K from local files, 8-shot: the last number."),
}
