"""Chat templates: how a checkpoint writes a conversation as the one text that its model reads."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from kvjax.core import documents
from kvjax.core.types import KvjaxError

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
SECONDS, MEMORY = 5, 2**30  # of processor time, and bytes: what rendering may take

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

        It runs in a process of its own (`kvjax.models.render`), one for all conversations. Raises KvjaxError without
        jinja2, for what the template refuses, for a template that fails, and for one beyond SECONDS or MEMORY.
        """
        try:
            importlib.import_module("jinja2")
        except ImportError as e:
            raise KvjaxError("chat templates need jinja2; pip install 'kvjax[chat]'") from e
        asked = {"source": self.source, "tokens": dict(self.tokens), "conversations": conversations}
        more = {"now": (now or datetime.now()).isoformat(), "seconds": SECONDS, "memory": MEMORY}
        try:
            document = json.dumps(asked | more)
        except (TypeError, ValueError, RecursionError) as e:
            raise KvjaxError(f"messages are rendered from JSON, which cannot hold these ({e}); give texts") from e
        answer = _apart(document)
        if answer.get("error") == "Refused":
            raise KvjaxError(f"the chat template refuses these messages, saying {answer['says']!r}; change them so")
        if "error" in answer:
            raise _failed(f"fails with {answer['error']}: {answer['says']!r}")
        return answer["texts"]


def _apart(document: str) -> dict[str, Any]:
    """What the script `kvjax.models.render` answers."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("render.py"))]
    try:
        done = subprocess.run(command, input=document.encode(), capture_output=True, timeout=12 * SECONDS)
    except subprocess.TimeoutExpired as e:
        raise _failed(f"did not end within {12 * SECONDS} s") from e
    if done.returncode < 0:
        raise _failed(f"was ended: it took more than {SECONDS} s or {MEMORY:,} bytes (signal {-done.returncode})")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _failed(f"was not rendered: {said[-1:]}")
    return json.loads(done.stdout)


def _failed(how: str) -> KvjaxError:
    return KvjaxError(
        f"the model's chat template {how}; mend {FILE} (or the chat_template of {CONFIG}) in the source of the model "
        "and convert it again, or write the text that the model expects yourself and give it to kvjax.generate"
    )


def _text(file: Path | Traversable) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise KvjaxError(f"{file} is not UTF-8 ({e}); copy it again") from e


def _config(file: Path | Traversable) -> dict[str, Any]:
    """`tokenizer_config.json`, empty where there is none."""
    if not file.is_file():
        return {}
    return documents.parsed(_text(file), file)


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
