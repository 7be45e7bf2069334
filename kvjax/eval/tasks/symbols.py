"""Tasks in the shipped model's vocabulary: instances of `kvjax.testbed.tasks` as cases, and their seeds."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import data_files
from kvjax.eval.tasks.case import Ask, Case, Spec, TooShort
from kvjax.models.model import Model
from kvjax.testbed import corpus, tasks, vocab
from kvjax.testbed.tasks import Filler, Instance

InstanceMaker = Callable[[np.random.Generator, int, Filler, int], Instance]
"""(generator, tokens of the context, filler, questions wanted) -> instance; ValueError where it does not fit."""


def knows_symbols(model: Model) -> bool:
    """Whether the model has the shipped model's vocabulary, in which the tasks are written."""
    return model.tokenizer is not None and model.tokenizer.inner.get_vocab() == _vocabulary()


@functools.cache
def _vocabulary() -> dict[str, int]:
    return vocab.tokenizer().get_vocab()


def instance_generator(spec: Spec, *names: str | int) -> np.random.Generator:
    """Returns the generator of one instance, a function of the seed and of the instance's names.

    Its seed has four words of 32 bits, the last of them not zero; training seeds have fewer, so that no instance of an
    evaluation was trained on.
    """
    # A hash of the names, not a running count: a case is the same whichever other cases a run asks for.
    digest = hashlib.sha256("/".join(map(str, (spec.seed, *names))).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16]) | 1 << 127)


def read_source(spec: Spec) -> str:
    """Reads the text of `spec.text`, or by default the held-out files of the standard library, one after the other."""
    if spec.text is None:
        tokens = corpus.load("held_out").tokens
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode(errors="replace")
    text = data_files.read_text(spec.text)
    if not text.strip():
        raise KvjaxError(f"--text {spec.text} has no text; give a file with some, or leave --text out for source code")
    return text


def source_tokens(spec: Spec) -> np.ndarray:
    """Returns the text of `read_source` as tokens of the shipped model: bytes, and END after each held-out file."""
    if spec.text is None:
        return corpus.load("held_out").tokens
    return np.frombuffer(read_source(spec).encode(), np.uint8)


def make_fillers(spec: Spec) -> tuple[Filler, Filler]:
    """Returns two fillers: held-out source code or the bytes of `spec.text`, from a random place; and noise."""
    tokens = source_tokens(spec)

    def text(rng: np.random.Generator, n: int) -> np.ndarray:
        at = rng.integers(len(tokens)) + np.arange(n)
        return tokens.take(at, mode="wrap").astype(np.int32)

    return text, tasks.noise


@dataclasses.dataclass(frozen=True)
class SymbolTask:
    """A task of symbols.

    Args:
      make: makes an instance.
      whole: the answer counts only as a whole ("exact"); otherwise the fraction of its symbols that it contains.
      turns: the questions are a conversation.
      filler: index into `make_fillers`; None takes them in turn.
      stream: instances are seeded by this name, so that tasks of one stream have the same instances.
    """

    make: InstanceMaker
    whole: bool = True
    turns: bool = False
    filler: int | None = None
    stream: str = ""

    def cases(self, task: str, spec: Spec) -> Iterator[Case]:
        """Makes the cases of all lengths; a context has exactly `length` tokens, its questions come on top."""
        fillers = make_fillers(spec)
        for length in spec.lengths:
            for i in range(spec.contexts):
                filler = fillers[i % 2 if self.filler is None else self.filler]
                rng = instance_generator(spec, self.stream or task, length, i)
                instance = make_instance(
                    task, lambda n, rng=rng, filler=filler: self.make(rng, n, filler, spec.questions), length
                )
                yield instance_case(task, f"{task}/{length}/{i}", instance, spec.questions, self.whole, self.turns)


def make_instance(task: str, make: Callable[[int], Instance], length: int) -> Instance:
    """Calls make(length); raises TooShort with the smallest length that works if this one is too small."""

    def fits(n: int) -> bool:
        try:
            return make(n) is not None
        except ValueError:
            return False

    try:
        return make(length)
    except ValueError as e:
        low, high = length, 2 * length + 1
        # Double until it fits, then bisect: the error names a length that works, if any does.
        while not fits(high) and high <= 2**24:
            low, high = high, 2 * high
        while high - low > 1 and high <= 2**24:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        remedy = f"use a length of at least {high}" if high <= 2**24 else f"nor in any other length: {e}"
        raise TooShort(f"task {task!r} does not fit in {length} tokens; {remedy}") from e


def instance_case(
    task: str, key: str, instance: Instance, questions: int, whole: bool = True, turns: bool = False, **about: float
) -> Case:
    """Turns an instance into a case with at most `questions` of its questions.

    The model answers with as many tokens as the answer has. See `SymbolTask` for `whole` and `turns`.
    """
    asks = []
    for turn, question in enumerate(instance.questions[:questions]):
        symbols = tuple(f"<s{i - vocab.SYMBOLS[0]}>" for i in question.answer)  # as the tokenizer decodes them
        details = {"depth": float(question.depth)} | ({"turn": turn} if turns else {}) | about
        references = ("".join(symbols),) if whole else symbols
        metric = "exact" if whole else "contains_all"
        asks.append(Ask(question.prompt, metric, references, len(symbols), about=details))
    about_case = {"length": len(instance.context), **about}
    return Case(task, key, instance.context, tuple(asks), turns, about=about_case)


def recall_maker(most: int) -> InstanceMaker:
    """Makes `most` keys with a value each, fewer where a pair would have less than 8 tokens of context."""
    return lambda rng, n, filler, q: tasks.TASKS["recall"](rng, n, filler, max(4, min(most, n // 8)), q)


def plain_maker(name: str, **sizes: int) -> InstanceMaker:
    """Makes a task of `kvjax.testbed.tasks` with its own sizes, which decide the number of questions too."""
    return lambda rng, n, filler, _: tasks.TASKS[name](rng, n, filler, **sizes)


def question_maker(name: str, most: int = 2**16) -> InstanceMaker:
    """Makes a task of `kvjax.testbed.tasks` with as many questions as are wanted, at most `most`."""
    return lambda rng, n, filler, q: tasks.TASKS[name](rng, n, filler, questions=min(q, most))


# The names and the numbers of needles are RULER's where it has them. Values of six symbols are the longest trained, and
# stand for its uuids; three numbers of keys stand for its four keys and its two haystacks of needles.
TEXT, NOISE = 0, 1
SYMBOL_TASKS: dict[str, SymbolTask] = {
    "symbols.recall": SymbolTask(recall_maker(32)),
    "symbols.copying": SymbolTask(question_maker("copying", 47)),
    "symbols.variables": SymbolTask(plain_maker("variables")),
    "turns": SymbolTask(recall_maker(32), turns=True, stream="shared"),
    "shared": SymbolTask(recall_maker(32), stream="shared"),
    "ruler.niah_single_1": SymbolTask(plain_maker("needle", span=2), filler=NOISE),
    "ruler.niah_single_2": SymbolTask(plain_maker("needle", span=2), filler=TEXT),
    "ruler.niah_single_3": SymbolTask(plain_maker("needle", span=6), filler=TEXT),
    "ruler.niah_multikey_1": SymbolTask(recall_maker(4), filler=TEXT),
    "ruler.niah_multikey_2": SymbolTask(recall_maker(48), filler=TEXT),
    "ruler.niah_multikey_3": SymbolTask(recall_maker(96), filler=TEXT),
    "ruler.niah_multivalue": SymbolTask(plain_maker("multivalue"), whole=False, filler=TEXT),
    "ruler.niah_multiquery": SymbolTask(question_maker("multiquery"), whole=False, filler=TEXT),
    "ruler.vt": SymbolTask(plain_maker("variables"), whole=False, filler=NOISE),
    "ruler.cwe": SymbolTask(plain_maker("common"), whole=False),
    "ruler.fwe": SymbolTask(plain_maker("frequent"), whole=False),
}
