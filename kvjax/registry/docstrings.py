"""Parses a method's docstring, the one text that the registry, the command line and the pages of methods read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import NamedTuple

SECTION = re.compile(r"^([A-Z]\w+):$", re.MULTILINE)
ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)


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


def describe_gap(name: str, docs: MethodDocs, parameters: Iterable[str]) -> str:
    """Describes the gap in the docstring of one of kvjax's own methods; "" for a complete one."""
    if missing := [part for part in ("summary", "formula", "differs", "reference") if not getattr(docs, part)]:
        return (
            f"the docstring of {name} has no {', '.join(missing)}; a method of kvjax has a summary and the sections "
            "`Formula:`, `Differs:`, `Args:` and `Reference:`"
        )
    if differing := docs.args.keys() ^ set(parameters):
        return f"`Args:` of {name} must describe each parameter and no other; correct {', '.join(sorted(differing))}"
    return ""
