"""Parses a method's docstring, the one text that the registry, the command line and the pages of methods read."""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

from kvjax.cache.eviction.selection import make_selection
from kvjax.errors import KvjaxError

SECTION = re.compile(r"^([A-Z]\w+):$", re.MULTILINE)
ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)
AS_IN = re.compile(r"^as in `(\w+)`")


class MethodDocs(NamedTuple):
    """The parts of a method's docstring, each empty where the docstring has none.

    Args:
      summary: the first line.
      description: the paragraphs between the summary and the first section.
      formula: what the method computes.
      differs: the differences from the paper or its public code.
      args: the meaning of each parameter, as written; `as in` another method is not resolved.
      reference: the paper with its section, or another source.
    """

    summary: str = ""
    description: str = ""
    formula: str = ""
    differs: str = ""
    args: dict[str, str] = {}
    reference: str = ""


def parse_docstring(text: str) -> MethodDocs:
    """Parses a docstring in Google style; several parameters may share a line, as in `sinks, recent: ..`."""
    # A line such as "Formula:" splits the text into the introduction and pairs of a title and a body.
    introduction, *titled = SECTION.split(inspect.cleandoc(text))
    sections = {title: inspect.cleandoc(body) for title, body in zip(titled[::2], titled[1::2], strict=True)}
    summary, _, description = introduction.strip().partition("\n")
    # A line of `Args` that is not indented begins the next parameters.
    _, *described = ARGUMENT.split(sections.get("Args", ""))
    args = {
        name: _join_lines(meaning)
        for names, meaning in zip(described[::2], described[1::2], strict=True)
        for name in names.split(", ")
    }
    formula, differs, reference = (
        _join_lines(sections.get(title, "")) for title in ("Formula", "Differs", "Reference")
    )
    return MethodDocs(summary, _join_lines(description), formula, differs, args, reference)


def _join_lines(text: str) -> str:
    """Joins the lines of each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip()))


def check_docstring(name: str, docs: MethodDocs, parameters: list[str]) -> None:
    """Raises KvjaxError unless the docstring of one of kvjax's own methods is complete."""
    missing = [part for part in ("summary", "formula", "differs", "reference") if not getattr(docs, part)]
    undescribed = [parameter for parameter in parameters if parameter not in docs.args]
    unknown = [parameter for parameter in docs.args if parameter not in parameters]
    if missing:
        problem = (
            f"the docstring of {name} has no {', '.join(missing)}; a method of kvjax has a summary and the sections "
            "`Formula:`, `Differs:`, `Args:` and `Reference:`"
        )
    elif undescribed:
        problem = f"`Args:` of {name} does not describe {', '.join(undescribed)}"
    elif unknown:
        problem = f"`Args:` of {name} describes {', '.join(unknown)}, which it does not have"
    else:
        return
    raise KvjaxError(problem)


def resolve_meaning(parameter: str, docs: MethodDocs, methods: dict[str, MethodDocs]) -> str:
    """Replaces `as in` another method, or `make_selection`, in a parameter's meaning by what is written there.

    Args:
      parameter: name of the parameter.
      docs: docstring that describes it, or refers to another one.
      methods: docstrings of all methods by name.

    Returns:
      A sentence, or "" where the docstring does not describe the parameter.

    Raises:
      KvjaxError: the docstring refers to a method that does not describe the parameter.
    """
    meaning = docs.args.get(parameter, "")
    if referral := AS_IN.match(meaning):
        name = referral[1]
        other = parse_docstring(make_selection.__doc__ or "") if name == make_selection.__name__ else methods.get(name)
        if other is None or parameter not in other.args:
            raise KvjaxError(f"`Args:` refers to `{name}` for {parameter}, which is not described there")
        meaning = resolve_meaning(parameter, other, methods).rstrip(".") + meaning[referral.end() :]
    if not meaning:
        return ""
    meaning = meaning[0].upper() + meaning[1:]
    return meaning if meaning.endswith(".") else f"{meaning}."
