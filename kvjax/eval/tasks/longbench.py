"""LongBench (Bai et al., 2024) from local files: the 16 English and code tasks, official prompts, lengths and metrics.

The context is everything up to the end of the placeholder {context}; the rest is the question. Together they are the
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
from kvjax.eval.tasks.case import Ask, Case, Maker, Spec, bind_maker, check_lengths
from kvjax.eval.tasks.data_files import read_json_lines
from kvjax.eval.tasks.encoding import encode_prompt
from kvjax.models.model import Model
from kvjax.utils.files import read_text_file


@dataclasses.dataclass(frozen=True)
class LongBenchTask:
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
    "narrativeqa": LongBenchTask(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
        "Story: {context}\n\nNow, answer the question based on the story asconcisely as you can, using a single phrase "
        "if possible. Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": LongBenchTask(
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
    "multifieldqa_en": LongBenchTask(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "hotpotqa": LongBenchTask(PASSAGES, 32, "qa_f1"),
    "2wikimqa": LongBenchTask(PASSAGES, 32, "qa_f1"),
    "musique": LongBenchTask(PASSAGES, 32, "qa_f1"),
    "gov_report": LongBenchTask(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": LongBenchTask(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": LongBenchTask(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "trec": LongBenchTask(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "classification_line",
        chat=False,
    ),
    "triviaqa": LongBenchTask(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1_line",
        chat=False,
    ),
    "samsum": LongBenchTask(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "rouge_l_line",
        chat=False,
    ),
    "passage_count": LongBenchTask(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": LongBenchTask(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        32,
        "retrieval",
    ),
    "lcc": LongBenchTask(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "edit_similarity", chat=False
    ),
    "repobench-p": LongBenchTask(
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
    """Makes the first `spec.contexts` examples of one task at each length; `spec.data` is DATA."""
    check_lengths(spec)
    settings, source = TASKS[task], SOURCE.format(task=task)
    directory = Path(spec.data or "DATA") / "longbench"
    fields = FIELDS | ({"all_classes": list} if "classification" in settings.metric else {})
    rows = list(itertools.islice(read_json_lines(directory / f"{task}.jsonl", fields, source), spec.contexts))
    head, tail, chat = "", "", directory / "chat.txt"
    if settings.chat and chat.is_file():
        template = read_text_file(chat, "--data").rstrip("\r\n")
        if template.count("{prompt}") != 1:
            raise KvjaxError(f"{chat} must hold {{prompt}} once, as in '[INST]{{prompt}}[/INST]', got {template!r:.60}")
        head, _, tail = template.partition("{prompt}")
    before, after = settings.prompt.split("{context}")
    for length, (i, row) in itertools.product(spec.lengths, enumerate(rows)):
        context_text = head + before + row["context"]
        text = context_text + after.replace("{input}", row["input"])
        encoded = encode_prompt(model, text + tail).truncate_middle(length, len(head), len(text))
        context, question = encoded.split(len(context_text))
        about = {"length": length}
        if isinstance(row.get("length"), int):
            about["words"] = row["length"]  # by which LongBench-E groups
        options = tuple(row.get("all_classes") or ())
        ask = Ask(question, settings.metric, tuple(row["answers"]), settings.new_tokens, options=options)
        # The template changes the case, and a key names one instance.
        key = f"longbench.{task}/{length}/{i}" + ("/chat" if head + tail else "")
        yield Case(f"longbench.{task}", key, context, (ask,), about=about)


LONGBENCH: dict[str, Maker] = {
    f"longbench.{task}": bind_maker(make, task, f"LongBench from local files: {task}, scored by {TASKS[task].metric}.")
    for task in TASKS
}
