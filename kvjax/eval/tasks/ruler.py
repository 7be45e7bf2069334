"""RULER's synthetic tasks as text for real tokenizers (Hsieh et al., 2024), and recall in turns after SCBench.

Prompts, numbers of needles, metric and new tokens are those of RULER's standard tasks, word for word. What differs:
keys and words are made here instead of taken from packages; essays are `spec.text` or held-out source code; each
instance starts elsewhere in the essay; a length counts the question but not the answer; several keys of a context may
be asked, each on its own. Context and question are encoded apart, at a line break (`texts.prompt_ids`). Of a chat
model's answer the first words are given, as there (answer_prefix).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from kvjax.eval.tasks import symbols
from kvjax.eval.tasks.case import Ask, Case, Spec
from kvjax.eval.tasks.chat_format import Frame, framed
from kvjax.eval.tasks.haystack import KINDS, Drawn, Essay, different, fitted, inserted, letters, made_up
from kvjax.models.model import Model

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = np.round(np.linspace(0, 100, 40)) / 100
SHORT = 4096  # tokens below which `cwe` is easier


@dataclasses.dataclass(frozen=True)
class Question:
    """A question's text, what an answer holds, and where in the context (0 to 1, of its characters) the fact is."""

    text: str
    references: tuple[str, ...]
    depth: float | None = None
    opening: str = ""  # the first words of the answer, which are given


Draft = Callable[[int], tuple[str, list[Question]]]
"""Units of haystack -> (the context's text, ended by a line break, its questions)."""


@dataclasses.dataclass(frozen=True)
class Niah:
    """Needles, each a magic value of a key: `keys` (0: one per question) with `values` each, `queries` at once."""

    haystack: str = "essay"  # or "noise", or "needle": more needles
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> tuple[Draft, int]:
        """(the draft, its fewest units)."""
        essay = Essay(spec, rng) if self.haystack == "essay" else None
        avoid = essay.whole if essay else NOISE
        keys, values = (Drawn(KINDS[kind](rng), avoid) for kind in (self.key, self.value))
        n = max(self.keys or spec.questions, self.queries)
        depths = sorted(spread(rng, n * self.values).tolist())
        seed = int(rng.integers(2**32))

        def build(units: int) -> tuple[str, list[Question]]:
            own = np.random.default_rng(seed)
            have = n if essay or self.haystack == "noise" else n + units
            names, held = keys.first(have), np.array(values.first(have * self.values)).reshape(have, self.values)
            order = own.permutation(have * self.values)
            needles = [NEEDLE.format(kind=self.value, key=names[j // self.values], value=held.flat[j]) for j in order]
            if essay:
                text, starts = inserted(essay.words(units), needles, depths)
                text = text.rstrip()
            else:
                text, starts = _lines(needles, units if self.haystack == "noise" else 0, own)
            head = self.worded(
                "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
            )
            head += self.worded("I will quiz you about the {kind} afterwards.\n")
            where = {j: (len(head) + s) / (len(head) + len(text)) for j, s in zip(order, starts, strict=True)}
            return f"{head}{text}\n", self.questions(own, spec, names, held, where)

        return build, n * self.values

    def worded(self, template: str, query: str = "") -> str:
        """RULER's words for one answer or several."""
        kind = self.value
        if self.queries * self.values == 1:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            kind = kind[:-1]
        return template.format(kind=kind, query=query)

    def questions(self, rng, spec: Spec, names: list[str], held: np.ndarray, where: dict[int, float]) -> list[Question]:
        """As many as are wanted, of different keys; all keys of a question at once."""
        times = 1 if self.queries > 1 else min(spec.questions, len(names))
        chosen = rng.permutation(len(names))[: times * self.queries].reshape(times, self.queries)
        out = []
        for row in chosen:
            asked = [names[k] for k in row]
            query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
            text = "What are all the special magic {kind} for {query} mentioned in the provided text?"
            opening = " The special magic {kind} for {query} mentioned in the provided text are"
            depth = min(where[k * self.values + v] for k in row for v in range(self.values))
            text, opening = self.worded(text, query), self.worded(opening, query)
            out.append(Question(text, tuple(held[row].ravel().tolist()), depth, opening))
        return out


def spread(rng: np.random.Generator, n: int) -> np.ndarray:
    """n of RULER's 40 depths, different ones while there are enough."""
    return rng.choice(DEPTHS, n, replace=n > len(DEPTHS))


def _lines(facts: Sequence[str], noise: int, rng: np.random.Generator) -> tuple[str, list[int]]:
    """Facts among so many lines of noise -> (the text, where each fact starts); facts keep their order."""
    total = len(facts) + noise
    places = np.sort(rng.choice(total, len(facts), replace=False))
    lines = [NOISE] * total
    for place, fact in zip(places, facts, strict=True):
        lines[place] = fact
    starts = np.cumsum([0, *(len(x) + 1 for x in lines)])
    return "\n".join(lines), starts[places].tolist()


@dataclasses.dataclass(frozen=True)
class Tracking:
    """Variable tracking: one chain of `hops` assignments in noise, after one worked example."""

    hops: int = 4

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> tuple[Draft, int]:
        """(the draft, its fewest units). The example has five lines of noise; RULER's has up to 500 tokens."""
        names = Drawn(letters(rng, string.ascii_uppercase, 5)).first(self.hops + 1)
        short = Drawn(letters(rng, string.ascii_uppercase, 3)).first(self.hops + 1)
        value, other = Drawn(different(lambda: str(rng.integers(10000, 99999)))).first(2)
        example, asked = self.part(short, other, 5, np.random.default_rng(rng.integers(2**32)))
        example = f"{example}{asked.text}{asked.opening} {' '.join(short)}\n\n"
        seed = int(rng.integers(2**32))

        def build(units: int) -> tuple[str, list[Question]]:
            text, question = self.part(names, value, units, np.random.default_rng(seed))
            assert question.depth is not None
            at = (len(example) + question.depth * len(text)) / (len(example) + len(text))
            return example + text, [dataclasses.replace(question, depth=at)]

        return build, self.hops + 1

    def part(self, names: Sequence[str], value: str, noise: int, rng: np.random.Generator) -> tuple[str, Question]:
        """(context, question, whose depth is that of the chain's last link)."""
        chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names))]
        text, starts = _lines(chain, noise, rng)
        head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        question = f"Question: Find all variables that are assigned the value {value} in the text above."
        opening = " Answer: According to the chain(s) of variable assignment in the text above, "
        opening += f"{len(names)} variables are assigned the value {value}, they are: "
        depth = (len(head) + starts[-1]) / (len(head) + len(text) + 1)
        return f"{head}{text}\n", Question(question, tuple(names), depth, opening)


@dataclasses.dataclass(frozen=True)
class Common:
    """Common words: 10 words often and others seldom in a numbered list, after one worked example."""

    common: int = 10

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> tuple[Draft, int]:
        """(the draft, its fewest units); a unit is a different word."""
        drawn = Drawn(made_up(rng))
        (few, number, times), often = ((20, 3, 1), (6, 1)) if length < SHORT else ((40, 10, 3), (30, 3))
        first = drawn.first(few)
        example = self.part(first, number, times, np.random.default_rng(rng.integers(2**32)))
        answer = " ".join(f"{i + 1}. {word}" for i, word in enumerate(first[: self.common]))
        seed = int(rng.integers(2**32))
        question = "Question: What are the 10 most common words in the above list?"
        opening = " Answer: The top 10 words that appear most often in the list are:"

        def build(units: int) -> tuple[str, list[Question]]:
            mine = drawn.first(few + units)[few:]
            text = self.part(mine, *often, np.random.default_rng(seed))
            asked = Question(question, tuple(mine[: self.common]), opening=opening)
            return f"{example}{question}{opening} {answer}\n{text}", [asked]

        return build, 2 * self.common

    def part(self, words: list[str], often: int, seldom: int, rng: np.random.Generator) -> str:
        """The list, its first words often."""
        every = rng.permutation(words[: self.common] * often + words[self.common :] * seldom)
        head = "Below is a numbered list of words. In these words, some appear more often than others. "
        head += "Memorize the ones that appear most often.\n"
        return head + " ".join(f"{i + 1}. {word}" for i, word in enumerate(every)) + "\n"


@dataclasses.dataclass(frozen=True)
class Frequent:
    """Frequent words: coded words by a zeta law (alpha 2), the first rank dots; the next three are asked for."""

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> tuple[Draft, int]:
        """(the draft, its fewest units); a unit is a word of the text, some of which are rounded away."""
        ranked = ["...", *Drawn(letters(rng, string.ascii_lowercase, 6)).first(max(5, length // 50) - 1)]
        share = np.arange(1, len(ranked) + 1) ** -2.0 / (math.pi**2 / 6)
        seed = int(rng.integers(2**32))

        def build(units: int) -> tuple[str, list[Question]]:
            every = np.repeat(ranked, (units * share).astype(int))
            text = " ".join(np.random.default_rng(seed).permutation(every).tolist())
            head = "Read the following coded text and track the frequency of each coded word. "
            head += "Find the three most frequently appeared coded words. "
            question = "Question: Do not provide any explanation. Please ignore the dots '....'. "
            question += "What are the three most frequently appeared words in the above coded text?"
            opening = " Answer: According to the coded text above, the three most frequently appeared words are:"
            return f"{head}{text}\n", [Question(question, tuple(ranked[1:4]), opening=opening)]

        return build, 53  # from here on the fourth rank is more frequent than the fifth


class Kind(Protocol):
    """What `Text` asks of a family."""

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> tuple[Draft, int]:
        """(the draft, its fewest units)."""
        ...


@dataclasses.dataclass(frozen=True)
class Text:
    """A task: how its instances are drafted, and the room for an answer."""

    kind: Kind
    new_tokens: int
    turns: bool = False
    stream: str = ""  # instances are seeded by this name, so that tasks that share it share them

    def cases(self, task: str, model: Model, spec: Spec) -> Iterator[Case]:
        """The cases of all lengths; a context and the longest of its questions take at most `length` tokens."""
        frame = framed(model, spec)
        for length in spec.lengths:
            for i in range(spec.contexts):
                rng = symbols.generator(spec, self.stream or task, length, i)
                build, low = self.kind.draft(rng, spec, length)
                yield self.case(task, f"{task}/{length}/{i}", frame, build, low, length)

    def case(self, task: str, key: str, frame: Frame, build: Draft, low: int, length: int) -> Case:
        """The largest case that fits."""
        encoded = functools.cache(frame.question)

        def ids(n: int) -> tuple[np.ndarray, list[np.ndarray], list[Question]]:
            text, questions = build(n)
            prompts = [encoded(q.text, q.opening, i if self.turns else 0) for i, q in enumerate(questions)]
            return frame.context(text), prompts, questions

        def cost(n: int) -> int:
            context, prompts, _ = ids(n)
            return len(context) + max(map(len, prompts))

        context, prompts, questions = ids(fitted(task, cost, length, low))
        asks = tuple(self.ask(p, q, i) for i, (p, q) in enumerate(zip(prompts, questions, strict=True)))
        return Case(task, key, context, asks, self.turns, about={"length": length})

    def ask(self, prompt: np.ndarray, question: Question, turn: int) -> Ask:
        """A question with RULER's metric, string_match_all."""
        about = {} if question.depth is None else {"depth": question.depth}
        about |= {"turn": turn} if self.turns else {}
        return Ask(prompt, "contains_all", question.references, self.new_tokens, about=about)


TASKS: dict[str, Text] = {
    "ruler.niah_single_1": Text(Niah("noise"), 128),
    "ruler.niah_single_2": Text(Niah(), 128),
    "ruler.niah_single_3": Text(Niah(value="uuids"), 128),
    "ruler.niah_multikey_1": Text(Niah(keys=4), 128),
    "ruler.niah_multikey_2": Text(Niah("needle"), 128),
    "ruler.niah_multikey_3": Text(Niah("needle", key="uuids", value="uuids"), 128),
    "ruler.niah_multivalue": Text(Niah(values=4), 128),
    "ruler.niah_multiquery": Text(Niah(keys=4, queries=4), 128),
    "ruler.vt": Text(Tracking(), 30),
    "ruler.cwe": Text(Common(), 120),
    "ruler.fwe": Text(Frequent(), 50),
    "turns": Text(Niah(keys=0), 24, turns=True, stream="shared"),
    "shared": Text(Niah(keys=0), 24, stream="shared"),
}
