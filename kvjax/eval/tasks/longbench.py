"""LongBench (Bai et al., 2024) from local files: the 16 English and code tasks, official prompts, lengths and metrics.

The context is everything up to the end of the slot {context}; what follows is the question. Together they are the
official prompt, truncated from the middle to `Spec.lengths` tokens. There are two small differences from the official
script. It decodes the two halves of a truncated prompt and encodes them again, here they are joined as ids. And on
samsum it never lets a line break come first, here the first line that is not empty is scored, as on trec and triviaqa.

A chat model needs its template: DATA/longbench/chat.txt, such as "[INST]{prompt}[/INST]", goes round the prompts of all
tasks but trec, triviaqa, samsum, lcc and repobench-p, as in the official script.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

from kvjax.errors import KvjaxError
from kvjax.eval.tasks.case import Ask, Case, Maker, Spec
from kvjax.eval.tasks.data_files import check_lengths, encode, folder, lines, maker
from kvjax.models.model import Model


@dataclasses.dataclass(frozen=True)
class Task:
    """A row of LongBench's config/dataset2prompt.json and dataset2maxlen.json, and of eval.py's table of metrics."""

    prompt: str
    new_tokens: int
    metric: str
    chat: bool = True  # whether a chat template goes round the prompt


PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
    "\n\nThe following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
    "\n\nQuestion: {input}\nAnswer:"
)

TASKS = {
    "narrativeqa": Task(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
        "Story: {context}\n\nNow, answer the question based on the story asconcisely as you can, using a single phrase "
        "if possible. Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": Task(
        "You are given a scientific article and a question. Answer the question as concisely as you can, using a "
        "single phrase or sentence if possible. If the question cannot be answered based on the information in the "
        'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
        "Do not provide any explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as "
        "concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
        'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
        '"no", or "unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:',
        128,
        "qa_f1",
    ),
    "multifieldqa_en": Task(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "hotpotqa": Task(PASSAGES, 32, "qa_f1"),
    "2wikimqa": Task(PASSAGES, 32, "qa_f1"),
    "musique": Task(PASSAGES, 32, "qa_f1"),
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": Task(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "trec": Task(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "classification_line",
        chat=False,
    ),
    "triviaqa": Task(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1_line",
        chat=False,
    ),
    "samsum": Task(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "rouge_l_line",
        chat=False,
    ),
    "passage_count": Task(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": Task(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        32,
        "retrieval",
    ),
    "lcc": Task(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "edit_similarity", chat=False
    ),
    "repobench-p": Task(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "edit_similarity",
        chat=False,
    ),
}

FIELDS = {"input": str, "context": str, "answers": list}
SOURCE = (
    "the file {task}.jsonl of the Hugging Face data set THUDM/LongBench (in its data.zip, folder data) at "
    "DATA/longbench/{task}.jsonl"
)


def make(task: str, model: Model, spec: Spec) -> Iterator[Case]:
    """The first `spec.contexts` examples of one task at each length; `spec.data` is DATA."""
    check_lengths(spec)
    source = SOURCE.format(task=task)
    directory = folder(spec, source) / "longbench"
    fields = FIELDS | ({"all_classes": list} if "classification" in TASKS[task].metric else {})
    rows = list(itertools.islice(lines(directory / f"{task}.jsonl", fields, source), spec.contexts))
    head, tail = _chat(directory / "chat.txt") if TASKS[task].chat else ("", "")
    for length in spec.lengths:
        for i, row in enumerate(rows):
            yield _case(task, i, row, model, length, head, tail)


def _case(task: str, i: int, row: dict, model: Model, length: int, head: str, tail: str) -> Case:
    about, t = {"length": length}, TASKS[task]
    before, after = t.prompt.split("{context}")
    before = head + before + row["context"]
    text = before + after.replace("{input}", row["input"])
    encoded = encode(model, text + tail).without_middle(length, len(head), len(text))
    context, question = encoded.split(len(before))
    if isinstance(row.get("length"), int):
        about["words"] = row["length"]  # by which LongBench-E groups
    key = f"longbench.{task}/{length}/{i}" + ("/chat" if head + tail else "")
    ask = Ask(question, t.metric, tuple(row["answers"]), t.new_tokens, options=tuple(row.get("all_classes") or ()))
    return Case(f"longbench.{task}", key, context, (ask,), about=about)


def _chat(path: Path) -> tuple[str, str]:
    """What goes before and after a prompt."""
    if not path.is_file():
        return "", ""
    text = path.read_text(encoding="utf-8").rstrip("\n")
    if text.count("{prompt}") != 1:
        raise KvjaxError(f"{path} must hold {{prompt}} once, as in '[INST]{{prompt}}[/INST]', got {text!r:.60}")
    head, _, tail = text.partition("{prompt}")
    return head, tail


LONGBENCH: dict[str, Maker] = {
    f"longbench.{task}": maker(make, task, f"LongBench from local files: {task}, scored by {TASKS[task].metric}.")
    for task in TASKS
}
