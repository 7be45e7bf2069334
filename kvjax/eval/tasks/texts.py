"""Tasks of plain text: perplexity, one long answer, and code completion."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import symbols
from kvjax.eval.tasks.case import Ask, Case, Maker, Spec, bind_maker, check_lengths
from kvjax.eval.tasks.encoding import context_ids, find_largest, prompt_ids
from kvjax.models.model import Model

PREDICTED_TOKENS = 256  # after a context, or as many as the context has if these are fewer
LINE_CHARACTERS = range(12, 81)  # of a line to complete, without its indentation
NEW_TOKENS = 64  # of a completed line, as LongBench allows for LCC
NEW_BYTES = 96  # the same for the shipped model, whose tokens are bytes
CODE = re.compile(r"[^#].*[A-Za-z_]{3}.*[=(\[.:]")
COMPLETE, NEXT = "Please complete the code given below. \n", "Next line of code:\n"  # LongBench's prompt of LCC


def ppl(model: Model, spec: Spec) -> Iterator[Case]:
    """Sliding perplexity: tokens predicted after contexts at even distances in a text, in bits per byte."""
    return _cut_windows("ppl", model, spec, lambda length: (length, min(PREDICTED_TOKENS, length)))


def long_answer(model: Model, spec: Spec) -> Iterator[Case]:
    """One long answer: the second half of a text after its first half, token by token, in bits per byte."""
    check_lengths(spec)
    return _cut_windows("long_answer", model, spec, lambda length: (length // 2, length - length // 2))


def _cut_windows(task: str, model: Model, spec: Spec, divide: Callable[[int], tuple[int, int]]) -> Iterator[Case]:
    """Cuts windows of a text; `divide` gives the tokens of a context and of what follows it for each length."""
    make_windows = _byte_windows if symbols.knows_symbols(model) else _text_windows
    for length in spec.lengths:
        context, num_predicted = divide(length)
        windows, num_tokens = make_windows(model, spec, context, num_predicted)
        if not windows:
            # The tokens of both together grow with the length, so the longest that fits is found by bisection.
            longest = bisect.bisect_right(range(1, num_tokens + 1), num_tokens, key=lambda n: sum(divide(n)))
            raise _too_few_tokens(spec, num_tokens, f"{context:,} with {num_predicted} to predict", longest)
        for start, ids, num_bytes in windows:
            # The key has the window's place: its number depends on how many windows there are.
            key, about = f"{task}/{length}/{start}", {"length": length}
            yield Case(task, key, ids[:context], follows=ids[context:], bytes=num_bytes, about=about)


def _too_few_tokens(spec: Spec, num_tokens: int, context: str, most: int) -> KvjaxError:
    name = "the held-out source code" if spec.text is None else f"--text {spec.text}"
    return KvjaxError(
        f"{name} has {num_tokens:,} tokens, too few for a context of {context}; "
        f"use a length of at most {max(most, 1):,}, or a longer --text"
    )


Windows = tuple[list[tuple[int, np.ndarray, int]], int]
"""(place in the text, ids i32[length + num_predicted], bytes of the predicted ones) of each window, and the tokens of a
too short text."""


def _byte_windows(model: Model, spec: Spec, length: int, num_predicted: int) -> Windows:
    """Windows for the shipped model."""
    tokens, total = symbols.source_tokens(spec), length + num_predicted
    num_windows = len(tokens) // total
    # Even distances over the whole text, and no two windows overlap.
    starts = np.linspace(0, num_windows - 1, min(spec.contexts, num_windows)).astype(int) * total
    windows = [(int(start), tokens[start : start + total].astype(np.int32)) for start in starts]
    # Markers between files are tokens, but no bytes of the text.
    return [(start, ids, int((ids[length:] < 256).sum())) for start, ids in windows], len(tokens)


def _text_windows(model: Model, spec: Spec, length: int, num_predicted: int) -> Windows:
    """Windows for other models: each opens as the tokenizer opens a text, and starts at a line or within a long one."""
    text, tokenizer, total = symbols.read_source(spec), model.text_tokenizer(), length + num_predicted
    span = total  # characters, grown until every window has its tokens
    while True:
        span = min(span, len(text))
        num_windows = min(spec.contexts, len(text) // span)
        windows = []
        for place in np.linspace(0, len(text) - span, num_windows).astype(int).tolist():
            start = text.rfind("\n", max(place - span, 0), place) + 1
            if start == 0 and place >= span:
                # The line is longer than a window; at its start, two windows of it would be the same.
                start = place
            encoding = tokenizer.prompt_encoding(text[start : start + span], parse_special=False)
            if len(encoding.ids) <= total:  # one more than needed, since the cut may have changed the last token
                break
            predicted = text[start + encoding.offsets[length][0] : start + encoding.offsets[total][0]]
            windows.append((start, np.array(encoding.ids[:total], np.int32), len(predicted.encode())))
        else:
            return windows, 0
        if span == len(text):
            return [], len(encoding.ids) - 1
        span = span * 3 // 2


def make_completion(task: str, model: Model, spec: Spec) -> Iterator[Case]:
    """Makes the cases of "completion" or "completion.exact", which differ in the metric and have the same instances."""
    metric, stop = ("edit_similarity", ()) if task == "completion" else ("exact", ("\n",))
    has_symbols = symbols.knows_symbols(model)
    cut = _byte_context if has_symbols else _text_context
    lines = symbols.read_source(spec).splitlines(keepends=True)
    stripped = [line.strip() for line in lines]
    # No comment, neither very short nor very long, with a name and a sign.
    candidates = [i for i, x in enumerate(stripped) if i and len(x) in LINE_CHARACTERS and CODE.match(x)]
    if not candidates:
        raise KvjaxError(f"--text {spec.text} has no line of code to complete; give a file of source code")
    for length, i in itertools.product(spec.lengths, range(spec.contexts)):
        # Both tasks share this stream, so that both metrics score the same instances.
        target = int(symbols.instance_generator(spec, "completion", length, i).choice(candidates))
        context, prompt, is_enough = cut(model, lines, target, length)
        if not is_enough:
            raise _too_few_tokens(spec, len(context), f"{length:,}", len(context))
        reference = lines[target].strip() if metric == "exact" else lines[target].rstrip()
        ask = Ask(prompt, metric, (reference,), NEW_BYTES if has_symbols else NEW_TOKENS, stop)
        yield Case(task, f"{task}/{length}/{i}", context, (ask,), about={"length": length})


def _lines_before(lines: Sequence[str], target: int, n: int) -> str:
    """The n lines before the target; the text's last lines go before its first ones."""
    return "".join(lines[(target - n + j) % len(lines)] for j in range(n))


def _text_context(model: Model, lines: Sequence[str], target: int, length: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """(context, prompt, whether there were more lines): the lines that fit into `length` tokens with the prompt."""
    tokenizer = model.text_tokenizer()
    prompt = prompt_ids(tokenizer, NEXT)

    def encode_lines(n: int) -> np.ndarray:
        return context_ids(tokenizer, COMPLETE + _lines_before(lines, target, n))

    n = find_largest("completion", lambda n: len(encode_lines(n)), length, 1, len(lines) - 1, len(prompt))
    return encode_lines(n), prompt, n < len(lines) - 1


def _byte_context(model: Model, lines: Sequence[str], target: int, length: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """The same for the shipped model: exactly `length` bytes, and the line before the target."""
    prompt, n = lines[(target - 1) % len(lines)].encode(), 1
    while len(before := _lines_before(lines, target - 1, n).encode()) < length and n < len(lines) - 2:
        n = min(4 * n, len(lines) - 2)
    context, question = (np.frombuffer(x, np.uint8).astype(np.int32) for x in (before[-length:], prompt))
    return context, question, len(before) >= length


COMPLETION: dict[str, Maker] = {
    task: bind_maker(
        make_completion, task, f"The next line of source code ({metric} with the true one), in the manner of LCC."
    )
    for task, metric in (("completion", "edit_similarity"), ("completion.exact", "exact"))
}
