"""XSUM (Narayan et al., 2018) from local files, with the prompt and the ROUGE of HELM (Liang et al., 2022).

test.jsonl holds lines {"document", "summary", "id"}; three examples of train.jsonl, if it is there, come first, the
first ones that HELM's filter admits. Or it holds H2O's lines {"article": a whole prompt, "summary_gt": a summary}.
Examples are left out until the prompt fits into `Spec.lengths`; what is still too long loses tokens in its middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kvjax.eval.tasks import examples
from kvjax.eval.tasks.case import Ask, Case, Maker, Spec
from kvjax.eval.tasks.data_files import Encoded, check_lengths, encode, folder, lines, maker
from kvjax.models.model import Model

SHOTS = 3  # H2O's; HELM's own default is 5
NEW_TOKENS = 64
STOP = ("###",)
WORDS = 512  # of a document; HELM cuts longer ones
QUESTION = "\n\nSummarize the above article in 1 sentence.\n"
FIELDS = {"document": str, "summary": str}
WHOLE = {"article": str, "summary_gt": str}
SOURCE = (
    "the test split, and for examples the train split, of the Hugging Face data set EdinburghNLP/xsum as JSON lines at "
    "DATA/xsum/test.jsonl and train.jsonl (or H2O's xsum_0shot.jsonl as test.jsonl)"
)


def make(rouge: str, model: Model, spec: Spec) -> Iterator[Case]:
    """The first `spec.contexts` test articles at each length; rouge: "1", "2" or "l"."""
    check_lengths(spec)
    directory = folder(spec, SOURCE) / "xsum"
    test, train = directory / "test.jsonl", directory / "train.jsonl"
    first = next(lines(test, {}, SOURCE), {})
    whole = "article" in first and "document" not in first
    rows = list(itertools.islice(lines(test, WHOLE if whole else FIELDS, SOURCE), spec.contexts))
    shots = []
    if train.is_file() and not whole:
        shots = list(itertools.islice(filter(_admitted, lines(train, FIELDS, SOURCE)), SHOTS))
    task = f"xsum.rouge_{rouge}"
    for length in spec.lengths:
        for i, row in enumerate(rows):
            text, encoded, n = _fitting(model, shots, row, length)
            context, question = encoded.split(text.rfind(QUESTION) if QUESTION in text else len(text))
            summary = row["summary_gt"] if whole else _clean(row["summary"])
            ask = Ask(question, f"rouge_xsum_{rouge}", (summary,), NEW_TOKENS, STOP)
            wanted = 0 if whole else SHOTS  # H2O's prompts bring theirs
            about = {"length": length, **examples.shots(n, wanted, len(shots), train, length)}
            yield Case(task, f"{task}/{length}/{i}", context, (ask,), about=about)


def prompt(shots: Sequence[dict], row: dict) -> str:
    """Examples with their summaries, and the article."""
    if "document" not in row:
        return row["article"]

    def article(r: dict[str, str]) -> str:
        return f"###\nArticle: {_clean(r['document'], WORDS)}{QUESTION}"

    return "".join(f"{article(s)}{_clean(s['summary'])}\n\n" for s in shots) + article(row)


def _fitting(model: Model, shots: Sequence[dict], row: dict, length: int) -> tuple[str, Encoded, int]:
    """(text, its ids, shots) with as many of the first shots as fit."""
    for n in range(len(shots), -1, -1):
        text = prompt(shots[:n], row)
        encoded = encode(model, text)
        if len(encoded.ids) <= length:
            break
    return text, encoded.without_middle(length, 0, len(text)), n


def _clean(text: str, words: int | None = None) -> str:
    """Words with single spaces, the first so many."""
    return " ".join(text.split()[:words])


def _admitted(row: dict) -> bool:
    """HELM's filter of examples: articles of 50 to 150 words, no page furniture, a summary of fitting length."""
    document, summary = len(_clean(row["document"], WORDS).split()), len(row["summary"].split())
    furniture = ("Media playback is unsupported on your device", "Last updated at")
    admitted = 50 <= document <= 150 and 10 < summary <= 0.2 * document
    return admitted and not any(f in row["document"] for f in furniture)


XSUM: dict[str, Maker] = {
    f"xsum.rouge_{r}": maker(make, r, f"XSUM from local files, 3-shot: ROUGE-{r.upper()}.") for r in ("1", "2", "l")
}
