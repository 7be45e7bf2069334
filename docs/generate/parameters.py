"""What each parameter of a method means, as its docstring says it.

A docstring says `budget: tokens that stay.` or, of several together, `window, kernel: ..`; and `budget, unit, per as in
`snapkv`` where another method's docstring says it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from docs.generate.catalogue import recipes
from kvjax.methods.registry import MethodEntry

COMMON = {
    "budget": "Tokens of the prompt that are kept per layer and key/value head.",
    "sinks": "First tokens of the text, which always stay.",
    "recent": "Last tokens of the prompt, which always stay.",
    "window": "The last queries of the prompt; their tokens stay.",
    "seed": "Of the random draws.",
    "unit": '`"token"`, or `"chunk8"`, `"page32"` and the like: what is kept or dropped as a whole.',
    "per": '`"head"`, or `"layer"` for one set of tokens for all heads.',
}
"""What parameters mean that many methods have, where a docstring leaves them out."""

SAME = ("budget", "unit", "per")
"""Those of COMMON that mean the same wherever a docstring refers to another method's."""

AS_IN = re.compile(r"^as in `(\w+)`")


class Group(NamedTuple):
    """Parameters that are explained together."""

    names: tuple[str, ...]
    meaning: str


class Description(NamedTuple):
    """A docstring below its first line: what it says of the method, and of its parameters."""

    notes: str
    groups: list[Group]


def describe(recipe: MethodEntry) -> Description:
    """The notes and all parameters of a recipe, in their order; raises LookupError where one is not explained."""
    notes, found = _parts(recipe)
    resolved = {name: (other, meaning) for names, said in found for name, other, meaning in _resolve(names, said)}
    groups: list[Group] = []
    for name in recipe.parameters:
        together, meaning = resolved.get(name) or ((name,), COMMON.get(name, ""))
        if not meaning:
            raise LookupError(f"the docstring of {recipe.name} does not say what {name!r} means")
        if not any(name in group.names for group in groups):
            groups.append(Group(tuple(n for n in recipe.parameters if n in together), _sentence(meaning)))
    return Description(notes, groups)


def _parts(recipe: MethodEntry) -> tuple[str, list[tuple[tuple[str, ...], str]]]:
    """A docstring taken apart: the notes, and what follows the names of parameters."""
    first, *more = map(_flat, re.split(r"\n\s*\n", "\n".join(recipe.text.splitlines()[1:]).strip()))
    names = "|".join(map(re.escape, recipe.parameters))
    starts = list(re.finditer(rf"(?:^|(?<=[.;?] ))((?:{names})(?:, (?:{names}))*)(: | (?=as in `))", first))
    if not names or not starts:
        return "\n\n".join(filter(None, [first, *more])), []
    notes, found = [first[: starts[0].start()]], []
    for start, end in zip(starts, [match.start() for match in starts[1:]] + [len(first)], strict=True):
        said = first[start.end() : end].strip().rstrip(";")
        if end == len(first) or start[2] == " ":  # what follows the last explanation, and a reference, is a note
            said, rest = _first_sentence(said)
            notes.append(rest)
        found.append((tuple(start[1].split(", ")), said))
    return "\n\n".join(filter(None, [" ".join(note.strip() for note in notes if note.strip()), *more])), found


def _first_sentence(text: str) -> tuple[str, str]:
    """A text's first sentence and the rest; a full stop in brackets ends none."""
    for match in re.finditer(r"\. (?=[A-Z'])", text):
        if text.count("(", 0, match.start()) == text.count(")", 0, match.start()):
            return text[: match.start()], text[match.end() :]
    return text, ""


def _resolve(names: tuple[str, ...], said: str) -> list[tuple[str, tuple[str, ...], str]]:
    """(name, those that are explained with it, the meaning), in another method's words where these are referred to."""
    other = AS_IN.match(said)
    if other is None:
        return [(name, names, said) for name in names]
    theirs = {name: (group, meaning) for group, meaning in _parts(recipes()[other[1]])[1] for name in group}
    for name in names:
        if name in SAME or name not in theirs:
            theirs[name] = (name,), COMMON.get(name, "")
    return [(name, *theirs[name]) for name in names]


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."
