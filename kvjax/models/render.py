"""Renders chat templates as a script of its own, for `kvjax.models.chat`, with little time, little memory and no files.

A template is a program that somebody else wrote. Jinja's sandbox keeps it from Python's internals and from ranges of
more than 100,000 numbers; the limits on this process end what the sandbox cannot (loops in loops, texts that double).
One JSON document comes on stdin and one goes to stdout. Nothing of kvjax is imported, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LATE = ("encodings.unicode_escape", "jinja2.constants", "jinja2.debug", "pprint", "textwrap", "unicodedata")
"""Modules that are imported when a template first needs them: too late, once no file can be opened."""

ADDED = 100_000  # characters that a template may add to a conversation of which it repeats each twice


class Refused(jinja2.TemplateError):
    """What a template raises about the messages by `raise_exception`."""


class Generation(Extension):
    """{% generation %} .. {% endgeneration %} mark what training learns; here they are but a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Scope:
        """The statements between the two tags."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: transformers' settings and helpers (its utils/chat_template_utils.py)."""

    def raise_exception(message: str) -> None:
        raise Refused(message)

    def tojson(x: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    out = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    out.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    out.filters["tojson"] = tojson
    return out


def render(template: jinja2.Template, messages: list[dict[str, Any]], tokens: dict[str, str]) -> str:
    """One conversation as text, up to where the model's answer begins."""
    text = template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **tokens)
    given = len(json.dumps(messages))
    if len(text) > 2 * given + ADDED:
        raise ValueError(f"it wrote {len(text):,} characters for messages of {given:,}")
    return text


def confine(seconds: int, memory: int) -> None:
    """From now on: so many seconds of processor time, so many bytes of memory, and no file beside the standard ones."""
    for module in LATE:
        importlib.import_module(module)
    try:
        import resource
    except ImportError:  # Windows: only the caller's patience ends a template there
        return
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_AS: memory, resource.RLIMIT_NOFILE: 3}
    for which, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # macOS knows no limit on memory
            resource.setrlimit(which, (most, most))


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """The texts, or what went wrong and what it says."""
    try:
        template = environment(datetime.fromisoformat(asked["now"])).from_string(asked["source"])
        return {"texts": [render(template, x, asked["tokens"]) for x in asked["conversations"]]}
    except Exception as e:  # a template can raise anything
        return {"error": type(e).__name__, "says": str(e)[:500]}


if __name__ == "__main__":
    job = json.load(sys.stdin)
    confine(job["seconds"], job["memory"])
    json.dump(answer(job), sys.stdout)
