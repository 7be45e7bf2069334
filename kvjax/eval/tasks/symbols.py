"""Tasks in the shipped model's vocabulary: instances of `kvjax.testbed.tasks` as cases, and their seeds."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import packaged
from kvjax.eval.tasks.case import Ask, Case, Spec, TooShort
from kvjax.models.model import Model
from kvjax.testbed import corpus, tasks, vocab
from kvjax.testbed.tasks import Filler, Instance

Make = Callable[[np.random.Generator, int, Filler, int], Instance]
"""(generator, tokens of the context, filler, questions wanted) -> instance; ValueError where it does not fit."""


def knows_symbols(model: Model) -> bool:
    """Whether the model has the shipped model's vocabulary, in which the tasks are written."""
    return model.tokenizer is not None and model.tokenizer.inner.get_vocab() == _vocabulary()


@functools.cache
def _vocabulary() -> dict[str, int]:
    return vocab.tokenizer().get_vocab()


def generator(spec: Spec, *names: str | int) -> np.random.Generator:
    """The generator of one instance, a function of the seed and of what names the instance.

    Its seed has four words of 32 bits, the last of them not zero; training seeds have fewer.
    """
    digest = hashlib.sha256("/".join(map(str, (spec.seed, *names))).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16]) | 1 << 127)


def spelled(ids: np.ndarray) -> tuple[str, ...]:
    """Symbols as the tokenizer decodes them: "<s17>"."""
    return tuple(f"<s{i - vocab.SYMBOLS[0]}>" for i in ids)


def source(spec: Spec) -> str:
    """The text that `spec.text` names, or else the held-out files of the standard library, one after the other."""
    if spec.text is None:
        tokens = corpus.load("held_out").tokens
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode(errors="replace")
    text = packaged.read(spec.text)
    if not text.strip():
        raise KvjaxError(f"--text {spec.text} has no text; give a file with some, or leave --text out for source code")
    return text


def fillers(spec: Spec) -> tuple[Filler, Filler]:
    """Held-out source code, or the bytes of `spec.text`, from a random place and round its end; and noise."""
    if spec.text is None:
        tokens = corpus.load("held_out").tokens
    else:
        tokens = np.frombuffer(source(spec).encode(), np.uint8)

    def text(rng: np.random.Generator, n: int) -> np.ndarray:
        at = rng.integers(len(tokens)) + np.arange(n)
        return tokens.take(at, mode="wrap").astype(np.int32)

    return text, tasks.noise


@dataclasses.dataclass(frozen=True)
class Family:
    """A task of symbols. whole: the answer counts only as a whole ("exact"); otherwise the share of its symbols."""

    make: Make
    whole: bool = True
    turns: bool = False
    filler: int | None = None  # which of `fillers`; None: in turn
    stream: str = ""  # instances are seeded by this name, so that tasks that share it share them

    def cases(self, task: str, spec: Spec) -> Iterator[Case]:
        """The cases of all lengths; a context has exactly `length` tokens, its questions come on top."""
        every = fillers(spec)
        for length in spec.lengths:
            for i in range(spec.contexts):
                filler = every[i % 2 if self.filler is None else self.filler]
                rng = generator(spec, self.stream or task, length, i)

                def make(n: int, r: np.random.Generator = rng, f: Filler = filler) -> Instance:
                    return self.make(r, n, f, spec.questions)

                instance = built(task, make, length)
                yield case(task, f"{task}/{length}/{i}", instance, spec.questions, self.whole, self.turns)


def built(task: str, make: Callable[[int], Instance], length: int) -> Instance:
    """make(length); a length that is too small raises KvjaxError with the smallest that works."""
    try:
        return make(length)
    except ValueError as e:
        low, high = length, 2 * length + 1
        while not _works(make, high):
            low, high = high, 2 * high
            if high > 2**24:
                raise KvjaxError(f"task {task!r} cannot be made: {e}") from e
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _works(make, middle) else (middle, high)
        raise TooShort(f"task {task!r} does not fit in {length} tokens; use a length of at least {high}") from None


def _works(make: Callable[[int], Instance], length: int) -> bool:
    try:
        return make(length) is not None
    except ValueError:
        return False


def case(
    task: str, key: str, instance: Instance, questions: int, whole: bool = True, turns: bool = False, **about: float
) -> Case:
    """An instance as a case with at most so many of its questions; the model answers with as many tokens as it has."""

    def ask(q: tasks.Question, turn: int) -> Ask:
        parts = spelled(q.answer)
        told = {"depth": float(q.depth)} | ({"turn": turn} if turns else {}) | about
        references = ("".join(parts),) if whole else parts
        return Ask(q.prompt, "exact" if whole else "contains_all", references, len(parts), about=told)

    asks = tuple(ask(q, turn) for turn, q in enumerate(instance.questions[:questions]))
    return Case(task, key, instance.context, asks, turns, about={"length": len(instance.context), **about})


def single(span: int) -> Make:
    """One key with a value of `span` symbols, anywhere."""
    return lambda rng, n, filler, _: tasks.TASKS["needle"](rng, n, filler, None, span)


def recall(most: int) -> Make:
    """`most` keys with a value each, fewer where a pair would have less than 8 tokens of context."""
    return lambda rng, n, filler, q: tasks.TASKS["recall"](rng, n, filler, max(4, min(most, n // 8)), q)


def plain(name: str, **more: int) -> Make:
    """A task of `kvjax.testbed.tasks` with its own sizes, which decide the questions too."""
    return lambda rng, n, filler, _: tasks.TASKS[name](rng, n, filler, **more)


def asked(name: str, most: int = 2**16) -> Make:
    """A task of `kvjax.testbed.tasks` that asks as many questions as are wanted, at most `most`."""
    return lambda rng, n, filler, q: tasks.TASKS[name](rng, n, filler, questions=min(q, most))


# The names and the numbers of needles are RULER's where it has them. Values of six symbols are the longest trained, and
# stand for its uuids; three numbers of keys stand for its four keys and its two haystacks of needles.
TEXT, NOISE = 0, 1
FAMILIES: dict[str, Family] = {
    "symbols.recall": Family(recall(32)),
    "symbols.copying": Family(asked("copying", 47)),
    "symbols.variables": Family(plain("variables")),
    "turns": Family(recall(32), turns=True, stream="shared"),
    "shared": Family(recall(32), stream="shared"),
    "ruler.niah_single_1": Family(single(2), filler=NOISE),
    "ruler.niah_single_2": Family(single(2), filler=TEXT),
    "ruler.niah_single_3": Family(single(6), filler=TEXT),
    "ruler.niah_multikey_1": Family(recall(4), filler=TEXT),
    "ruler.niah_multikey_2": Family(recall(48), filler=TEXT),
    "ruler.niah_multikey_3": Family(recall(96), filler=TEXT),
    "ruler.niah_multivalue": Family(plain("multivalue"), whole=False, filler=TEXT),
    "ruler.niah_multiquery": Family(asked("multiquery"), whole=False, filler=TEXT),
    "ruler.vt": Family(plain("variables"), whole=False, filler=NOISE),
    "ruler.cwe": Family(plain("common"), whole=False),
    "ruler.fwe": Family(plain("frequent"), whole=False),
}
