"""Chat templates, which write a conversation as the one text that a model reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.errors import KvjaxError
from kvjax.models.special_tokens import CONFIG, SpecialTokens
from kvjax.utils import json_documents

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

FILE = "chat_template.jinja"
ROLES = ("system", "developer", "user", "assistant", "tool")
EXAMPLE = '[{"role": "user", "content": "Hello"}]'

Conversation = Sequence[Mapping[str, Any]]
"""Messages with a "role" and a "content", and whatever else the template knows."""

Messages = Conversation | Sequence[Conversation]
"""One conversation, or a batch."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the special tokens that it may name, as ("bos_token", "<s>")."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_directory(cls, directory: Path | Traversable) -> ChatTemplate | None:
        """Reads `chat_template.jinja` or the template of `tokenizer_config.json`, if any, and the special tokens.

        Raises KvjaxError for a damaged file.
        """
        file, config_file = directory / FILE, directory / CONFIG
        config = json_documents.parse_object(_read(config_file), str(config_file)) if config_file.is_file() else {}
        source = _read(file) if file.is_file() else _default_template(config.get("chat_template"), config_file)
        tokens = tuple(SpecialTokens.from_directory(directory).names.items())
        return None if source is None else cls(source, tokens)

    def render(self, conversations: Sequence[Conversation], now: datetime | None = None) -> list[str]:
        """Writes each conversation as text, up to where the model's answer begins.

        A template is a program that somebody else wrote. Jinja's sandbox keeps it from Python's internals, from files
        and from changing the messages. As in transformers, nothing limits its time or memory: a keyboard interrupt
        ends one that loops forever.

        Args:
          conversations: a batch.
          now: the date that a template may write.

        Raises:
          KvjaxError: without jinja2, for messages that the template refuses, and for a template that fails.
        """
        try:
            environment = _environment()
        except ImportError as e:
            raise KvjaxError("chat templates need jinja2; pip install 'kvjax[chat]'") from e
        environment.globals["strftime_now"] = (now or datetime.now()).strftime
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **dict(self.tokens)}
        try:
            template = environment.from_string(self.source)
            return [template.render(messages=messages, **variables) for messages in conversations]
        except _Refusal as e:
            raise KvjaxError(
                f"the chat template refuses these messages, saying {str(e)[:500]!r}; change them so"
            ) from e
        except Exception as e:  # a template can raise anything
            raise KvjaxError(
                f"the model's chat template fails with {type(e).__name__}: {str(e)[:500]!r}; mend {FILE} (or the "
                f"chat_template of {CONFIG}) in the source of the model and convert it again, or write the text that "
                "the model expects yourself and give it to kvjax.generate"
            ) from e


def render_conversations(template: ChatTemplate | None, messages: Messages) -> list[str]:
    """Checks one conversation or a batch and writes each as text, up to where the model's answer begins.

    Raises:
      KvjaxError: without a template, for a message without a known role or a text, and for a conversation that ends
        with the assistant's message.
    """
    batch: Any = [messages] if _is_list(messages) and messages and isinstance(messages[0], Mapping) else messages
    if not _is_list(batch):
        raise KvjaxError(f"messages are a list such as {EXAMPLE}, got {messages!r:.60}")
    for i, conversation in enumerate(batch):
        if not _is_list(conversation):
            raise KvjaxError(f"conversation {i} must be a list such as {EXAMPLE}, got {conversation!r:.60}")
    if not batch or not all(batch):
        raise KvjaxError(f"a conversation needs at least one message, such as {EXAMPLE}; got {messages!r:.60}")
    if template is None:
        raise KvjaxError(
            f"this model has no chat template: if it was trained to chat, put the {FILE} of its checkpoint into its "
            "directory and load it again; if not, give kvjax.generate a plain prompt"
        )
    for i, conversation in enumerate(batch):
        for j, message in enumerate(conversation):
            _check_message(f"message {j} of conversation {i}", message, template)
        if conversation[-1]["role"] == "assistant":
            raise KvjaxError(f"conversation {i} ends with the assistant's message; end it with one to be answered")
    return template.render([[dict(message) for message in conversation] for conversation in batch])


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, (str, bytes))


def _check_message(name: str, message: Any, template: ChatTemplate) -> None:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise KvjaxError(f"{name} needs a role and a content, as in {EXAMPLE[1:-1]}; got {message!r:.60}")
    role, content = message["role"], message["content"]
    # Templates skip a role that they do not know, so that a message would be lost in silence.
    is_known = role in ROLES or any(f"{quote}{role}{quote}" in template.source for quote in "'\"")
    if not isinstance(role, str) or not is_known:
        raise KvjaxError(
            f"{name} has role {role!r:.60}, which the chat template does not name; use one of {', '.join(ROLES)}"
        )
    if not isinstance(content, str):
        raise KvjaxError(f"{name} has content {content!r:.60}; give a text")


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


def _read(file: Path | Traversable) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise KvjaxError(f"{file} is not UTF-8 ({e}); copy it again") from e


def _default_template(raw: Any, file: Path | Traversable) -> str | None:
    """The template of `tokenizer_config.json`: a string, or the one called "default" of several."""
    if raw is None or isinstance(raw, str):
        return raw
    try:
        templates = {x["name"]: x["template"] for x in raw}
        if isinstance(templates["default"], str):
            return templates["default"]
    except (KeyError, TypeError):
        pass
    raise KvjaxError(
        f'the "chat_template" of {file} is neither a text nor a list of names and templates with one called '
        f'"default"; write the one you want into {FILE} in the source of the model, and convert that'
    )
