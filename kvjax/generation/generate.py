"""Generation: whole results and streams, from prompts or from a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvjax.cache.protocol import Cache, KVMethod
from kvjax.engine.plan import bind
from kvjax.engine.sampling import SamplingParams, resolve_sampling
from kvjax.errors import KvjaxError
from kvjax.generation import calls, checks, stopping
from kvjax.generation.inputs import Prompts, token_ids
from kvjax.generation.prompt_runner import run_prompts
from kvjax.generation.result import Result
from kvjax.generation.session import DecodeSession, resolve_loop, start_decoding
from kvjax.generation.stopping import Stop
from kvjax.generation.timing import Timer
from kvjax.methods.strings import method_of
from kvjax.models.model import Model
from kvjax.utils import arguments


def start(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod | None = None,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    eos_ids: Sequence[int] | int | None = None,
    stop: Stop = (),
    capacity: int | None = None,
    cache: Cache | None = None,
    loop: str | None = None,
) -> DecodeSession:
    """Reads the prompts and makes the first token of each row: decoding under way; arguments as in `generate`."""
    arguments.integer("max_new_tokens", max_new_tokens)
    params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    loop = resolve_loop(loop, stop, max_new_tokens)
    ids, stop, timer = token_ids(model, prompts), stopping.strings(model, stop), Timer()
    if cache is None:
        plan = bind(method, model.config)
        last, filled = run_prompts(model, plan, ids, calls.room(ids, capacity, max_new_tokens), timer=timer)
        checks.check_finite(model, last)
    else:
        if capacity is not None:
            raise KvjaxError("capacity is the given cache's; leave it out, or prefill with a larger one")
        checks.check_cache(model, cache, method)
        args = calls.inputs_after_cache(model, ids, cache, max_new_tokens)
        out, filled = calls.extend_timed(model, cache, timer, **args)
        last = calls.at_row_ends(out, ids)
    return start_decoding(
        model, last, filled, params, max_new_tokens=max_new_tokens, eos_ids=eos_ids, stop=stop, loop=loop, timer=timer
    )


def generate(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod | None = None,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    eos_ids: Sequence[int] | int | None = None,
    stop: Stop = (),
    capacity: int | None = None,
    cache: Cache | None = None,
    loop: str | None = None,
) -> Result:
    """Continues each prompt under a method.

    A row's tokens depend on its own prompt and on (seed, row index), never on its neighbours.

    Args:
      model: from `kvjax.load`.
      prompts: texts, or lists of ids.
      method: a method or its string; may be left out where `cache` is given.
      max_new_tokens: at most so many tokens per row.
      sampling: how tokens are drawn, greedily by default; or its fields one by one, as the next five.
      temperature: 0 is greedy; above, tokens are drawn from the softmax of logits / temperature.
      top_k: draw among the k likeliest tokens.
      top_p: draw among the likeliest that together reach this probability.
      min_p: draw among those at least min_p times as likely as the likeliest.
      seed: of the draws; default 0.
      eos_ids: ids that end a row; default the checkpoint's.
      stop: strings before which a row's text ends; its tokens end with the one that completes the string.
      capacity: tokens per row that the cache has room for; default what is needed.
      cache: go on from it (of `prefill` or `extend`; it stays usable and knows its method), the prompts being what
        comes next. One that a model of other weights filled is refused.
      loop: "layers" runs each step layer by layer, which takes one layer's time to compile; "while" is one program for
        all steps, the fastest once it is compiled; "scan" is another, which runs max_new_tokens whatever the tokens.
        Default: "layers" for fewer than 2,048 tokens on a CPU, "while" otherwise. All give the same tokens, up to
        rounding.

    Returns:
      The tokens and texts, why each row ended, the bytes of the cache, and what it took.

    Raises:
      KvjaxError: a value that cannot be; prompts that do not fit; numbers that stop being finite.
    """
    params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    begun = start(
        model,
        prompts,
        method,
        max_new_tokens=max_new_tokens,
        sampling=params,
        eos_ids=eos_ids,
        stop=stop,
        capacity=capacity,
        cache=cache,
        loop=loop,
    )
    out = begun.finish(max_new_tokens)
    if method is not None:
        checks.warn_of_no_saving(method_of(method), out.bytes)
    return out


def stream(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod | None = None,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    eos_ids: Sequence[int] | int | None = None,
    stop: Stop = (),
    capacity: int | None = None,
    cache: Cache | None = None,
    loop: str | None = None,
) -> Iterator[list[int | None]]:
    """Each step's tokens as they are made, one per row, None for rows that have ended; options as in `generate`.

    It runs the very program that `generate` runs, one column at a time.
    """
    params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    begun = start(
        model,
        prompts,
        method,
        max_new_tokens=max_new_tokens,
        sampling=params,
        eos_ids=eos_ids,
        stop=stop,
        capacity=capacity,
        cache=cache,
        loop=loop,
    )
    return begun.columns(max_new_tokens)


def stream_text(
    model: Model,
    prompt: str | Sequence[int],
    method: str | KVMethod | None = None,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    eos_ids: Sequence[int] | int | None = None,
    stop: Stop = (),
    capacity: int | None = None,
    cache: Cache | None = None,
    loop: str | None = None,
) -> Iterator[str]:
    """The text that continues one prompt, piece by piece as it is made; options as in `generate`."""
    model.text_tokenizer()  # a model without one is told before it reads
    params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    begun = start(
        model,
        [prompt],
        method,
        max_new_tokens=max_new_tokens,
        sampling=params,
        eos_ids=eos_ids,
        stop=stop,
        capacity=capacity,
        cache=cache,
        loop=loop,
    )
    return begun.pieces(max_new_tokens)
