"""XSUM (Narayan et al., 2018) from local files, with the prompt and the ROUGE of HELM (Liang et al., 2022).

test.jsonl holds lines {"document", "summary", "id"}; three examples of train.jsonl, if it is there, come first, the
first ones that HELM's filter admits. Or it holds H2O's lines {"article": a whole prompt, "summary_gt": a summary}.
Examples are left out until the prompt fits into `Spec.lengths`; a prompt that is still too long loses its middle.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvjax.eval.tasks.case import Ask, Case, Maker, Spec, bind_maker, check_lengths
from kvjax.eval.tasks.data_files import read_json_lines
from kvjax.eval.tasks.examples import describe_examples, fit_examples
from kvjax.models.model import Model

NUM_EXAMPLES = 3  # H2O's; HELM's own default is 5
NEW_TOKENS = 64
STOP = ("###",)
DOCUMENT_WORDS = 512  # HELM cuts longer documents
QUESTION = "\n\nSummarize the above article in 1 sentence.\n"
FIELDS = {"document": str, "summary": str}
PROMPT_FIELDS = {"article": str, "summary_gt": str}
SOURCE = (
    "the test split, and for examples the train split, of the Hugging Face data set EdinburghNLP/xsum as JSON lines at "
    "DATA/xsum/test.jsonl and train.jsonl (or H2O's xsum_0shot.jsonl as test.jsonl)"
)


def make(rouge: str, model: Model, spec: Spec) -> Iterator[Case]:
    """Makes the first `spec.contexts` test articles at each length; rouge: "1", "2" or "l"."""
    check_lengths(spec)
    directory = Path(spec.data or "DATA") / "xsum"
    test, train = directory / "test.jsonl", directory / "train.jsonl"
    first = next(read_json_lines(test, {}, SOURCE), {})
    has_prompts = "article" in first and "document" not in first
    fields = PROMPT_FIELDS if has_prompts else FIELDS
    rows = list(itertools.islice(read_json_lines(test, fields, SOURCE), spec.contexts))
    examples = []
    if train.is_file() and not has_prompts:
        examples = list(itertools.islice(filter(_passes_filter, read_json_lines(train, FIELDS, SOURCE)), NUM_EXAMPLES))
    task = f"xsum.rouge_{rouge}"
    for length, (i, row) in itertools.product(spec.lengths, enumerate(rows)):
        num_used, text, encoded = fit_examples(model, examples, functools.partial(make_prompt, row=row), length)
        encoded = encoded.truncate_middle(length)
        context, question = encoded.split(text.rfind(QUESTION) if QUESTION in text else len(text))
        summary = row["summary_gt"] if has_prompts else _first_words(row["summary"])
        ask = Ask(question, f"rouge_xsum_{rouge}", (summary,), NEW_TOKENS, STOP)
        num_wanted = 0 if has_prompts else NUM_EXAMPLES  # H2O's prompts bring their examples
        about = {"length": length, **describe_examples(num_used, num_wanted, len(examples), train, length)}
        yield Case(task, f"{task}/{length}/{i}", context, (ask,), about=about)


def make_prompt(examples: Sequence[dict], row: dict) -> str:
    """Joins examples with their summaries, and the article."""
    if "document" not in row:
        return row["article"]

    def article(row: dict[str, str]) -> str:
        return f"###\nArticle: {_first_words(row['document'], DOCUMENT_WORDS)}{QUESTION}"

    return "".join(f"{article(s)}{_first_words(s['summary'])}\n\n" for s in examples) + article(row)


def _first_words(text: str, num_words: int | None = None) -> str:
    """The first words, with single spaces between them."""
    return " ".join(text.split()[:num_words])


def _passes_filter(row: dict) -> bool:
    """HELM's filter of examples: articles of 50 to 150 words, no page furniture, a summary of fitting length."""
    document, summary = len(_first_words(row["document"], DOCUMENT_WORDS).split()), len(row["summary"].split())
    furniture = ("Media playback is unsupported on your device", "Last updated at")
    has_fitting_lengths = 50 <= document <= 150 and 10 < summary <= 0.2 * document
    return has_fitting_lengths and not any(f in row["document"] for f in furniture)


XSUM: dict[str, Maker] = {
    f"xsum.rouge_{r}": bind_maker(make, r, f"XSUM from local files, 3-shot: ROUGE-{r.upper()}.")
    for r in ("1", "2", "l")
}
