"""Chat templates: how a checkpoint writes a conversation as the one text that its model reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.errors import KvjaxError
from kvjax.utils import json_documents

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"

Conversation = Sequence[Mapping[str, Any]]
"""Messages with a "role" and a "content", and whatever else the template knows."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template as text, and the special tokens that it may name, such as ("bos_token", "<s>")."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_directory(cls, directory: Path | Traversable) -> ChatTemplate | None:
        """What `chat_template.jinja` or `tokenizer_config.json` holds, if any; raises KvjaxError for a damaged one."""
        config = _config(directory / CONFIG)
        file = directory / FILE
        source = _text(file) if file.is_file() else _default(config.get("chat_template"), directory / CONFIG)
        return None if source is None else cls(source, tuple(_tokens(config).items()))

    def names(self, role: str) -> bool:
        """Whether the template spells this role out."""
        return any(f"{quote}{role}{quote}" in self.source for quote in "'\"")

    def render(self, conversations: Sequence[Conversation], now: datetime | None = None) -> list[str]:
        """Each conversation as text, up to where the model's answer begins; now: the date that a template may write.

        A template is a program that somebody else wrote. Jinja's sandbox keeps it from Python's internals, from files
        and from changing the messages; as in transformers, nothing limits its time or memory: one that loops forever
        ends with a keyboard interrupt. Raises KvjaxError without jinja2, for what the template refuses, and for a
        template that fails.
        """
        try:
            environment = _environment()
        except ImportError as e:
            raise KvjaxError("chat templates need jinja2; pip install 'kvjax[chat]'") from e
        environment.globals["strftime_now"] = (now or datetime.now()).strftime
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **dict(self.tokens)}
        try:
            template = environment.from_string(self.source)
            return [template.render(messages=messages, **given) for messages in conversations]
        except _Refused as e:
            raise KvjaxError(
                f"the chat template refuses these messages, saying {str(e)[:500]!r}; change them so"
            ) from e
        except Exception as e:  # a template can raise anything
            raise KvjaxError(
                f"the model's chat template fails with {type(e).__name__}: {str(e)[:500]!r}; mend {FILE} (or the "
                f"chat_template of {CONFIG}) in the source of the model and convert it again, or write the text that "
                "the model expects yourself and give it to kvjax.generate"
            ) from e


class _Refused(Exception):
    """What a template raises about the messages by `raise_exception`."""


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: transformers' settings and helpers (its utils/chat_template_utils.py)."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} .. {% endgeneration %} mark what training learns; here they are but a scope."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Scope:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise _Refused(message)

    # Jinja's own filter escapes the characters of HTML.
    def tojson(x: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment


def _text(file: Path | Traversable) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise KvjaxError(f"{file} is not UTF-8 ({e}); copy it again") from e


def _config(file: Path | Traversable) -> dict[str, Any]:
    """`tokenizer_config.json`, empty where there is none."""
    if not file.is_file():
        return {}
    return json_documents.parse_object(_text(file), str(file))


def _default(found: Any, file: Path | Traversable) -> str | None:
    """The template of `tokenizer_config.json`: a text, or the one called "default" of several."""
    if found is None or isinstance(found, str):
        return found
    try:
        named = {x["name"]: x["template"] for x in found}
        if isinstance(named["default"], str):
            return named["default"]
    except (KeyError, TypeError):
        pass
    raise KvjaxError(
        f'the "chat_template" of {file} is neither a text nor a list of names and templates with one called '
        f'"default"; write the one you want into {FILE} in the source of the model, and convert that'
    )


def _tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens by name: {"bos_token": "<s>"} and {"bos_token": {"content": "<s>"}} say the same."""
    given = {k: v["content"] if isinstance(v, dict) and "content" in v else v for k, v in config.items()}
    return {k: v for k, v in given.items() if k.endswith("_token") and isinstance(v, str)}
