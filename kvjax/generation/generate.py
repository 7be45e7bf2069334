"""Generation of whole results and of streams, from prompts or from a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Unpack

from kvjax.cache.protocol import Cache, KVMethod
from kvjax.engine.plan import bind
from kvjax.generation import user_warnings
from kvjax.generation.inputs import Prompts, are_empty, check_cache, token_ids
from kvjax.generation.model_calls import capacity_for, extend_padded, last_logits, model_for, run_prompts
from kvjax.generation.options import GenerateOptions, check_streamed, resolve_options
from kvjax.generation.result import Result
from kvjax.generation.session import DecodeSession, start_decoding
from kvjax.generation.timing import Timer
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
