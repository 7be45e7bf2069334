"""Chat: the model's next message in a conversation."""

from __future__ import annotations

from typing import Unpack

from kvjax.cache.protocol import KVMethod
from kvjax.generation.generate import generate
from kvjax.generation.options import GenerateOptions
from kvjax.generation.result import Result
from kvjax.models.chat_template import Messages
from kvjax.models.model import Model
from kvjax.utils.keywords import checks_keywords


@checks_keywords
def chat(
    model: Model,
    messages: Messages,
    method: str | KVMethod = "full",
    *,
    capacity: int | None = None,
    **options: Unpack[GenerateOptions],
) -> Result:
    """Generates the next message of one conversation, or of each in a batch, under a method.

    The whole conversation is read; to continue from a cache, use `kvjax.generate`. An answer ends with one of the
    checkpoint's end-of-sequence ids, which include its end of turn.

    Args:
      model: from `kvjax.load`.
      messages: [{"role": "user", "content": "Hello"}], or a list of such lists.
      method: a method or its string.
      capacity: as in `kvjax.generate`.
      **options: max_new_tokens, temperature, stop and the others of `kvjax.GenerateOptions`.

    Raises:
      KvjaxError: as `Model.chat_ids` and `kvjax.generate` do.
    """
    return generate(model, model.chat_ids(messages), method, capacity=capacity, **options)
