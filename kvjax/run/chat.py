"""Chat: a model's answer in a conversation that its chat template writes."""

from __future__ import annotations

from typing import Unpack

from kvjax.cache.contract import KVMethod
from kvjax.core.types import KvjaxError
from kvjax.models.conversations import Messages
from kvjax.models.model import Model
from kvjax.run.generate import generate
from kvjax.run.options import ChatOptions
from kvjax.run.result import Result


def chat(
    model: Model,
    messages: Messages,
    method: str | KVMethod = "full",
    *,
    max_new_tokens: int = 64,
    **options: Unpack[ChatOptions],
) -> Result:
    """The model's next message in one conversation, or in each of a batch, under a method; options as in `generate`.

    messages: [{"role": "user", "content": "Hello"}], or a list of such lists. An answer ends with one of the
    checkpoint's end-of-sequence ids, among which is its end of turn. Raises KvjaxError as `Model.chat_ids` does.
    """
    if "cache" in options:
        raise KvjaxError(
            "cache cannot be given to chat, which reads whole conversations; go on from a cache with kvjax.generate"
        )
    return generate(model, model.chat_ids(messages), method, max_new_tokens=max_new_tokens, **options)
