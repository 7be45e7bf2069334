"""Tasks of plain text (perplexity, code completion), and how texts become contexts and questions of tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import numpy as np
from tokenizers import Encoding

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import symbols
from kvjax.eval.tasks.case import Ask, Case, Spec, TooShort
from kvjax.generation.inputs import round_up
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import corpus

FOLLOWS = 256  # tokens predicted after a context, or as many as the context has if these are fewer
LINE = range(12, 81)  # characters of a line to complete, without its indentation
NEW_TOKENS = 64  # of a completed line, as LongBench allows for LCC
BYTES = 96  # the same for the shipped model, whose tokens are bytes
COMPLETE, NEXT = "Please complete the code given below. \n", "Next line of code:\n"  # LongBench's prompt of LCC


def encoded(tokenizer: Tokenizer, text: str, opening: bool, special: bool = False) -> Encoding:
    """A text as tokens, with or without those that open and close one.

    A "<s>" inside it is text as any other, or with `special` the token that is spelled so.
    """
    inner = tokenizer.inner
    before = inner.encode_special_tokens
    inner.encode_special_tokens = not special
    try:
        return inner.encode(text, add_special_tokens=opening)
    finally:
        inner.encode_special_tokens = before


def context_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """A text that opens a prompt, i32[S]: with the special tokens that go before it, without those that end a text."""
    found = encoded(tokenizer, text, opening=True)
    end = unended(found)
    return np.array(found.ids[:end] if end else found.ids, np.int32)


def unended(found: Encoding) -> int:
    """How many tokens stand before the special ones that end a text."""
    special = found.special_tokens_mask
    return next((i for i in range(len(special), 0, -1) if not special[i - 1]), 0)


def prompt_ids(tokenizer: Tokenizer, text: str, special: bool = False) -> np.ndarray:
    """A text that follows a line break, i32[P], without special tokens other than, with `special`, those in it.

    It is encoded after a line break that is then cut off, because many tokenizers put a space before the first word of
    a text. Where one token holds the break and more, the text is encoded alone, which may differ from encoding both
    parts together by that token.
    """
    found = encoded(tokenizer, "\n" + text, opening=False, special=special)
    first = next((i for i, (start, end) in enumerate(found.offsets) if start >= 1 and end > start), 0)
    if first and found.offsets[first][0] == 1:
        return np.array(found.ids[first:], np.int32)
    return np.array(encoded(tokenizer, text, opening=False, special=special).ids, np.int32)


def largest(cost: Callable[[int], int], limit: int, low: int, high: int = 2**40) -> int | None:
    """An n from low to high with cost(n) <= limit, the largest or one whose cost is within 0.5 % of the limit.

    None if cost(low) is above it. cost grows with n, nearly in proportion, so that interpolation needs few calls. Where
    it does not grow strictly, the result keeps the limit all the same.
    """
    at = cost(low)
    if at > limit:
        return None
    top = min(2 * low + 1, high)
    while (above := cost(top)) <= limit:
        if top == high:
            return high
        aim = top + int(1.1 * (limit - above) * (top - low) / max(1, above - at))
        low, at, top = top, above, min(max(aim, top + top // 8 + 1), 8 * top, high)
    for step in range(200):
        if top - low <= 1 or limit - at <= limit // 200:
            break
        guess = (low + top) // 2 if step % 5 == 4 else low + (limit - at) * (top - low) // (above - at)
        middle = min(max(guess, low + 1), top - 1)
        if (found := cost(middle)) <= limit:
            low, at = middle, found
        else:
            top, above = middle, found
    return low


def ppl(model: Model, spec: Spec) -> Iterator[Case]:
    """Sliding perplexity: tokens predicted after contexts at even distances in a text, in bits per byte."""
    for length in spec.lengths:
        follows = min(FOLLOWS, length)
        windows = _byte_windows if symbols.knows_symbols(model) else _text_windows
        for i, (ids, size) in enumerate(windows(model, spec, length, follows)):
            key, about = f"ppl/{length}/{i}", {"length": length}
            yield Case("ppl", key, ids[:length], follows=ids[length:], bytes=size, about=about)


def _too_short(spec: Spec, have: int, length: int, follows: int) -> KvjaxError:
    name = "the held-out source code" if spec.text is None else f"--text {spec.text}"
    most = max(have - FOLLOWS, have // 2, 1) if follows else have
    more = f" with {follows} to predict" if follows else ""
    return KvjaxError(
        f"{name} has {have:,} tokens, too few for a context of {length:,}{more}; "
        f"use a length of at most {most:,}, or a longer --text"
    )


def _byte_windows(model: Model, spec: Spec, length: int, follows: int) -> list[tuple[np.ndarray, int]]:
    if spec.text is None:
        tokens = corpus.load("held_out").tokens
    else:
        tokens = np.frombuffer(symbols.source(spec).encode(), np.uint8)
    total = length + follows
    whole = len(tokens) // total
    if not whole:
        raise _too_short(spec, len(tokens), length, follows)
    places = np.linspace(0, whole - 1, min(spec.contexts, whole)).astype(int) * total
    rows = [tokens[p : p + total].astype(np.int32) for p in places]
    return [(row, int((row[length:] < 256).sum())) for row in rows]


def _text_windows(model: Model, spec: Spec, length: int, follows: int) -> list[tuple[np.ndarray, int]]:
    """Each window is encoded from a line's start on, so it is opened as the tokenizer opens a text."""
    text, tokenizer, total = symbols.source(spec), model.text_tokenizer(), length + follows
    span = total  # characters, grown until every window has its tokens
    while True:
        span = min(span, len(text))
        n = min(spec.contexts, len(text) // span)
        found = []
        for start in (_line_start(text, int(p)) for p in np.linspace(0, len(text) - span, n)):
            row = encoded(tokenizer, text[start : start + span], opening=True)
            if len(row.ids) <= total:  # one more, since the cut may have changed the last
                break
            part = text[start + row.offsets[length][0] : start + row.offsets[total][0]]
            found.append((np.array(row.ids[:total], np.int32), len(part.encode())))
        else:
            return found
        if span == len(text):
            raise _too_short(spec, len(row.ids) - 1, length, follows)
        span = span * 3 // 2


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def complete(task: str, metric: str, stop: tuple[str, ...]) -> Callable[[Model, Spec], Iterator[Case]]:
    """The maker of code completion under a metric; the instances are the same under each."""

    def maker(model: Model, spec: Spec) -> Iterator[Case]:
        own = symbols.knows_symbols(model)
        cut = _byte_line if own else _text_line
        lines = tuple(symbols.source(spec).splitlines(keepends=True))
        for length in spec.lengths:
            for i in range(spec.contexts):
                target = _target(lines, symbols.generator(spec, "completion", length, i), spec)
                context, prompt = cut(model, spec, lines, target, length)
                ask = Ask(
                    prompt,
                    metric,
                    (lines[target].strip() if metric == "exact" else lines[target].rstrip(),),
                    BYTES if own else NEW_TOKENS,
                    stop,
                )
                yield Case(task, f"{task}/{length}/{i}", context, (ask,), about={"length": length})

    maker.__doc__ = f"The next line of source code ({metric} with the true one), in the manner of LCC."
    return maker


def _target(lines: tuple[str, ...], rng: np.random.Generator, spec: Spec) -> int:
    """A random line of code: no comment, neither very short nor very long, with a name and a sign."""
    good = _codelines(lines)
    if not len(good):
        raise KvjaxError(f"--text {spec.text} has no line of code to complete; give a file of source code")
    return int(rng.choice(good))


@functools.lru_cache(2)
def _codelines(lines: tuple[str, ...]) -> np.ndarray:
    code = re.compile(r"[^#].*[A-Za-z_]{3}.*[=(\[.:]")
    good = [i for i, x in enumerate(lines) if len(x.strip()) in LINE and code.match(x.strip()) and i]
    return np.array(good, int)


def _before(lines: tuple[str, ...], target: int, n: int) -> str:
    """The n lines before the target, round the start of the text if need be, where its last lines go before."""
    return "".join(lines[(target - n + j) % len(lines)] for j in range(n))


def _text_line(
    model: Model, spec: Spec, lines: tuple[str, ...], target: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """As many lines as fit into `length` tokens together with the prompt."""
    tokenizer = model.text_tokenizer()
    prompt = prompt_ids(tokenizer, NEXT)

    def cut(n: int) -> np.ndarray:
        return context_ids(tokenizer, COMPLETE + _before(lines, target, n))

    limit = length - len(prompt)
    n = largest(lambda n: len(cut(n)), limit, 1, len(lines) - 1)
    if n is None:
        enough = round_up((len(cut(1)) + len(prompt)) * 6 // 5, 32)
        raise TooShort(f"code completion does not fit in {length} tokens; use a length of at least {enough}")
    if n == len(lines) - 1:
        raise _too_short(spec, len(cut(n)), length, 0)
    return cut(n), prompt


def _byte_line(
    model: Model, spec: Spec, lines: tuple[str, ...], target: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Exactly `length` bytes, and the line before the target as the prompt."""
    prompt, n = lines[(target - 1) % len(lines)].encode(), 1
    while len(before := _before(lines, target - 1, n).encode()) < length and n < len(lines) - 2:
        n = min(4 * n, len(lines) - 2)
    if len(before) < length:
        raise _too_short(spec, len(before), length, 0)
    context, asked = (np.frombuffer(x, np.uint8).astype(np.int32) for x in (before[-length:], prompt))
    return context, asked


completion = complete("completion", "edit_similarity", ())
completion_exact = complete("completion.exact", "exact", ("\n",))
