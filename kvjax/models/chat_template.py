"""Chat templates, which write a conversation as the one text that a model reads."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.errors import KvjaxError
from kvjax.models.special_tokens import CONFIG, SpecialTokens
from kvjax.utils.files import parse_json_object, read_text_file
from kvjax.utils.packages import import_optional

if TYPE_CHECKING:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

FILE = "chat_template.jinja"

Conversation = Sequence[Mapping[str, Any]]
"""Messages with a "role" and a "content", and whatever else the template knows."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, the special tokens that it may name, as ("bos_token", "<s>"), and a template for tools."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    tool_source: str | None = None  # the template called "tool_use", where a checkpoint has several

    @classmethod
    def from_directory(cls, directory: Path | Traversable) -> ChatTemplate | None:
        """Reads `chat_template.jinja` or the template of `tokenizer_config.json`, if any, and the special tokens.

        Raises KvjaxError for a damaged file.
        """
        file, config_file = directory / FILE, directory / CONFIG
        config = parse_json_object(config_file.read_bytes(), str(config_file)) if config_file.is_file() else {}
        tokens = tuple(SpecialTokens.from_directory(directory).names.items())
        if file.is_file():
            return cls(read_text_file(file, "the chat template"), tokens)
        source, tool_source = _templates(config.get("chat_template"), config_file)
        return None if source is None else cls(source, tokens, tool_source)

    def compile(self, *, with_tools: bool = False, now: datetime | None = None) -> CompiledTemplate:
        """Compiles the template, or the one for tools if there is one and tools are given.

        A template is a program that somebody else wrote. Jinja's sandbox keeps it from Python's internals, from files
        and from changing the messages. As in transformers, nothing limits its time or memory: a keyboard interrupt
        ends one that loops forever.

        Args:
          with_tools: whether tools will be given.
          now: the date that the template may write.

        Raises:
          KvjaxError: without jinja2, and for a template with an error.
        """
        import_optional("jinja2", "chat templates need", "chat")
        from jinja2 import meta

        environment = _environment()
        environment.globals["strftime_now"] = (now or datetime.now()).strftime
        source = self.tool_source if with_tools and self.tool_source is not None else self.source
        with _named_failures():
            tree = environment.parse(source)
            names = frozenset(meta.find_undeclared_variables(tree))
            return CompiledTemplate(environment.from_string(tree), source, names, dict(self.tokens))

    def render(self, conversations: Sequence[Conversation], now: datetime | None = None) -> list[str]:
        """Writes each conversation as text, up to where the model's answer begins; raises as `compile` does."""
        compiled = self.compile(now=now)
        return [compiled.render(messages) for messages in conversations]


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledTemplate:
    """A template that is ready to render, and the names of the variables that it reads."""

    template: jinja2.Template
    source: str
    names: frozenset[str]
    tokens: Mapping[str, str]

    def render(self, messages: Conversation, **variables: Any) -> str:
        """Writes a conversation as text; variables as in transformers' `apply_chat_template`.

        Raises KvjaxError for messages that the template refuses, and for a template that fails.
        """
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
        with _named_failures():
            return self.template.render({**defaults, **self.tokens, **variables, "messages": messages})


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    """Makes each exception of a template a KvjaxError that says what to do."""
    try:
        yield
    except Exception as e:  # a template can raise anything
        what = f"refuses these messages, saying {str(e)[:500]!r}; change them so"
        if not isinstance(e, _Refusal):
            what = (
                f"fails with {type(e).__name__}: {str(e)[:500]!r}; mend {FILE} (or the chat_template of {CONFIG}) in "
                "the source of the model and convert it again, or write the text that the model expects yourself and "
                "give it to kvjax.generate"
            )
        raise KvjaxError(f"the model's chat template {what}") from e


class _Refusal(Exception):
    """Raised by a template, through `raise_exception`, about messages that it cannot write."""


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for: that of transformers (utils/chat_template_utils.py)."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} .. {% endgeneration %} mark what training learns; here they are only a scope."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Scope:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise _Refusal(message)

    # Jinja's own filter escapes the characters of HTML.
    def tojson(x: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment


def _templates(raw: Any, file: Path | Traversable) -> tuple[str | None, str | None]:
    """The template of `tokenizer_config.json`: a text, or the ones called "default" and "tool_use" of several."""
    if raw is None or isinstance(raw, str):
        return raw, None
    try:
        templates = {x["name"]: x["template"] for x in raw}
        if isinstance(templates["default"], str):
            return templates["default"], templates.get("tool_use")
    except (KeyError, TypeError):
        pass
    raise KvjaxError(
        f'the "chat_template" of {file} is neither a text nor a list of names and templates with one called '
        f'"default"; write the one you want into {FILE} in the source of the model, and convert that'
    )
