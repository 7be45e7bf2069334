"""Quality of a method on a model: contexts are read once, then asked and scored on the method's cache of them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

import numpy as np

from kvjax.cache.accounting import CacheBytes
from kvjax.cache.protocol import KVMethod
from kvjax.eval.run.context_reader import ContextReader, padded_width
from kvjax.eval.tasks.case import Ask, Case
from kvjax.eval.tasks.encoding import prompt_ids
from kvjax.generation import stopping
from kvjax.generation.context import Context
from kvjax.generation.generate import generate
from kvjax.generation.memory_plan import planned_bytes
from kvjax.generation.result import Result
from kvjax.models.config import Config
from kvjax.models.model import Model

Replies = tuple[list[list[str]], CacheBytes]
"""[question][context], the generated text up to the first stop; bytes of the contexts."""

SPEED_TOKENS, SPEED_RUNS = 64, 3


def ask_shared_context(
    reader: ContextReader, method: str | KVMethod, cases: Sequence[Case], max_new_tokens: int
) -> Replies:
    """Reads each context once, and asks every question of it as if it were the first.

    Args:
      reader: reads the contexts.
      method: a value, or its string.
      cases: they have equally many questions.
      max_new_tokens: the most tokens that any question may be answered with.
    """
    widest = max(padded_width(len(a.prompt)) for c in cases for a in c.asks)
    context = reader.read([c.context for c in cases], method, headroom_tokens=widest + max_new_tokens)
    replies = []
    for asks in zip(*(c.asks for c in cases), strict=True):
        prompts = [a.prompt for a in asks]
        out = context.ask(prompts, max_new_tokens=max_new_tokens, width=_common_width(prompts))
        replies.append(_answers(reader.model, out, asks))
    return replies, context.bytes


def ask_question_aware(
    reader: ContextReader, method: str | KVMethod, cases: Sequence[Case], max_new_tokens: int
) -> Replies:
    """Ends a prompt of its own with each question, which the method sees when it compresses (LongBench's protocol).

    The arguments are those of `ask_shared_context`.
    """
    sizes, replies = [], []
    for asks in zip(*(c.asks for c in cases), strict=True):
        prompts = [np.concatenate([c.context, a.prompt]) for c, a in zip(cases, asks, strict=True)]
        context = reader.read(prompts, method, headroom_tokens=max_new_tokens)
        sizes.append(context.bytes)
        out = context.generate(max_new_tokens=max_new_tokens, donate=True)
        replies.append(_answers(reader.model, out, asks))
    # The prompts differ by their questions alone, so the first ones' bytes stand for all.
    return replies, sizes[0]


def ask_conversation(
    reader: ContextReader, method: str | KVMethod, cases: Sequence[Case], max_new_tokens: int
) -> Replies:
    """Ends the prompt with the first question, and asks each next one in the same cache after the last one's answer.

    That answer is the reference and not the model's own: one mistake does not spoil the turns after it, and
    every method is asked the same. This is SCBench's multi-turn mode (Li et al., 2024, arXiv 2412.10319; `pre_ans` in
    the prompt templates of its code). The arguments are those of `ask_shared_context`.
    """
    turns = list(zip(*(c.asks for c in cases), strict=True))
    answers = [[reference_ids(reader.model, a) for a in asks] for asks in turns[:-1]]
    fed = [
        [np.concatenate([answer, a.prompt]) for answer, a in zip(answers_of_turn, asks, strict=True)]
        for answers_of_turn, asks in zip(answers, turns[1:], strict=True)
    ]
    prompts = [np.concatenate([c.context, a.prompt]) for c, a in zip(cases, turns[0], strict=True)]
    headroom_tokens = sum(map(_common_width, fed)) + max_new_tokens
    context: Context | None = reader.read(prompts, method, headroom_tokens=headroom_tokens)
    size, replies = context.bytes, []
    for i, asks in enumerate(turns):
        assert context is not None
        following = None
        if i < len(fed):  # before the answer, which uses the context up
            # A method may treat decoded tokens differently, and the reference stands for decoded ones.
            lengths = [(len(tokens), len(answer)) for tokens, answer in zip(fed[i], answers[i], strict=True)]
            decoded = [[t < num_answer for t in range(num_tokens)] for num_tokens, num_answer in lengths]
            following = context.feed(fed[i], decoded=decoded, width=_common_width(fed[i]))
        out = context.generate(max_new_tokens=max_new_tokens, donate=True)
        replies.append(_answers(reader.model, out, asks))
        context = following
    return replies, size


def score_continuations(
    reader: ContextReader, method: str | KVMethod, cases: Sequence[Case]
) -> tuple[list[np.ndarray], list[np.ndarray], CacheBytes]:
    """Predicts the text that follows each context, teacher-forced.

    Returns:
      Bits of each token f64[T] per case, the likeliest tokens i32[T] per case, and the bytes of the contexts.
    """
    texts = [c.follows for c in cases if c.follows is not None]
    longest = max(map(len, texts))
    context = reader.read([c.context for c in cases], method, headroom_tokens=padded_width(longest))
    # The last token is predicted and never fed.
    logp, likeliest = zip(*context.score(texts, width=padded_width(max(longest - 1, 1))), strict=True)
    return [-x.astype(np.float64) / np.log(2) for x in logp], list(likeliest), context.bytes


def measure_speed(
    model: Model, method: str | KVMethod, length: int, batch: int, seed: int
) -> tuple[float, float, CacheBytes]:
    """Generates after contexts of random tokens.

    Returns:
      Seconds of the prefill, decoded tokens per second, both medians of SPEED_RUNS runs, and the bytes of the cache.
    """
    ids = np.random.default_rng([seed, length]).integers(0, model.config.vocab_size, (batch, length))
    # No end token: all methods decode equally many tokens.
    options = {"max_new_tokens": SPEED_TOKENS, "eos_ids": (), "loop": "while"}
    runs = [generate(model, ids, method, **options) for _ in range(SPEED_RUNS)]
    prefill, decode = ([getattr(r, name) for r in runs] for name in ("prefill_seconds", "tokens_per_second"))
    return statistics.median(prefill), statistics.median(decode), runs[0].bytes


@functools.lru_cache(maxsize=1024)
def bfloat16_bytes(method: KVMethod, config: Config, length: int) -> CacheBytes:
    """Returns the bytes that a context of `length` tokens takes under a method, in bfloat16, as planned.

    Caches are held in 16 bits in practice, and a quantizer's gain depends on the cache that it is compared with. So
    methods are compared by these bytes, also where a model computes in float32.
    """
    return planned_bytes(method, config, length, dtype="bfloat16")


def describe_bytes(method: KVMethod, config: Config, length: int) -> dict[str, dict[str, float]]:
    """Returns the fields of a record that hold `bfloat16_bytes`, and their fractions of the exact cache's."""
    size = bfloat16_bytes(method, config, length)
    return {
        "bfloat16_bytes": dict(size.held),
        "bfloat16_fraction": {"device": size.fraction_of_full, "pinned_host": size.host_fraction_of_full},
    }


def reference_ids(model: Model, ask: Ask) -> np.ndarray:
    """Returns the true answer as it follows its question: the first reference, or all where all are asked for."""
    tokenizer = model.text_tokenizer()
    end = tokenizer.decode(ask.prompt[-1:], skip_special_tokens=False)
    gap = " " if end[-1:].isalnum() or end.endswith(":") else ""
    answer = ", ".join(ask.references) if ask.metric == "contains_all" else ask.references[0]
    return prompt_ids(tokenizer, gap + answer)


def answer_text(model: Model, tokens: np.ndarray, ask: Ask) -> str:
    """Returns the answer among generated tokens: at most `ask.new_tokens`, no end tokens, up to the first stop."""
    ends = set(model.config.eos_ids)
    ids = [t for t in tokens.tolist()[: ask.new_tokens] if t not in ends]
    return stopping.truncate_at_stop(model.text_tokenizer().decode_continuation(ids, False), ask.stop)


def _common_width(sequences: Sequence[np.ndarray]) -> int:
    return padded_width(max(map(len, sequences)))


def _answers(model: Model, out: Result, asks: Sequence[Ask]) -> list[str]:
    return [answer_text(model, np.asarray(tokens), a) for tokens, a in zip(out.tokens, asks, strict=True)]
