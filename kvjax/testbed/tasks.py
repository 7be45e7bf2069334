"""Recall tasks: a context and questions about it, every answer derivable from the context alone.

Pure NumPy and a function of the generator, so a seed names an instance. The same instances train the shipped
model, measure it, and evaluate cache methods (one context, its questions asked separately on the same cache).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kvjax.testbed.vocab import ASK, LET, PAIR, SYMBOLS

Filler = Callable[[np.random.Generator, int], np.ndarray]
"""(generator, n) -> n tokens, neither symbols nor markers but END."""


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """A question after the context: prompt ids, the ids of its answer, and the depth (0 to 1) of the fact."""

    prompt: np.ndarray
    answer: np.ndarray
    depth: float
    is_ordered: bool = True  # False: the answer is a set

    def right(self, tokens) -> bool:
        """Whether generated ids begin with the answer."""
        tokens, answer = list(tokens)[: len(self.answer)], self.answer.tolist()
        return tokens == answer if self.is_ordered else sorted(tokens) == sorted(answer)


@dataclasses.dataclass(frozen=True, eq=False)
class Instance:
    """One context i32[S] and its questions; between: tokens between an answer and a further question, i32[B]."""

    task: str
    context: np.ndarray
    questions: tuple[Question, ...]
    between: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))


def noise(rng: np.random.Generator, n: int) -> np.ndarray:
    """Returns a filler of uniformly random printable bytes."""
    return rng.integers(32, 127, n).astype(np.int32)


def _symbols(rng: np.random.Generator, n: int) -> np.ndarray:
    """n different symbols."""
    return rng.choice(SYMBOLS, n, replace=False)


def _scatter(
    rng: np.random.Generator, length: int, facts: list[np.ndarray], filler: Filler, cuts: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(a context of `length` tokens with the facts in order and filler between them, the start of each fact)."""
    num_filler = length - sum(map(len, facts))
    if num_filler < 0:
        raise ValueError(
            f"{len(facts)} facts take {length - num_filler} tokens, the context has {length}; ask for fewer"
        )
    cuts = np.sort(rng.integers(0, num_filler + 1, len(facts))) if cuts is None else cuts
    text = filler(rng, num_filler)
    parts = [x for gap, fact in zip(np.split(text, cuts)[:-1], facts, strict=True) for x in (gap, fact)]
    before = np.cumsum([0, *map(len, facts[:-1])])
    return np.concatenate([*parts, text[cuts[-1] :]]).astype(np.int32), cuts + before


def _question(prompt, answer, start: int | np.ndarray, length: int, is_ordered: bool = True) -> Question:
    return Question(np.asarray(prompt, np.int32), np.asarray(answer, np.int32), int(start) / length, is_ordered)


def recall(
    rng: np.random.Generator, length: int, filler: Filler = noise, pairs: int = 32, questions: int = 8
) -> Instance:
    """Key-value recall: `<pair> key value` scattered in filler; `<ask> key` -> value. No key is also a value."""
    symbols = _symbols(rng, len(SYMBOLS))
    keys, values = symbols[:pairs], rng.choice(symbols[pairs:], pairs)
    context, starts = _scatter(rng, length, [np.array([PAIR, k, v]) for k, v in zip(keys, values, strict=True)], filler)
    asked = rng.permutation(pairs)[:questions]
    return Instance("recall", context, tuple(_question([ASK, keys[i]], [values[i]], starts[i], length) for i in asked))


def needle(
    rng: np.random.Generator, length: int, filler: Filler = noise, depth: float | None = None, span: int = 4
) -> Instance:
    """Needle in a haystack: one key with a value of `span` symbols at `depth` (0 start, 1 end; None: anywhere)."""
    key, *value = _symbols(rng, 1 + span)
    depth = rng.random() if depth is None else depth
    cut = np.array([round(depth * (length - 2 - span))])
    context, starts = _scatter(rng, length, [np.array([PAIR, key, *value])], filler, cut)
    return Instance("needle", context, (_question([ASK, key], value, starts[0], length),))


def copying(
    rng: np.random.Generator, length: int, filler: Filler = noise, span: int = 64, answer: int = 16, questions: int = 4
) -> Instance:
    """Copying: a run of `span` different symbols in filler; two consecutive ones of it -> the `answer` after them."""
    run = _symbols(rng, span)
    context, starts = _scatter(rng, length, [run], filler)
    # Every question leaves room for its answer inside the run.
    asked = rng.choice(span - 1 - answer, questions, replace=False)
    cuts = (_question(run[i : i + 2], run[i + 2 : i + 2 + answer], starts[0] + i, length) for i in asked)
    return Instance("copying", context, tuple(cuts))


def variables(
    rng: np.random.Generator, length: int, filler: Filler = noise, chains: int = 4, hops: int = 2
) -> Instance:
    """Variable tracking (after RULER; Hsieh et al., 2024, section 3): `<let> a 7`, later `<let> b a`, `<let> c b`.

    `<ask> c` -> `b a 7`, the chain down to its value. Chains are interleaved; a name is assigned before its use.
    """
    chain = _symbols(rng, chains * (hops + 2)).reshape(chains, hops + 2)  # value, first name, ..., last name
    owner = rng.permutation(np.repeat(np.arange(chains), hops + 1))
    step = [int((owner[:i] == c).sum()) for i, c in enumerate(owner)]
    facts = [np.array([LET, chain[c, j + 1], chain[c, j]]) for c, j in zip(owner, step, strict=True)]
    context, starts = _scatter(rng, length, facts, filler)
    last = [starts[np.flatnonzero(owner == c)[-1]] for c in range(chains)]
    asked = [_question([ASK, chain[c, -1]], chain[c, -2::-1], last[c], length) for c in range(chains)]
    return Instance("variables", context, tuple(asked))


def multivalue(
    rng: np.random.Generator, length: int, filler: Filler = noise, keys: int = 4, values: int = 4
) -> Instance:
    """Several values of one key (RULER, section 3): `<pair> key value` at separate places; `<ask> key` -> all values.

    They are a set; the order of their occurrence is the one trained.
    """
    symbols = _symbols(rng, keys * (1 + values))
    names, values_of = symbols[:keys], symbols[keys:].reshape(keys, values)
    owner = rng.permutation(np.repeat(np.arange(keys), values))
    turn = [int((owner[:i] == k).sum()) for i, k in enumerate(owner)]
    facts = [np.array([PAIR, names[k], values_of[k, j]]) for k, j in zip(owner, turn, strict=True)]
    context, starts = _scatter(rng, length, facts, filler)
    first = [starts[np.flatnonzero(owner == k)[0]] for k in range(keys)]
    asked = [_question([ASK, names[k]], values_of[k], first[k], length, is_ordered=False) for k in range(keys)]
    return Instance("multivalue", context, tuple(asked))


def multiquery(
    rng: np.random.Generator,
    length: int,
    filler: Filler = noise,
    pairs: int = 32,
    asked: int = 4,
    questions: int = 4,
) -> Instance:
    """Several keys in one question (RULER, section 3): pairs as in `recall`; `<ask> k1 .. kn` -> v1 .. vn."""
    symbols = _symbols(rng, 2 * pairs)
    keys, values = symbols[:pairs], symbols[pairs:]
    context, starts = _scatter(rng, length, [np.array([PAIR, k, v]) for k, v in zip(keys, values, strict=True)], filler)
    chosen = [rng.permutation(pairs)[:asked] for _ in range(questions)]
    asks = (_question([ASK, *keys[i]], values[i], starts[i].min(), length) for i in chosen)
    return Instance("multiquery", context, tuple(asks))


def common(
    rng: np.random.Generator,
    length: int,
    filler: Filler = noise,
    most: int = 3,
    often: int = 12,
    rare: int = 24,
    seldom: int = 2,
) -> Instance:
    """Common words (RULER, section 3): `most` symbols `often` times each, `rare` others `seldom` times.

    `<ask> <pair>` -> the common ones, a set; the order of their first occurrence is the one trained.
    """
    symbols = _symbols(rng, most + rare)
    words = rng.permutation(np.concatenate([np.repeat(symbols[:most], often), np.repeat(symbols[most:], seldom)]))
    context, starts = _scatter(rng, length, list(words[:, None]), filler)
    first = sorted(int(np.flatnonzero(words == s)[0]) for s in symbols[:most])
    question = _question([ASK, PAIR], words[first], starts[first[0]], length, is_ordered=False)
    return Instance("common", context, (question,))


def frequent(
    rng: np.random.Generator, length: int, filler: Filler = noise, most: int = 3, words: int = 96, alpha: float = 2.0
) -> Instance:
    """Frequent words (RULER, section 3): `words` symbols drawn from a Zipf law; `<ask> <let>` -> the `most` frequent.

    The most frequent comes first; their counts differ from each other and from all others.
    """
    while True:  # until no tie of counts leaves the answer open
        ranks = rng.zipf(alpha, words)
        counts = np.sort(np.bincount(ranks[ranks <= len(SYMBOLS)], minlength=most + 2))[::-1][: most + 1]
        if (np.diff(counts) < 0).all() and (ranks <= len(SYMBOLS)).all():
            break
    drawn = _symbols(rng, len(SYMBOLS))[ranks - 1]
    context, starts = _scatter(rng, length, list(drawn[:, None]), filler)
    found, times = np.unique(drawn, return_counts=True)
    answer = found[np.argsort(-times)[:most]]
    start = starts[np.flatnonzero(drawn == answer[0])[0]]
    return Instance("frequent", context, (_question([ASK, LET], answer, start, length),))


TASKS: dict[str, Callable[..., Instance]] = {
    f.__name__: f for f in (recall, needle, copying, variables, multivalue, multiquery, common, frequent)
}


def row(instance: Instance) -> tuple[np.ndarray, np.ndarray]:
    """The context and all questions with their answers as one sequence -> (tokens i32[T], whether each is answer)."""
    parts = [(instance.context, False)] + [x for q in instance.questions for x in ((q.prompt, False), (q.answer, True))]
    return np.concatenate([p for p, _ in parts]), np.concatenate([np.full(len(p), a) for p, a in parts])
