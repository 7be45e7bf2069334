"""Training batches: a pure function of (seed, step, shape, mixture)."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvjax.testbed import tasks
from kvjax.testbed.corpus import Corpus
from kvjax.testbed.vocab import SYMBOLS

KINDS = ("text", "repeats", *tasks.TASKS)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A batch of training sequences."""

    tokens: np.ndarray  # i32[B T]
    pos: np.ndarray  # i32[B T]
    weight: np.ndarray  # f32[B T], of each token as a target; sums to 1 per sequence
    kind: np.ndarray  # i32[B], index in KINDS


def make_repeats(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes periodic random symbols, which train induction heads: (tokens, whether each is a repetition)."""
    # Log-uniform, or nearly all periods would be long, with few repetitions in a sequence to learn from.
    period = int(np.exp(rng.uniform(np.log(8), np.log(length // 2))))
    run = rng.choice(SYMBOLS, period, replace=period > len(SYMBOLS))
    lead = tasks.noise(rng, rng.integers(0, period))
    tokens = np.concatenate([lead, np.tile(run, length // period + 1)])[:length]
    return tokens, np.arange(length) >= len(lead) + period


def _multivalue(rng: np.random.Generator, length: int, filler: tasks.Filler) -> tasks.Instance:
    values = int(rng.integers(2, 5))
    keys = int(np.clip(length // 32 // values, 1, 8))
    return tasks.multivalue(rng, length - keys * (2 + values), filler, keys, values)


def _multiquery(rng: np.random.Generator, length: int, filler: tasks.Filler) -> tasks.Instance:
    asked = int(rng.integers(2, 5))
    pairs = int(np.clip(length // 16, asked, 48))
    questions = max(1, pairs // asked // 2)
    return tasks.multiquery(rng, length - questions * (1 + 2 * asked), filler, pairs, asked, questions)


def _common(rng: np.random.Generator, length: int, filler: tasks.Filler) -> tasks.Instance:
    often = int(rng.integers(4, np.clip(length // 16, 5, 13)))
    return tasks.common(rng, length - 5, filler, 3, often, int(np.clip(length // 24, 4, 24)))


def _frequent(rng: np.random.Generator, length: int, filler: tasks.Filler) -> tasks.Instance:
    return tasks.frequent(rng, length - 5, filler, 3, int(np.clip(length // 4, 24, 96)))


SIZED_TASKS = {"multivalue": _multivalue, "multiquery": _multiquery, "common": _common, "frequent": _frequent}
"""Tasks of a size that fits a sequence with questions and answers."""


def _make_task(rng: np.random.Generator, kind: str, length: int, corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Makes a task of any size that fits, with all its questions, in exactly `length` tokens."""
    # Sizes are drawn, so that the model cannot learn the number of facts or the length of an answer instead of looking.
    filler = tasks.noise if rng.random() < 0.5 else corpus.window
    if kind in SIZED_TASKS:
        return tasks.row(SIZED_TASKS[kind](rng, length, filler))
    if kind == "recall":
        pairs = int(np.clip(length / rng.choice([8, 16, 32]), 2, 96))
        return tasks.row(tasks.recall(rng, length - 3 * pairs, filler, pairs, pairs))
    if kind == "needle":
        span = int(rng.integers(1, 7))
        return tasks.row(tasks.needle(rng, length - 2 - span, filler, None, span))
    if kind == "variables":
        hops = int(rng.integers(1, 3))
        chains = int(np.clip(length // 32 // (hops + 1), 1, 8))
        return tasks.row(tasks.variables(rng, length - chains * (hops + 3), filler, chains, hops))
    span = int(np.clip(length // 4, 12, 64))
    answer, questions = span // 4, 2
    return tasks.row(tasks.copying(rng, length - questions * (2 + answer), filler, span, answer, questions))


def _positions(rng: np.random.Generator, length: int, reach: int) -> np.ndarray:
    """Positions 0..length-1 with two skips, over a range of up to `reach` (PoSE; Zhu et al., 2023)."""
    skips = np.sort(rng.integers(0, max(reach - length, 0) + 1, 2))
    cuts = np.sort(rng.integers(0, length, 2))
    return np.arange(length) + (np.arange(length)[:, None] >= cuts) @ np.diff(skips, prepend=0)


def make(
    rng: np.random.Generator, num_sequences: int, length: int, mixture: dict[str, float], reach: int, corpus: Corpus
) -> Batch:
    """Makes a batch.

    Half the sequences that are not text have positions up to `reach`, which trains distant questions at short lengths.

    Args:
      rng: the only source of randomness.
      num_sequences: of the batch.
      length: tokens of each.
      mixture: weights of the kinds.
      reach: range of the positions.
      corpus: of text and filler.

    Returns:
      the batch.
    """
    weights = np.array([mixture.get(k, 0.0) for k in KINDS])
    kind = rng.choice(len(KINDS), num_sequences, p=weights / weights.sum())
    shape = num_sequences, length
    tokens, weight, pos = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    for i, k in enumerate(kind):
        if KINDS[k] == "text":
            tokens[i], target = corpus.window(rng, length), np.arange(length) > 0
        elif KINDS[k] == "repeats":
            tokens[i], target = make_repeats(rng, length)
        else:
            tokens[i], target = _make_task(rng, KINDS[k], length, corpus)
        # Equal weight for each sequence: a text has a thousand targets, and would drown a task that has four.
        weight[i] = target / target.sum()
        skip = KINDS[k] != "text" and rng.random() < 0.5
        pos[i] = _positions(rng, length, reach if skip else length)
    return Batch(tokens, pos, weight, kind.astype(np.int32))
