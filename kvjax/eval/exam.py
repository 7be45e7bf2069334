"""What the demo asks of a model: questions about contexts, and a text of which a part follows the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvjax.cache.accounting import CacheBytes
from kvjax.cache.contract import KVMethod
from kvjax.eval.run import harness
from kvjax.eval.run.reader import Reader
from kvjax.eval.tasks import packaged, suite
from kvjax.eval.tasks.case import Case, Spec
from kvjax.eval.tasks.metrics import METRICS
from kvjax.eval.tasks.symbols import knows_symbols
from kvjax.models.model import Model
from kvjax.testbed import corpus, tasks


class Quality(NamedTuple):
    """What a method's answers are worth."""

    right: float  # share of the questions
    bits: float  # per byte of the text
    likeliest: np.ndarray  # at each place of the text, the token that the model expects most
    bytes: CacheBytes  # of one context


class Exam(Protocol):
    """The same questions for every method."""

    model: Model
    contexts: Sequence[np.ndarray]
    length: int  # tokens of each
    questions: str  # what they are about
    text: str  # what follows

    def quality(self, method: str | KVMethod) -> Quality:
        """What the answers under a method are worth."""


def exam(model: Model, seed: int) -> Exam:
    """Symbols and held-out code for a model with the shipped model's vocabulary, real text for all others."""
    return Symbols(model, seed) if knows_symbols(model) else Text(model, seed)


class Symbols:
    """Eight contexts of 2,048 tokens with eight questions each, and 512 tokens of held-out code after 1,536."""

    length, rows, each, before, after = 2048, 8, 8, 1536, 512
    questions, text = "values of keys in code", "held-out source code"

    def __init__(self, model: Model, seed: int):
        rng, held_out = np.random.default_rng(seed), corpus.load("held_out")
        self.model = model
        self.instances = [
            tasks.recall(rng, self.length, held_out.window, questions=self.each) for _ in range(self.rows)
        ]
        self.code = np.stack([held_out.window(rng, self.before + self.after) for _ in range(self.rows)])
        self.contexts = [instance.context for instance in self.instances]

    def quality(self, method: str | KVMethod) -> Quality:
        """A token of code is a byte."""
        right, size = harness.answers(self.model, method, self.instances)
        logp, likeliest = harness.continuation(self.model, method, self.code, self.before)
        return Quality(float(np.mean(right)), float(-logp.mean() / np.log(2)), likeliest, size.per_sequence(self.rows))


class Text:
    """Needles at four depths of two contexts of 1,024 tokens, and text after four such contexts.

    The needles are in essays, or in source code where the essays are not installed.
    """

    length = 1024
    spec = Spec(lengths=(length,), contexts=2, depths=4)
    text = "source code"

    def __init__(self, model: Model, seed: int):
        spec = dataclasses.replace(self.spec, seed=seed)
        self.model, self.reader = model, Reader(model)
        there = packaged.ESSAYS.found() is not None
        self.needles = suite.cases(model, ["niah.essays" if there else "niah"], spec)
        self.texts = suite.cases(model, ["ppl"], dataclasses.replace(spec, contexts=4))
        self.contexts = [case.context for case in self.needles]
        self.questions = f"needles in {'essays' if there else 'source code'}"

    def quality(self, method: str | KVMethod) -> Quality:
        """Needles by the share of phrases that an answer holds."""
        new = max(ask.new_tokens for case in self.needles for ask in case.asks)
        replies, size = harness.shared(self.reader, method, self.needles, new)
        bits, likeliest, _ = harness.following(self.reader, method, self.texts)
        per_byte = sum(float(b.sum()) for b in bits) / sum(case.bytes for case in self.texts)
        each = size.per_sequence(len(self.needles))
        return Quality(_right(self.needles, replies), per_byte, np.concatenate(likeliest), each)


def _right(cases: Sequence[Case], replies: Sequence[Sequence[str]]) -> float:
    """The mean score of replies [ask][case]."""
    found = []
    for i, case in enumerate(cases):
        for ask, texts in zip(case.asks, replies, strict=True):
            found.append(METRICS[ask.metric](texts[i], ask))
    return float(np.mean(found))
