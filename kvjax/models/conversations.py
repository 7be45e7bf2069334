"""Conversations: checked, and written as the texts that a model's chat template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.errors import KvjaxError
from kvjax.models.chat import FILE, ChatTemplate, Conversation

ROLES = ("system", "developer", "user", "assistant", "tool")
EXAMPLE = '[{"role": "user", "content": "Hello"}]'

Messages = Conversation | Sequence[Conversation]
"""One conversation, or a batch."""


def texts(template: ChatTemplate | None, messages: Messages) -> list[str]:
    """The text that a model reads for each conversation, up to where its answer begins; raises as `Model.chat_ids`."""
    conversations = _conversations(messages)
    if template is None:
        raise KvjaxError(
            f"this model has no chat template: if it was trained to chat, put the {FILE} of its checkpoint into its "
            "directory and load it again; if not, give kvjax.generate a plain prompt"
        )
    for row, conversation in enumerate(conversations):
        _check(row, conversation, template)
    return template.render([[dict(message) for message in conversation] for conversation in conversations])


def _conversations(messages: Messages) -> list[Any]:
    """A batch, of one conversation where only one was given."""
    batch = [messages] if _is_list(messages) and messages and isinstance(messages[0], Mapping) else messages
    if not _is_list(batch):
        raise KvjaxError(f"messages are a list such as {EXAMPLE}, got {messages!r:.60}")
    for row, conversation in enumerate(batch):
        if not _is_list(conversation):
            raise KvjaxError(f"conversation {row} must be a list such as {EXAMPLE}, got {conversation!r:.60}")
    if not batch or not all(batch):
        raise KvjaxError(f"a conversation needs at least one message, such as {EXAMPLE}; got {messages!r:.60}")
    return list(batch)


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, (str, bytes))


def _check(row: int, conversation: Sequence[Any], template: ChatTemplate) -> None:
    """Raises KvjaxError for a message that has no known role or no text, and where nothing is to be answered."""
    for i, message in enumerate(conversation):
        where = f"message {i} of conversation {row}"
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise KvjaxError(f"{where} needs a role and a content, as in {EXAMPLE[1:-1]}; got {message!r:.60}")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or not (role in ROLES or template.names(role)):
            raise KvjaxError(
                f"{where} has role {role!r:.60}, which the chat template does not name; use one of {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise KvjaxError(f"{where} has content {content!r:.60}; give a text")
    if conversation[-1]["role"] == "assistant":
        raise KvjaxError(f"conversation {row} ends with the assistant's message; end it with one to be answered")
