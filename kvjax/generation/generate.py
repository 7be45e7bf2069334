"""Generation of whole results and of streams, from prompts or from a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvjax.cache.protocol import Cache, KVMethod
from kvjax.engine.plan import bind
from kvjax.engine.sampling import SamplingParams, resolve_sampling
from kvjax.errors import KvjaxError
from kvjax.generation import checks, stopping
from kvjax.generation.inputs import Prompts, token_ids
from kvjax.generation.model_calls import capacity_for, extend_timed, inputs_after_cache, last_logits, run_prompts
from kvjax.generation.result import Result
from kvjax.generation.session import DecodeOptions, DecodeSession, resolve_loop, start_decoding
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
    """Runs the prompts and draws the first token of each: a session to advance; arguments as in `generate`."""
    arguments.integer("max_new_tokens", max_new_tokens)
    params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    # `start_decoding` checks `loop` and `stop` again; here they fail before the prompts are run.
    loop = resolve_loop(loop, stop, max_new_tokens)
    ids, stop, timer = token_ids(model, prompts), stopping.parse_stop(model, stop), Timer()
    if cache is None:
        plan, capacity = bind(method, model.config), capacity_for(ids, capacity, max_new_tokens)
        last, filled = run_prompts(model, plan, ids, capacity, timer=timer)
        checks.check_finite(model, last)
    else:
        if capacity is not None:
            raise KvjaxError("capacity is the given cache's; leave it out, or prefill with a larger one")
        checks.check_cache(model, cache, method)
        out, filled = extend_timed(model, cache, timer, **inputs_after_cache(model, ids, cache, max_new_tokens))
        last = last_logits(out, ids)
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

    A sequence's tokens depend on its own prompt and on (seed, index in the batch), never on its neighbors.

    Args:
      model: from `kvjax.load`.
      prompts: texts, or lists of ids.
      method: a method or its string; may be left out where `cache` is given.
      max_new_tokens: the most tokens to generate per sequence.
      sampling: settings of the sampler, greedy by default; or give its fields, the next five, by name.
      temperature: 0 is greedy; above, tokens are drawn from the softmax of logits / temperature.
      top_k: draws among the k likeliest tokens.
      top_p: draws among the likeliest tokens that together reach this probability.
      min_p: draws among the tokens at least min_p times as likely as the likeliest.
      seed: of the draws; 0 by default.
      eos_ids: ids that end a sequence; by default the checkpoint's.
      stop: strings before which a text ends; its tokens end with the token that completes the string.
      capacity: tokens that a sequence of the cache may grow to; by default as many as are needed.
      cache: from `prefill` or `extend`; the prompts then follow it. It stays usable and knows its method. A cache that
        a model of other weights filled is an error.
      loop: "layers" runs each step layer by layer, which takes one layer's time to compile; "while" is one program for
        all steps, the fastest once it is compiled; "scan" is another, which runs max_new_tokens whatever the tokens.
        Default: "layers" for fewer than 2,048 tokens on a CPU, "while" otherwise. All give the same tokens, up to
        rounding.

    Returns:
      Tokens and texts, the reason why each sequence ended, the bytes of the cache, and the time taken.

    Raises:
      KvjaxError: a value out of range; prompts that do not fit; logits that are not finite.
    """
    params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    options = DecodeOptions(sampling=params, eos_ids=eos_ids, stop=stop, loop=loop)
    session = start(model, prompts, method, max_new_tokens=max_new_tokens, capacity=capacity, cache=cache, **options)
    out = session.finish(max_new_tokens)
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
    """Streams tokens: in each step one per sequence, None after a sequence's end.

    It runs the same program as `generate`, one step at a time; arguments are those of `generate`.
    """
    params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    options = DecodeOptions(sampling=params, eos_ids=eos_ids, stop=stop, loop=loop)
    session = start(model, prompts, method, max_new_tokens=max_new_tokens, capacity=capacity, cache=cache, **options)
    return session.columns(max_new_tokens)


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
    """Streams the text that continues one prompt, as text deltas; arguments are those of `generate`."""
    model.text_tokenizer()  # raises for a model without a tokenizer before the prompt is run
    params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    options = DecodeOptions(sampling=params, eos_ids=eos_ids, stop=stop, loop=loop)
    session = start(model, [prompt], method, max_new_tokens=max_new_tokens, capacity=capacity, cache=cache, **options)
    return session.text_deltas(max_new_tokens)
