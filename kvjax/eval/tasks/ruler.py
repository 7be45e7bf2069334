"""RULER's synthetic tasks as text for real tokenizers (Hsieh et al., 2024), and recall in turns after SCBench.

RULER's two tasks of questions about documents are in `kvjax/eval/tasks/ruler_questions.py`.

Prompts, numbers of needles, metric and new tokens are those of RULER's standard tasks, word for word. These differ:
keys and words are made here instead of taken from packages; essays are `spec.text` or held-out source code; each
instance starts elsewhere in the essay; a length counts the question but not the answer; several keys of a context may
be asked, each on its own. Context and question are encoded apart, at a line break (`encoding.prompt_ids`). A chat
model's answer starts with given words, as in RULER (answer_prefix).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import string
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvjax.eval.tasks import haystack, symbols
from kvjax.eval.tasks.case import Ask, Case, Spec, TooShort
from kvjax.eval.tasks.chat_format import chat_format
from kvjax.eval.tasks.encoding import find_largest
from kvjax.eval.tasks.haystack import STRING_KINDS, DistinctStrings, Essay, letters
from kvjax.models.model import Model

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = np.round(np.linspace(0, 100, 40)) / 100
SHORT_CONTEXT_TOKENS = 4096  # below, `cwe` is easier


@dataclasses.dataclass(frozen=True)
class TextQuestion:
    """A question's text, the strings of its answer, and the depth of the fact (0 to 1, in characters)."""

    text: str
    references: tuple[str, ...]
    depth: float | None = None
    opening: str = ""  # the first words of the answer, which are given


Draft = Callable[[int], tuple[str, list[TextQuestion]]]
"""Units of haystack -> (the context's text, ended by a line break, its questions)."""


class DrawnInstance(NamedTuple):
    """An instance in a haystack of any size, from the fewest to the most units of haystack."""

    build: Draft
    fewest: int
    most: int = 2**40


class InstanceKind(Protocol):
    """A kind of instance that a `RulerTask` asks about."""

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> DrawnInstance:
        """Draws an instance for contexts of `length` tokens."""
        ...


@dataclasses.dataclass(frozen=True)
class Niah:
    """Needles, each a magic value of a key: `keys` (0: one per question) with `values` each, `queries` at once."""

    haystack: str = "essay"  # or "noise", or "needle": more needles
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> DrawnInstance:
        """See `InstanceKind`; a unit is a word, a line of noise or a needle."""
        essay = Essay(spec, rng) if self.haystack == "essay" else None
        avoid = essay.whole if essay else NOISE
        keys, values = (DistinctStrings(STRING_KINDS[kind](rng), avoid) for kind in (self.key, self.value))
        n = max(self.keys or spec.questions, self.queries)
        depths = sorted(draw_depths(rng, n * self.values).tolist())
        # `build` is called for several sizes until one fits, and draws the same each time.
        seed = int(rng.integers(2**32))

        def build(units: int) -> tuple[str, list[TextQuestion]]:
            rng = np.random.default_rng(seed)
            num_keys = n if essay or self.haystack == "noise" else n + units
            names = keys.first(num_keys)
            table = np.array(values.first(num_keys * self.values)).reshape(num_keys, self.values)
            order = rng.permutation(num_keys * self.values)
            needles = [NEEDLE.format(kind=self.value, key=names[j // self.values], value=table.flat[j]) for j in order]
            if essay:
                text, starts = haystack.insert_needles(essay.words(units), needles, depths)
                text = text.rstrip()
            else:
                text, starts = _scatter_lines(needles, units if self.haystack == "noise" else 0, rng)
            head = self._phrase(
                "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
            )
            head += self._phrase("I will quiz you about the {kind} afterwards.\n")
            where = {j: (len(head) + s) / (len(head) + len(text)) for j, s in zip(order, starts, strict=True)}
            return f"{head}{text}\n", self._questions(rng, spec, names, table, where)

        return DrawnInstance(build, n * self.values)

    def _phrase(self, template: str, query: str = "") -> str:
        """Puts RULER's words in the singular for one answer, as its scripts do."""
        kind = self.value
        if self.queries * self.values == 1:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            kind = kind[:-1]
        return template.format(kind=kind, query=query)

    def _questions(
        self, rng: np.random.Generator, spec: Spec, names: list[str], table: np.ndarray, where: dict[int, float]
    ) -> list[TextQuestion]:
        """Makes up to `spec.questions` questions of different keys; `queries` keys are one question."""
        num_questions = 1 if self.queries > 1 else min(spec.questions, len(names))
        chosen = rng.permutation(len(names))[: num_questions * self.queries].reshape(num_questions, self.queries)
        questions = []
        for key_indices in chosen:
            asked = [names[k] for k in key_indices]
            query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
            text = "What are all the special magic {kind} for {query} mentioned in the provided text?"
            opening = " The special magic {kind} for {query} mentioned in the provided text are"
            depth = min(where[k * self.values + v] for k in key_indices for v in range(self.values))
            text, opening = self._phrase(text, query), self._phrase(opening, query)
            questions.append(TextQuestion(text, tuple(table[key_indices].ravel().tolist()), depth, opening))
        return questions


def draw_depths(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draws n of RULER's 40 depths, different ones while there are enough."""
    return rng.choice(DEPTHS, n, replace=n > len(DEPTHS))


def _scatter_lines(facts: Sequence[str], num_noise: int, rng: np.random.Generator) -> tuple[str, list[int]]:
    """(facts in their order among lines of noise, the character at which each fact starts)."""
    total = len(facts) + num_noise
    fact_lines = np.sort(rng.choice(total, len(facts), replace=False))
    lines = [NOISE] * total
    for number, fact in zip(fact_lines, facts, strict=True):
        lines[number] = fact
    starts = np.cumsum([0, *(len(x) + 1 for x in lines)])
    return "\n".join(lines), starts[fact_lines].tolist()


@dataclasses.dataclass(frozen=True)
class VariableTracking:
    """One chain of `hops` assignments in noise, after one worked example."""

    hops: int = 4

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> DrawnInstance:
        """See `InstanceKind`; a unit is a line of noise. The example has five; RULER's has up to 500 tokens."""
        names = DistinctStrings(letters(rng, string.ascii_uppercase, 5)).first(self.hops + 1)
        short = DistinctStrings(letters(rng, string.ascii_uppercase, 3)).first(self.hops + 1)
        value, other = DistinctStrings(haystack.drop_repetitions(lambda: str(rng.integers(10000, 99999)))).first(2)
        example, solved = self._chain(short, other, 5, np.random.default_rng(rng.integers(2**32)))
        example = f"{example}{solved.text}{solved.opening} {' '.join(short)}\n\n"
        seed = int(rng.integers(2**32))

        def build(units: int) -> tuple[str, list[TextQuestion]]:
            text, question = self._chain(names, value, units, np.random.default_rng(seed))
            assert question.depth is not None
            depth = (len(example) + question.depth * len(text)) / (len(example) + len(text))
            return example + text, [dataclasses.replace(question, depth=depth)]

        return DrawnInstance(build, self.hops + 1)

    def _chain(
        self, names: Sequence[str], value: str, num_noise: int, rng: np.random.Generator
    ) -> tuple[str, TextQuestion]:
        """(context, question, whose depth is that of the chain's last link)."""
        chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names))]
        text, starts = _scatter_lines(chain, num_noise, rng)
        head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        question = f"Question: Find all variables that are assigned the value {value} in the text above."
        opening = " Answer: According to the chain(s) of variable assignment in the text above, "
        opening += f"{len(names)} variables are assigned the value {value}, they are: "
        depth = (len(head) + starts[-1]) / (len(head) + len(text) + 1)
        return f"{head}{text}\n", TextQuestion(question, tuple(names), depth, opening)


@dataclasses.dataclass(frozen=True)
class CommonWords:
    """10 words often and others seldom in a numbered list, after one worked example."""

    common: int = 10

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> DrawnInstance:
        """See `InstanceKind`; a unit is a different word."""
        words = DistinctStrings(haystack.syllable_words(rng))
        if length < SHORT_CONTEXT_TOKENS:
            (example_size, example_often, example_seldom), (often, seldom) = (20, 3, 1), (6, 1)
        else:
            (example_size, example_often, example_seldom), (often, seldom) = (40, 10, 3), (30, 3)
        first = words.first(example_size)
        example = self._word_list(first, example_often, example_seldom, np.random.default_rng(rng.integers(2**32)))
        answer = " ".join(f"{i + 1}. {word}" for i, word in enumerate(first[: self.common]))
        seed = int(rng.integers(2**32))
        question = "Question: What are the 10 most common words in the above list?"
        opening = " Answer: The top 10 words that appear most often in the list are:"

        def build(units: int) -> tuple[str, list[TextQuestion]]:
            chosen = words.first(example_size + units)[example_size:]
            text = self._word_list(chosen, often, seldom, np.random.default_rng(seed))
            asked = TextQuestion(question, tuple(chosen[: self.common]), opening=opening)
            return f"{example}{question}{opening} {answer}\n{text}", [asked]

        return DrawnInstance(build, 2 * self.common)

    def _word_list(self, words: list[str], often: int, seldom: int, rng: np.random.Generator) -> str:
        """The list, in which the first words of `words` are often."""
        shuffled = rng.permutation(words[: self.common] * often + words[self.common :] * seldom)
        head = "Below is a numbered list of words. In these words, some appear more often than others. "
        head += "Memorize the ones that appear most often.\n"
        return head + " ".join(f"{i + 1}. {word}" for i, word in enumerate(shuffled)) + "\n"


@dataclasses.dataclass(frozen=True)
class FrequentWords:
    """Coded words by a zeta law (alpha 2), the first rank dots; the next three are asked for."""

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> DrawnInstance:
        """See `InstanceKind`; a unit is a word of the text, and rounding drops some words."""
        ranked = DistinctStrings(letters(rng, string.ascii_lowercase, 6)).first(max(5, length // 50) - 1)
        ranked = ["...", *ranked]
        fractions = np.arange(1, len(ranked) + 1) ** -2.0 / (math.pi**2 / 6)
        seed = int(rng.integers(2**32))

        def build(units: int) -> tuple[str, list[TextQuestion]]:
            words = np.repeat(ranked, (units * fractions).astype(int))
            text = " ".join(np.random.default_rng(seed).permutation(words).tolist())
            head = "Read the following coded text and track the frequency of each coded word. "
            head += "Find the three most frequently appeared coded words. "
            question = "Question: Do not provide any explanation. Please ignore the dots '....'. "
            question += "What are the three most frequently appeared words in the above coded text?"
            opening = " Answer: According to the coded text above, the three most frequently appeared words are:"
            return f"{head}{text}\n", [TextQuestion(question, tuple(ranked[1:4]), opening=opening)]

        return DrawnInstance(build, 53)  # from here on the fourth rank is more frequent than the fifth


@dataclasses.dataclass(frozen=True)
class RulerTask:
    """A task whose instances are drafted by `kind`, and answered with at most `new_tokens` tokens."""

    kind: InstanceKind
    new_tokens: int
    turns: bool = False  # whether the questions are a conversation
    stream: str = ""  # instances are seeded by this name, so that tasks of one stream have the same instances
    metric: str = "contains_all"  # RULER's string_match_all

    def cases(self, task: str, model: Model, spec: Spec) -> Iterator[Case]:
        """Makes the cases of all lengths; a context and the longest of its questions take at most `length` tokens."""
        chat = chat_format(model, spec)
        for length, i in itertools.product(spec.lengths, range(spec.contexts)):
            rng = symbols.instance_generator(spec, self.stream or task, length, i)
            build, fewest, most = self.kind.draft(rng, spec, length)
            # The questions stay the same for every size of the haystack that is tried.
            encode_question = functools.cache(chat.encode_question)

            def encode(
                n: int, build=build, encode_question=encode_question
            ) -> tuple[np.ndarray, list[np.ndarray], list[TextQuestion]]:
                text, questions = build(n)
                prompts = [
                    encode_question(q.text, q.opening, not (turn and self.turns)) for turn, q in enumerate(questions)
                ]
                return chat.encode_context(text), prompts, questions

            def cost(n: int, encode=encode) -> int:
                context, prompts, _ = encode(n)
                return len(context) + max(map(len, prompts))

            units = find_largest(task, cost, length, fewest, most)
            if units == most:
                raise TooShort(
                    f"the {most:,} documents of task {task!r} do not fill {length} tokens; use a shorter length"
                )
            context, prompts, questions = encode(units)
            asks = []
            for turn, (prompt, question) in enumerate(zip(prompts, questions, strict=True)):
                about = {} if question.depth is None else {"depth": question.depth}
                about |= {"turn": turn} if self.turns else {}
                asks.append(Ask(prompt, self.metric, question.references, self.new_tokens, about=about))
            yield Case(task, f"{task}/{length}/{i}", context, tuple(asks), self.turns, about={"length": length})


TASKS: dict[str, RulerTask] = {
    "ruler.niah_single_1": RulerTask(Niah("noise"), 128),
    "ruler.niah_single_2": RulerTask(Niah(), 128),
    "ruler.niah_single_3": RulerTask(Niah(value="uuids"), 128),
    "ruler.niah_multikey_1": RulerTask(Niah(keys=4), 128),
    "ruler.niah_multikey_2": RulerTask(Niah("needle"), 128),
    "ruler.niah_multikey_3": RulerTask(Niah("needle", key="uuids", value="uuids"), 128),
    "ruler.niah_multivalue": RulerTask(Niah(values=4), 128),
    "ruler.niah_multiquery": RulerTask(Niah(keys=4, queries=4), 128),
    "ruler.vt": RulerTask(VariableTracking(), 30),
    "ruler.cwe": RulerTask(CommonWords(), 120),
    "ruler.fwe": RulerTask(FrequentWords(), 50),
    "turns": RulerTask(Niah(keys=0), 24, turns=True, stream="shared"),
    "shared": RulerTask(Niah(keys=0), 24, stream="shared"),
}
