"""Chat: the model's next message in a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

from kvjax.cache.protocol import KVMethod
from kvjax.errors import KvjaxError
from kvjax.generation.generate import generate, stream_text
from kvjax.generation.options import GenerateOptions, check_streamed
from kvjax.generation.result import Result
from kvjax.models.chat_messages import Messages
from kvjax.models.model import Model
from kvjax.utils.keywords import checks_keywords


@checks_keywords
def chat(
    model: Model,
    messages: Messages,
    method: str | KVMethod = "full",
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    capacity: int | None = None,
    **options: Unpack[GenerateOptions],
) -> Result:
    """Generates the next message of one conversation, or of each in a batch, under a method.

    The whole conversation is read; to continue from a cache, use `kvjax.generate`. An answer ends with one of the
    checkpoint's end-of-sequence ids, which include its end of turn.

    Args:
      model: from `kvjax.load`.
      messages: [{"role": "user", "content": "Hello"}], or a list of such lists; see `Model.chat_ids`.
      method: a method or its string.
      tools: functions that the model may call, as JSON schemas: [{"type": "function", "function": {"name": ..}}].
      documents: texts that the model may cite, [{"title": .., "text": ..}].
      chat_template_kwargs: other variables of the chat template, such as {"enable_thinking": False}, as in vLLM. One
        that the template does not read is an error, as are tools and documents that it does not read.
      continue_final_message: whether the last message, the assistant's, is the beginning of the answer. The result has
        what follows it.
      chat_template: the name of one of the model's templates, or a Jinja template; by default the one called "tool_use"
        if there is one and tools are given, the default one otherwise.
      capacity: as in `kvjax.generate`.
      **options: max_new_tokens, temperature, stop and the others of `kvjax.GenerateOptions`.

    Raises:
      KvjaxError: as `Model.chat_ids` and `kvjax.generate` do.
    """
    ids = model.chat_ids(
        messages,
        tools=tools,
        documents=documents,
        chat_template_kwargs=chat_template_kwargs,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
    )
    return generate(model, ids, method, capacity=capacity, **options)


@checks_keywords
def stream_chat(
    model: Model,
    messages: Messages,
    method: str | KVMethod = "full",
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    capacity: int | None = None,
    **options: Unpack[GenerateOptions],
) -> Iterator[str]:
    """Streams the next message of one conversation, as text deltas; arguments are those of `chat`."""
    check_streamed(options)
    ids = model.chat_ids(
        messages,
        tools=tools,
        documents=documents,
        chat_template_kwargs=chat_template_kwargs,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
    )
    if len(ids) != 1:
        raise KvjaxError(f"stream_chat answers one conversation, got {len(ids)}; kvjax.chat answers several at once")
    return stream_text(model, ids[0], method, capacity=capacity, **options)
