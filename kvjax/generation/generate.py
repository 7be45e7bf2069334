"""Generation of whole results and of streams: from prompts, from a cache, or from a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

from kvjax.cache.protocol import Cache, KVMethod
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.generation import user_warnings
from kvjax.generation.inputs import Prompts, are_empty, check_cache, token_ids
from kvjax.generation.model_calls import capacity_for, extend_padded, last_logits, model_for, run_prompts
from kvjax.generation.options import GenerateOptions, check_streamed, resolve_options
from kvjax.generation.programs import Timer
from kvjax.generation.result import Result
from kvjax.generation.session import DecodeSession, start_decoding
from kvjax.models.chat_messages import Messages
from kvjax.models.model import Model
from kvjax.registry.strings import method_of
from kvjax.utils.keywords import checks_keywords


@checks_keywords
def start(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod | None = None,
    *,
    capacity: int | None = None,
    cache: Cache | None = None,
    **options: Unpack[GenerateOptions],
) -> DecodeSession:
    """Runs the prompts and draws the first token of each: a session to advance; arguments as in `generate`."""
    begins = cache is None or are_empty(check_cache(model, cache, method, capacity))
    ids = token_ids(model, prompts, begins=begins, count=None if cache is None else cache.length.shape[0])
    timer = Timer()
    resolved = resolve_options(model, options, knows_tokens=cache is None)
    num_new = resolved.max_new_tokens
    if cache is None:
        rounded = capacity_for(ids, capacity, num_new)
        model = model_for(model, ids, capacity or max(map(len, ids)) + num_new - 1)  # the last token is not fed
        last, filled = run_prompts(model, bind(method, model.config), ids, rounded, timer=timer)
    else:
        out, filled = extend_padded(model, ids, cache, num_new=num_new, timer=timer)
        last = last_logits(model, out, ids, cache)
    # The tokens of a given cache are unknown.
    return start_decoding(model, last, filled, resolved, prompt_ids=ids if cache is None else None, timer=timer)


@checks_keywords
def generate(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod | None = None,
    *,
    capacity: int | None = None,
    cache: Cache | None = None,
    **options: Unpack[GenerateOptions],
) -> Result:
    """Continues each prompt under a method.

    A sequence's tokens depend on its own prompt and on (seed, index in the batch), never on its neighbors.

    Args:
      model: from `kvjax.load`.
      prompts: texts, or lists of ids.
      method: a method or its string; may be left out where `cache` is given.
      capacity: tokens that a sequence of the cache may grow to; by default as many as are needed.
      cache: from `prefill` or `extend`; the prompts then follow it. It stays usable and knows its method. A cache that
        a model of other weights filled is an error.
      **options: max_new_tokens, temperature, stop and the others of `kvjax.GenerateOptions`.

    Returns:
      Tokens and texts, the reason why each sequence ended, the bytes of the cache, and the time taken.

    Raises:
      KvjaxError: a value out of range; prompts that do not fit; logits that are not finite.
    """
    out = start(model, prompts, method, capacity=capacity, cache=cache, **options).finish()
    if method is not None:
        user_warnings.warn_of_windows(model, method_of(method))
        user_warnings.warn_of_no_saving(method_of(method), out.bytes)
    return out


@checks_keywords
def stream(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod | None = None,
    *,
    capacity: int | None = None,
    cache: Cache | None = None,
    **options: Unpack[GenerateOptions],
) -> Iterator[list[int | None]]:
    """Streams tokens: in each step one per sequence, None after a sequence's end.

    It runs the same program as `generate`, one step at a time; arguments are those of `generate`.
    """
    check_streamed(options)
    return start(model, prompts, method, capacity=capacity, cache=cache, **options).columns()


@checks_keywords
def stream_text(
    model: Model,
    prompt: str | Sequence[int],
    method: str | KVMethod | None = None,
    *,
    capacity: int | None = None,
    cache: Cache | None = None,
    **options: Unpack[GenerateOptions],
) -> Iterator[str]:
    """Streams the text that continues one prompt, as text deltas; arguments are those of `generate`."""
    check_streamed(options)
    model.text_tokenizer()  # raises for a model without a tokenizer before the prompt is run
    return start(model, [prompt], method, capacity=capacity, cache=cache, **options).text_deltas()


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
