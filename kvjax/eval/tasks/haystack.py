"""A needle in a haystack over depth and length (Kamradt, 2023; SpeCache, section 4.3 and Figure 4), and haystacks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import uuid
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvjax.eval.tasks import symbols
from kvjax.eval.tasks.case import Ask, Case, Spec
from kvjax.eval.tasks.chat_format import chat_format
from kvjax.eval.tasks.encoding import find_largest
from kvjax.models.model import Model
from kvjax.testbed import tasks
from kvjax.utils import arguments

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
NEEDLE_QUESTION = "What is the best thing to do in San Francisco?"
OPENING = " Here is the most relevant sentence in the context:"  # of the answer, which the model goes on with
QUESTION = NEEDLE_QUESTION + OPENING
PHRASES = ("eat a sandwich", "Dolores Park", "sunny day")  # an answer is scored by these, in place of a model as judge
NEW_TOKENS = 32
NEEDLE_SYMBOLS = 4  # of the shipped model's needle
LINE_END, SENTENCE_END = re.compile(r"\n+"), re.compile(r"(?<=[.!?])\s+|(?<=[。！？؟।])\s*")
IDEOGRAPH = r"\u2e80-\ud7af\uf900-\ufaff\ufe30-\uffef"  # Chinese, Japanese and Korean, with their punctuation
WORD = re.compile(rf"[ \t]*(?:[{IDEOGRAPH}]|[^\s{IDEOGRAPH}]{{1,100}})[ \t]*[\r\n]*")
LONG_SENTENCE = 1000  # characters; the longest of the essays has 890

ADJECTIVES = """able aged amber ample angry awake basic bitter blank bold brave brief bright broad broken busy
calm careful cheap clean clear clever cold common cool crisp cruel curious damp dark deep direct distant double
dry dull eager early easy elder empty equal exact faint fair famous fancy fast fierce final firm flat fluffy
fresh gentle giant glad golden grand great green happy harsh heavy hidden hollow honest humble icy idle jolly
keen kind large late lazy light little lively lonely loose loud lucky mellow mild modern muddy narrow neat noble
odd pale plain polite proud""".split()
NOUNS = """acorn anchor apple arrow badge bakery barrel basin basket beacon bell bench blanket boat bottle
branch bridge bucket button cabin candle canyon carpet castle cellar chain chalk cherry circle cloud clover
coast collar compass copper corner cotton cradle crystal curtain desert dragon drum eagle engine falcon feather
fence ferry fiddle forest fountain garden glacier glove hammer harbor helmet hill hotel island jacket jungle
kettle ladder lagoon lantern lemon letter library lizard magnet maple market meadow mirror mountain needle ocean
orchard otter palace paper parrot pebble pepper piano pillow planet pocket pony puzzle rabbit river rocket
saddle sailor shadow shelter silver""".split()
CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aeiou"


def niah(model: Model, spec: Spec) -> Iterator[Case]:
    """One needle at each depth of a haystack, for a heat map of lengths and depths."""
    if not symbols.knows_symbols(model):
        yield from needle_cases("niah", model, spec, Wording())
        return
    fillers = symbols.make_fillers(spec)
    for key, length, depth, i in _needle_places("niah", spec):
        rng = symbols.instance_generator(spec, key)
        make = functools.partial(tasks.needle, rng, filler=fillers[i % 2], depth=depth, span=NEEDLE_SYMBOLS)
        yield symbols.instance_case("niah", key, symbols.make_instance("niah", make, length), 1, depth=depth)


@dataclasses.dataclass(frozen=True)
class Wording:
    """The text around a haystack, by default none, and the question, by default the original one."""

    before: str = ""
    after: str = "\n\n"
    question: str = NEEDLE_QUESTION


def needle_cases(task: str, model: Model, spec: Spec, wording: Wording) -> Iterator[Case]:
    """Makes the cases of a task of one needle in a text."""
    chat = chat_format(model, spec)
    for key, length, depth, _ in _needle_places(task, spec):
        essay = Essay(spec, symbols.instance_generator(spec, key))
        prompt = chat.encode_question(wording.question, OPENING)

        def encode(n: int, essay=essay, depth=depth) -> np.ndarray:
            text = insert_needles(essay.words(n), [NEEDLE], [depth])[0].rstrip()
            return chat.encode_context(wording.before + text + wording.after)

        n = find_largest(task, lambda n, encode=encode, prompt=prompt: len(encode(n)) + len(prompt), length, 1)
        ask = Ask(prompt, "contains_all", PHRASES, NEW_TOKENS, about={"depth": depth})
        yield Case(task, key, encode(n), (ask,), about={"length": length, "depth": depth})


def _needle_places(task: str, spec: Spec) -> Iterator[tuple[str, int, float, int]]:
    """(key, length, depth, number) of each case."""
    num_depths = arguments.integer("depths", spec.depths, 1, 101)
    for length, depth in itertools.product(spec.lengths, np.linspace(0, 1, num_depths).tolist()):
        yield from ((f"{task}/{length}/{depth:.2f}/{i}", length, depth, i) for i in range(spec.contexts))


class Essay:
    """Running text for a haystack, from the start of a random sentence, and from the text's start after its end.

    The text is that of `spec.text`, on one line as in RULER unless it keeps its lines, or by default held-out source
    code, which keeps them.
    """

    def __init__(self, spec: Spec, rng: np.random.Generator, keep_lines: bool = False):
        text = symbols.read_source(spec)
        self.whole, self.starts, sentences = _index_words(
            text if keep_lines or spec.text is None else re.sub(r"\s+", " ", text).strip()
        )
        self.first = int(rng.choice(sentences))

    def words(self, n: int) -> str:
        """Returns the first n words, with the space between them."""
        if n > len(self.starts):
            rounds, n = divmod(n, len(self.starts))
            return self.words(len(self.starts)) * rounds + (self.words(n) if n else "")
        last, total = self.first + n, len(self.starts)
        if last < total:
            return self.whole[self.starts[self.first] : self.starts[last]]
        return self.whole[self.starts[self.first] :] + self.whole[: self.starts[last - total]]


@functools.lru_cache(2)
def _index_words(text: str) -> tuple[str, np.ndarray, np.ndarray]:
    """(the text, ended by space, the characters at which words start, numbers of the words that start a sentence).

    Where a script has no spaces, its characters count as words.
    """
    text = text.lstrip("\r\n")
    text = text if text[-1:].isspace() else text + " "
    starts = np.array([m.start() for m in WORD.finditer(text)])
    at = np.searchsorted(starts, [0, *_sentence_starts(text)])
    return text, starts, np.unique(at[at < len(starts)])


def _sentence_starts(text: str) -> list[int]:
    """Characters at which lines start, or sentences in a text of one line; neither 0 nor the end.

    A long line is divided into its sentences, too, and a long sentence, as of a table or of minified code, at its
    words: without a place of their own all needles would stand together at its beginning.
    """
    lines = {m.end() for m in LINE_END.finditer(text)} - {len(text)}
    sentences = lines | _divide(text, lines, SENTENCE_END, LONG_SENTENCE if lines else 0)
    return sorted((sentences | _divide(text, sentences, WORD, LONG_SENTENCE)) - {0, len(text)})


def _divide(text: str, starts: set[int], ends: re.Pattern[str], most: int) -> set[int]:
    """Characters after the `ends` in each stretch between two starts that is longer than `most` characters."""
    stretches = itertools.pairwise(sorted({0, *starts, len(text)}))
    long = [(start, end) for start, end in stretches if end - start > most]
    return {match.end() for start, end in long for match in ends.finditer(text, start, end)}


def insert_needles(text: str, needles: Sequence[str], depths: Sequence[float]) -> tuple[str, list[int]]:
    """Inserts each needle as a sentence of its own.

    A needle goes to the last end of a sentence or line at or before its depth (Kamradt, 2023), or to the end.

    Args:
      text: the haystack.
      needles: the sentences.
      depths: fraction of the text before each needle, ascending.

    Returns:
      The text, and the character at which each needle starts.
    """
    ends = np.array([0, *_sentence_starts(text)])
    cuts = [len(text) if d >= 1 else int(ends[np.searchsorted(ends, d * len(text), "right") - 1]) for d in depths]
    out, starts, last, gap = "", [], 0, "\n" if "\n" in text else " "
    for needle, cut in zip(needles, cuts, strict=True):
        out += text[last:cut]
        out += "" if not out or out.endswith(gap) else gap
        starts.append(len(out))
        out += needle + gap
        last = cut
    return out + text[last:], starts


class DistinctStrings:
    """Different strings from an endless source, drawn as they are needed; none of them occurs in `text`."""

    def __init__(self, source: Iterator[str], text: str = ""):
        self.source, self.items = (x for x in source if x not in text), []

    def first(self, n: int) -> list[str]:
        """Returns the first n, the same at every call."""
        self.items += itertools.islice(self.source, max(0, n - len(self.items)))
        return self.items[:n]


def syllable_words(rng: np.random.Generator) -> Iterator[str]:
    """Yields half a million different words of three syllables; none is a part of another."""
    syllables = [c + v for c in CONSONANTS for v in VOWELS]
    for i in rng.permutation(len(syllables) ** 3):
        yield "".join(syllables[i // len(syllables) ** k % len(syllables)] for k in range(3))


def words(rng: np.random.Generator) -> Iterator[str]:
    """Yields adjective-noun pairs, and once all pairs are used adjectives with words of syllables."""
    for i in rng.permutation(len(ADJECTIVES) * len(NOUNS)):
        yield f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}"
    for word in syllable_words(rng):
        yield f"{ADJECTIVES[rng.integers(len(ADJECTIVES))]}-{word}"


def numbers(rng: np.random.Generator) -> Iterator[str]:
    """Yields different numbers of seven digits."""
    return drop_repetitions(lambda: str(rng.integers(10**6, 10**7)))


def uuids(rng: np.random.Generator) -> Iterator[str]:
    """Yields random UUIDs of version 4."""
    return (str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in itertools.count())


def letters(rng: np.random.Generator, alphabet: str, n: int) -> Iterator[str]:
    """Yields different strings of n letters."""
    return drop_repetitions(lambda: "".join(rng.choice(list(alphabet), n)))


def drop_repetitions(draw: Callable[[], str]) -> Iterator[str]:
    """Yields the strings that `draw` returns, each once."""
    drawn: set[str] = set()
    while True:
        if (x := draw()) not in drawn:
            drawn.add(x)
            yield x


STRING_KINDS = {"words": words, "numbers": numbers, "uuids": uuids}
