"""Quality of a method on a model: contexts are read once, then asked and scored on what the method holds of them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

import numpy as np

from kvjax.cache.accounting import CacheBytes
from kvjax.cache.protocol import KVMethod
from kvjax.eval.run.reader import Reader
from kvjax.eval.tasks.case import Ask, Case
from kvjax.eval.tasks.texts import prompt_ids
from kvjax.generation import stopping
from kvjax.generation.context import Context
from kvjax.generation.generate import generate
from kvjax.generation.inputs import round_up
from kvjax.generation.memory_plan import planned_bytes
from kvjax.generation.result import Result
from kvjax.models.config import Config
from kvjax.models.model import Model

Rows = Sequence[np.ndarray]


Replies = tuple[list[list[str]], CacheBytes]
"""[ask][row], the generated text up to the first stop; bytes of the contexts."""

SPEED_TOKENS, SPEED_RUNS = 64, 3


def shared(reader: Reader, method: str | KVMethod, cases: Sequence[Case], new: int) -> Replies:
    """Each context is read once, and every question is asked of it as if it were the first.

    The cases have equally many questions; new: the most tokens that any of them may answer.
    """
    widest = max(bucket(len(a.prompt)) for c in cases for a in c.asks)
    context = _read(reader, method, [c.context for c in cases], widest + new)
    replies = []
    for asked in zip(*(c.asks for c in cases), strict=True):
        prompts = [a.prompt for a in asked]
        replies.append(_texts(reader.model, context.ask(prompts, max_new_tokens=new, width=_width(prompts)), asked))
    return replies, context.bytes


def seen(reader: Reader, method: str | KVMethod, cases: Sequence[Case], new: int) -> Replies:
    """Each question ends a prompt of its own, and is there when the method compresses (LongBench's protocol)."""
    sizes, replies = [], []
    for asked in zip(*(c.asks for c in cases), strict=True):
        prompts = [np.concatenate([c.context, a.prompt]) for c, a in zip(cases, asked, strict=True)]
        context = _read(reader, method, prompts, new)
        sizes.append(context.bytes)
        replies.append(_texts(reader.model, context.generate(max_new_tokens=new, use_up=True), asked))
    return replies, sizes[0]


def conversation(reader: Reader, method: str | KVMethod, cases: Sequence[Case], new: int) -> Replies:
    """The first question ends the prompt; each next one follows in the same cache, after the answer to the last one.

    That answer is the reference, not what the model said, so that one mistake does not spoil the turns after it, and
    every method is asked the same: SCBench's multi-turn mode (Li et al., 2024, arXiv 2412.10319; `pre_ans` in the
    prompt templates of its code).
    """
    turns = list(zip(*(c.asks for c in cases), strict=True))
    told = [[reference(reader.model, a) for a in asked] for asked in turns[:-1]]
    fed = [
        [np.concatenate([r, a.prompt]) for r, a in zip(answers, asked, strict=True)]
        for answers, asked in zip(told, turns[1:], strict=True)
    ]
    prompts = [np.concatenate([c.context, a.prompt]) for c, a in zip(cases, turns[0], strict=True)]
    context: Context | None = _read(reader, method, prompts, sum(map(_width, fed)) + new)
    taken, replies = context.bytes, []
    for i, asked in enumerate(turns):
        assert context is not None
        following = _fed(context, fed[i], told[i]) if i < len(fed) else None  # first: answering uses the context up
        replies.append(_texts(reader.model, context.generate(max_new_tokens=new, use_up=True), asked))
        context = following
    return replies, taken


def _fed(context: Context, rows: Rows, answers: Rows) -> Context:
    """The context with an answer, which stands for what would be decoded, and the next question behind it."""
    decoded = [[i < len(answer) for i in range(len(row))] for row, answer in zip(rows, answers, strict=True)]
    return context.feed(rows, decoded=decoded, width=_width(rows))


def following(
    reader: Reader, method: str | KVMethod, cases: Sequence[Case]
) -> tuple[list[np.ndarray], list[np.ndarray], CacheBytes]:
    """Teacher-forced: (per row the bits of each token f64[T], per row the likeliest i32[T], what the contexts take)."""
    rows = [c.follows for c in cases if c.follows is not None]
    longest = max(map(len, rows))
    context = _read(reader, method, [c.context for c in cases], bucket(longest))
    logp, likeliest = zip(*context.score(rows, width=bucket(max(longest - 1, 1))), strict=True)
    return [-x.astype(np.float64) / np.log(2) for x in logp], list(likeliest), context.bytes


def speed(model: Model, method: str | KVMethod, length: int, batch: int, seed: int) -> tuple[float, float, CacheBytes]:
    """Contexts of random tokens: (prefill seconds, decoded tokens per second, bytes of the cache), medians."""
    ids = np.random.default_rng([seed, length]).integers(0, model.config.vocab_size, (batch, length))
    how = {"max_new_tokens": SPEED_TOKENS, "eos_ids": (), "loop": "while"}
    runs = [generate(model, ids, method, **how) for _ in range(SPEED_RUNS)]
    prefill, decode = ([getattr(r, name) for r in runs] for name in ("prefill_seconds", "tokens_per_second"))
    return statistics.median(prefill), statistics.median(decode), runs[0].bytes


@functools.lru_cache(maxsize=1024)
def bfloat16_fractions(method: KVMethod, config: Config, length: int) -> dict[str, float]:
    """What a method holds of contexts of so many tokens in bfloat16, as fractions of the exact bfloat16 cache.

    Caches are held in 16 bits in practice, and a quantizer's gain depends on what it is compared with. So methods are
    compared by these bytes, also where a model computes in float32.
    """
    planned = planned_bytes(method, config, length, dtype="bfloat16")
    return {"device": planned.fraction_of_full, "pinned_host": planned.host_fraction_of_full}


def bucket(n: int) -> int:
    """The width that rows of up to n tokens are padded to: few widths, hence few programs, and little too wide."""
    return n if n <= 16 else round_up(n, 1 << max(4, n.bit_length() - 6))


def reference(model: Model, ask: Ask) -> np.ndarray:
    """The true answer as it follows its question: the first reference, or all of them where all are asked for."""
    tokenizer = model.text_tokenizer()
    asked = tokenizer.decode(ask.prompt[-1:], skip_special_tokens=False)
    gap = " " if asked[-1:].isalnum() or asked.endswith(":") else ""
    return prompt_ids(
        tokenizer, gap + (", ".join(ask.references) if ask.metric == "contains_all" else ask.references[0])
    )


def _read(reader: Reader, method: str | KVMethod, rows: Rows, room: int) -> Context:
    """Rows in a padded width, with room for so many tokens after them."""
    return reader.read(rows, method, room=room, width=_width(rows))


def _width(rows: Rows) -> int:
    """What rows are padded to."""
    return bucket(max(map(len, rows)))


def _texts(model: Model, out: Result, asked: Sequence[Ask]) -> list[str]:
    return [text(model, np.asarray(row), a) for row, a in zip(out.tokens, asked, strict=True)]


def text(model: Model, tokens: np.ndarray, ask: Ask) -> str:
    """What was answered: no more than was asked for, without end tokens, up to the first stop."""
    ends = set(model.config.eos_ids)
    ids = [t for t in tokens.tolist()[: ask.new_tokens] if t not in ends]
    return stopping.truncate_at_stop(model.text_tokenizer().decode(ids, skip_special_tokens=False), ask.stop)
