"""Questions of one's own about texts of one's own: the task `questions`, whose `Spec.data` is a file of JSON lines.

A line is {"text": FILE, "question": .., "answer": ..}: the file's path is relative to that of the questions, and an
answer is a text, or a list of texts of which any one will do. Questions about one text share its context.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.eval.tasks.case import Ask, Case, Maker, Spec, TooShort
from kvjax.eval.tasks.chat_format import chat_format
from kvjax.eval.tasks.data_files import read_json_lines
from kvjax.models.model import Model
from kvjax.utils import display
from kvjax.utils.files import read_text_file

FILE = "questions.jsonl"  # in a folder that `Spec.data` names
FIELDS = {"text": str, "question": str}
NEW_TOKENS = 64
FORM = '{"text": FILE, "question": "..", "answer": ".."}'


def questions(model: Model, spec: Spec) -> Iterator[Case]:
    """Your own questions about your own texts (`--data FILE`), by whether an answer contains the right one."""
    if spec.data is None:
        raise KvjaxError(f"the task questions needs `--data FILE`, a file of lines {FORM}")
    path, by_text = read_questions(spec.data)
    chat = chat_format(model, spec)
    written = "{}" if chat.is_chat else "Question: {}\nAnswer:"
    contexts = {name: chat.encode_context(_read_text(path.parent / name) + "\n\n") for name in by_text}
    asks = {
        name: tuple(
            Ask(
                chat.encode_question(written.format(row["question"])),
                *("contains_any", row["answer"], NEW_TOKENS),
                () if chat.is_chat else ("\n",),
            )
            for row in rows
        )
        for name, rows in by_text.items()
    }
    needed = {name: len(contexts[name]) + max(len(ask.prompt) for ask in asks[name]) for name in by_text}
    for length in spec.lengths:
        fitting = [name for name in by_text if needed[name] <= length]
        if not fitting:
            raise TooShort(
                f"none of the {display.count(len(by_text), 'text')} of {path} fits in {length} tokens with its "
                f"questions; use a length of at least {min(needed.values())}, and {max(needed.values())} for all"
            )
        if len(fitting) < len(by_text):
            warnings.warn(
                f"{len(by_text) - len(fitting)} of {len(by_text)} texts of {path} are longer than {length:,} tokens, "
                f"and their questions are not asked; a length of {max(needed.values()):,} has room for all",
                KvjaxWarning,
                stacklevel=2,
            )
        for name in fitting:
            yield Case("questions", f"questions/{length}/{name}", contexts[name], asks[name], about={"length": length})


def read_questions(data: Path | str) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Reads a file of questions, or that of a folder; returns its path, and the questions about each text.

    Raises:
      KvjaxError: there is no such file, it holds no question, or a line is none or has no answer.
    """
    path = Path(data)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise KvjaxError(f"there are no questions at {path}; give a file of lines {FORM}, or a folder with {FILE}")
    by_text: dict[str, list[dict[str, Any]]] = {}
    try:
        for row in read_json_lines(path, FIELDS, FILE):
            by_text.setdefault(row["text"], []).append(row | {"answer": _read_answers(row, path)})
    except KvjaxError as e:
        raise KvjaxError(f"{e}; each line is {FORM}") from e
    if not by_text:
        raise KvjaxError(f"{path} has no question; each line is {FORM}")
    return path, by_text


def _read_text(path: Path) -> str:
    text = read_text_file(path, "the text").rstrip()
    if not text:
        raise KvjaxError(f"{path} is empty, and a question is asked about it; give a file with some text")
    return text


def _read_answers(row: dict[str, Any], path: Path) -> tuple[str, ...]:
    answers = row.get("answer")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(x, str) and x.strip() for x in answers):
        raise KvjaxError(
            f"{path}: the question {row['question']!r:.60} needs an answer, a text or a list of texts, got "
            f"{row.get('answer')!r:.60}"
        )
    return tuple(x.strip() for x in answers)


QUESTIONS: dict[str, Maker] = {"questions": questions}
