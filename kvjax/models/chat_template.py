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

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"

Conversation = Sequence[Mapping[str, Any]]
"""Messages with a "role" and a "content", and whatever else the template knows."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, the special tokens that it may name, as ("bos_token", "<s>"), and templates with other names.

    `source` is None for a checkpoint whose templates all have a name.
    """

    source: str | None
    tokens: tuple[tuple[str, str], ...] = ()
    named: tuple[tuple[str, str], ...] = ()  # such as ("tool_use", ..)

    @classmethod
    def from_directory(cls, directory: Path | Traversable) -> ChatTemplate | None:
        """Reads the templates of a directory, if it has any, and the special tokens.

        They stand in `chat_template.jinja` and `additional_chat_templates/NAME.jinja`. Without a default one there, the
        `chat_template` of `tokenizer_config.json`, a text or several with names, is read too.

        Raises:
          KvjaxError: for a damaged file.
        """
        file, config_file, folder = directory / FILE, directory / CONFIG, directory / FOLDER
        sources = {}
        if folder.is_dir():
            files = {f.name.removesuffix(".jinja"): f for f in folder.iterdir() if f.name.endswith(".jinja")}
            sources = {name: read_text_file(files[name], "the chat template") for name in sorted(files)}
        if file.is_file():
            sources["default"] = read_text_file(file, "the chat template")
        if "default" not in sources and config_file.is_file():
            config = parse_json_object(config_file.read_bytes(), str(config_file))
            sources = _config_templates(config.get("chat_template"), config_file) | sources
        if not sources:
            return None
        tokens = tuple(SpecialTokens.from_directory(directory).names.items())
        return cls(sources.pop("default", None), tokens, tuple(sources.items()))

    def find(self, chosen: str | None = None, *, with_tools: bool = False) -> str:
        """Returns the source of a template as transformers chooses it.

        Args:
          chosen: a name, or a template itself; None for the one called "tool_use" if there is one and tools are given,
            the default one otherwise.
          with_tools: whether tools will be given.

        Raises:
          KvjaxError: there is none of that name.
        """
        sources = dict(self.named) if self.source is None else {"default": self.source, **dict(self.named)}
        name = chosen
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in sources else "default"
        if isinstance(name, str) and name in sources:
            return sources[name]
        if not isinstance(name, str) or "{" not in name:  # a text without it would be the same prompt for all messages
            raise KvjaxError(
                f"the model's chat templates are called {', '.join(sources) or 'nothing'}, and none is called "
                f"{name!r:.60}; give chat_template= one of these names, or a Jinja template"
            )
        return name

    def compile(
        self, chosen: str | None = None, *, with_tools: bool = False, now: datetime | None = None
    ) -> CompiledTemplate:
        """Compiles the template that `find` returns.

        A template is a program that somebody else wrote. Jinja's sandbox keeps it from Python's internals, from files
        and from changing the messages. As in transformers, nothing limits its time or memory: a keyboard interrupt
        ends one that loops forever.

        Args:
          chosen: as in `find`.
          with_tools: as in `find`.
          now: the date that the template may write.

        Raises:
          KvjaxError: without jinja2, for a name that there is not, and for a template with an error.
        """
        source = self.find(chosen, with_tools=with_tools)
        import_optional("jinja2", "chat templates need", "chat")
        from jinja2 import meta

        environment = _environment()
        environment.globals["strftime_now"] = (now or datetime.now()).strftime
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
                f"fails with {type(e).__name__}: {str(e)[:500]!r}; fix {FILE} (or the chat_template of {CONFIG}) in "
                "the source of the model and convert it again, or the template that you gave as chat_template, or "
                "write the text that the model expects yourself and give it to kvjax.generate"
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


def _config_templates(raw: Any, file: Path | Traversable) -> dict[str, str]:
    """The templates of `tokenizer_config.json` by name: none, a text, or several."""
    if raw is None:
        return {}
    try:
        templates = {x["name"]: x["template"] for x in raw} if isinstance(raw, list) else raw
        templates = templates if isinstance(templates, dict) else {"default": templates}
        if templates and all(isinstance(x, str) for texts in templates.items() for x in texts):
            return templates
    except (KeyError, TypeError):
        pass
    raise KvjaxError(
        f'the "chat_template" of {file} is neither a text nor a list of names and templates; write the one you want '
        f"into {FILE} in the source of the model, and convert that"
    )
