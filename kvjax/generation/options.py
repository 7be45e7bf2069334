"""The options of generating: the keyword arguments of every call that generates, and their checked values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypedDict

import jax

from kvjax.core.types import Array
from kvjax.engine.sampling import SamplingParams, resolve_sampling
from kvjax.errors import KvjaxError
from kvjax.generation import stopping
from kvjax.generation.stopping import Stop
from kvjax.models.model import Model
from kvjax.utils import arguments

LOOPS = "layers", "while", "scan"
WHILE_LOOP_MIN_TOKENS = 2048  # from here on, one program for the whole loop repays its compile time


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of every call that generates; one of your own takes `**options: Unpack[GenerateOptions]`.

    Attributes:
      max_new_tokens: the most tokens to generate per sequence, 64 by default.
      eos_ids: ids that end a sequence; by default the checkpoint's.
      stop: strings before which a text ends; its tokens end with the token that completes the string. A string may have
        special tokens in it, such as "<|im_end|>", whether or not they are left out of the text.
      skip_special_tokens: true, the default, leaves special tokens out of the texts; false shows them, as the marks of
        tool calls. The end-of-sequence id that ended an answer is in its tokens and never in its text, as in vLLM.
      sampling: settings of the sampler, greedy by default; or give its fields by name, temperature to seed.
      temperature: 0 is greedy; above, tokens are drawn from the softmax of logits / temperature.
      top_k: draws among the k likeliest tokens.
      top_p: draws among the likeliest tokens that together reach this probability.
      min_p: draws among the tokens at least min_p times as likely as the likeliest.
      repetition_penalty: above 1, makes the tokens of the prompt and of the answer so far less likely, as in
        transformers and vLLM; 1, the default, changes nothing. A bare cache does not know its tokens, and refuses.
      presence_penalty: subtracted from the logits of the answer's tokens so far, from -2 to 2, as in vLLM.
      frequency_penalty: the same, times the number of times that the token stands in the answer so far.
      seed: of the draws; 0 by default.
      logprobs: true gives `Result.logprobs`; a number k also `Result.top_logprobs`, the k likeliest of each step.
      loop: "layers" runs each step layer by layer, which takes one layer's time to compile; "while" is one program for
        all steps, the fastest once it is compiled; "scan" is another, which runs max_new_tokens whatever the tokens.
        Default: "layers" for fewer than 2,048 tokens on a CPU, "while" otherwise. All give the same tokens, up to
        rounding.
    """

    max_new_tokens: int
    eos_ids: Sequence[int] | int | None
    stop: Stop
    skip_special_tokens: bool
    sampling: SamplingParams | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logprobs: bool | int | None
    loop: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeOptions:
    """`GenerateOptions`, checked, with the defaults of a model filled in."""

    max_new_tokens: int
    sampling: SamplingParams
    eos: Array  # i32[E], ids that end a sequence
    stop: tuple[str, ...]
    num_top: int | None  # likeliest tokens with a log-probability in each step; None for no log-probabilities
    loop: str
    skip_special_tokens: bool


def resolve_options(model: Model, options: GenerateOptions, *, knows_tokens: bool = True) -> DecodeOptions:
    """Checks the options of a call, before it runs anything; raises KvjaxError for the first that cannot be.

    `knows_tokens` says whether all tokens that the generated ones follow are known, and not their cache alone.
    """
    max_new_tokens = arguments.integer("max_new_tokens", options.get("max_new_tokens", 64))
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    sampling = resolve_sampling(options.get("sampling"), **{name: options.get(name) for name in fields})
    stop = options.get("stop", ())
    stop = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
    eos, num_top = stopping.parse_eos_ids(model, options.get("eos_ids")), None
    logprobs = options.get("logprobs")
    if logprobs is not None and logprobs is not False:
        most = model.config.vocab_size
        num_top = 0 if logprobs is True else arguments.integer("logprobs", logprobs, 0, most, "; true is 0 of them")
    loop, skip_special_tokens = options.get("loop"), options.get("skip_special_tokens", True)
    if loop is None:
        loop = "layers" if max_new_tokens < WHILE_LOOP_MIN_TOKENS and jax.default_backend() == "cpu" else "while"
    problem = None
    if sampling.repetition_penalty != 1 and not knows_tokens:
        problem = (
            "repetition_penalty counts the tokens of the whole prompt, and a cache does not know its own, nor does a "
            "context that was resumed from a file, edited or put together of others: read the text with kvjax.read, or "
            "use presence_penalty and frequency_penalty, which count generated tokens alone"
        )
    elif wrong := [text for text in stop if not isinstance(text, str) or not text]:
        problem = (
            f"stop takes texts of at least one character, got {wrong[0]!r}; () is none, and to end at ids, use eos_ids"
        )
    elif not isinstance(skip_special_tokens, bool):
        problem = f"skip_special_tokens is True or False, got {skip_special_tokens!r:.60}; False shows special tokens"
    elif loop not in LOOPS or (loop == "scan" and stop):
        problem = (
            f"loop must be {', '.join(map(repr, LOOPS[:-1]))} or {LOOPS[-1]!r}, got {loop!r}; with 'scan', which runs "
            "max_new_tokens whatever the tokens, leave stop out"
        )
    if problem is not None:
        raise KvjaxError(problem)
    if stop:
        model.text_tokenizer()  # raises for a model without one
    return DecodeOptions(max_new_tokens, sampling, eos, stop, num_top, loop, skip_special_tokens)


def check_streamed(options: GenerateOptions) -> None:
    """Raises KvjaxError for an option whose results a stream does not yield."""
    logprobs = options.get("logprobs")
    if logprobs is not None and logprobs is not False:
        raise KvjaxError(
            "a stream has no place for log-probabilities: leave logprobs out, or use generate, whose result has them"
        )
