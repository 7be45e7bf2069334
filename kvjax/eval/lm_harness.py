"""kvjax under EleutherAI's lm-evaluation-harness: its tasks (BBH, GSM8K, TriviaQA, ...) with any method.

    python -m kvjax.eval.lm_harness --model kvjax --model_args model=DIR,method=kcache:n=64 --tasks gsm8k

takes every option of `lm_eval`, which splits model_args at commas. So write "/" for "," inside a method, as in
method=kcache:n=64/device_layers=1, or give JSON: --model_args '{"model": "DIR", "method": "kivi:bits=2,residual=64"}'.
A method of your own comes from a file or module: load=my_method.py,method=my_method:budget=64.
A prompt is prefilled and compressed by the method; a continuation is fed to the compressed cache, as if it had been
decoded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from rich.progress import track

from kvjax.cache.protocol import KVMethod
from kvjax.errors import KvjaxError
from kvjax.generation.context import read
from kvjax.generation.generate import generate
from kvjax.generation.inputs import round_up
from kvjax.generation.model_calls import model_for
from kvjax.models import model as models
from kvjax.models.model import Model
from kvjax.registry.loading import load_methods
from kvjax.registry.strings import method_of, name_of
from kvjax.utils import arguments

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as e:
    raise KvjaxError('the adapter needs lm-evaluation-harness: pip install "kvjax[lm-eval]"') from e

MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first wins
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
ZERO = """min_p epsilon_cutoff eta_cutoff penalty_alpha diversity_penalty no_repeat_ngram_size min_length
min_new_tokens min_tokens"""
ONE = "top_p typical_p num_beams num_beam_groups length_penalty num_return_sequences n best_of guidance_scale"
OFF = """early_stopping ignore_eos include_stop_str_in_output renormalize_logits remove_invalid_values
return_dict_in_generate output_scores output_logits output_attentions output_hidden_states"""
ON = "skip_special_tokens spaces_between_special_tokens use_cache"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    **{name: (value,) for names, value in ((ZERO, 0), (ONE, 1), (OFF, False), (ON, True)) for name in names.split()},
}
"""Values of transformers' and vLLM's generation arguments that ask for nothing, as None does for any argument."""


@register_model("kvjax")
class KvjaxLM(TemplateLM):
    """A model directory (or "testbed", or a `Model`) under one method, a value or its string.

    Args:
      model: as in `kvjax.load`.
      method: a value, or its string, where "/" stands for "," if it has no comma.
      batch_size: prompts at a time.
      max_length: most tokens of a prompt and its continuation (default: the model's positions).
      truncation: where longer prompts are cut: "left", as in lm_eval's own models, or "middle", as in LongBench's
        script.
      max_gen_toks: most tokens of a generated text, where a task does not say.
      prefix_token_id: opens texts without a prompt (default: the model's beginning-of-sequence id, else its first
        end-of-sequence id).
      dtype, weights: as in `kvjax.load`.
      seed: of sampling.
      max_batch_size, device: lm_eval's, and change nothing: JAX chooses the device (JAX_PLATFORMS).
      load: files or modules with methods of your own.
      chat_template_args: variables of the chat template, as in lm_eval's own models.
      enable_thinking: one of them, for templates that read it.
    """

    def __init__(
        self,
        model: str | Model = "testbed",
        method: str | KVMethod = "full",
        batch_size: int | str = 1,
        max_length: int | None = None,
        truncation: str = "left",
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        seed: int = 0,
        max_batch_size: int | None = None,
        device: str | None = None,
        load: str | Sequence[str] = (),
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        **unknown: Any,
    ):
        super().__init__()
        if unknown:
            raise KvjaxError(
                f"unknown argument {next(iter(unknown))!r} of the model kvjax; if it belongs to the method, write '/' "
                "for ',' inside the method, as in method=kcache:n=64/device_layers=1, or give model_args as JSON"
            )
        self.model = model if isinstance(model, Model) else models.load(model, dtype=dtype, weights=weights)
        for source in [load] if isinstance(load, str) else load:
            load_methods(source)
        self.method = method_of(_restore_commas(method) if isinstance(method, str) else method)
        number = int(batch_size) if str(batch_size).isdecimal() else batch_size  # lm_eval's "auto", for one
        self.batch_size = arguments.integer("batch_size", number, remedy="; for example 8")
        self.chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = enable_thinking
        if truncation not in ("left", "middle"):
            raise KvjaxError(f"truncation must be 'left' or 'middle', got {truncation!r}")
        self.truncation = truncation
        self.max_length = int(max_length or self.model.config.max_positions)
        self.max_gen_toks, self.seed, self._prefix = int(max_gen_toks), int(seed), prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in lm_eval's caches of requests."""
        return self.model.name

    @property
    def eot_token_id(self) -> int | None:
        """The first id that ends a text, if the model has one."""
        return next(iter(self.model.config.eos_ids), None)

    @property
    def prefix_token_id(self) -> int:
        """The id that opens a text without a prompt; raises KvjaxError if the model has none."""
        for token in (self._prefix, self.model.config.bos_id, self.eot_token_id):
            if token is not None:
                return int(token)
        raise KvjaxError("the model has no id that begins or ends a text; pass prefix_token_id=ID in model_args")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encodes a text; by default with the tokenizer's first special tokens, unless the text spells them."""
        if add_special_tokens is False:
            return self.model.text_tokenizer().encode(string, special_tokens=False)
        return self.model.text_tokenizer().encode_prompt(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encodes a context and what follows it, by lm_eval's rule: both as one text, cut after the context's tokens.

        The continuation is encoded by itself where a token spans both of them. lm_eval's own models then score what is
        left after as many tokens as the context has, and count none at all as certain.
        """
        end = len(context.rstrip())  # spaces at the end of a context go with the continuation, as in lm_eval
        context, continuation = context[:end], context[end:] + continuation
        before, both = self.tok_encode(context), self.tok_encode(context + continuation)
        if both[: len(before)] == before:
            rest = both[len(before) :]
        else:
            rest = self.model.text_tokenizer().encode_continuation(continuation)
        return before or [self.prefix_token_id], rest

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Scores continuations (natural log); raises KvjaxError for one without tokens, which would be certain."""
        for context, continuation in (r.args for r in requests):
            if not continuation:
                raise KvjaxError(
                    f"the continuation of {context[-60:]!r} is empty, and there is nothing to score; leave it out of "
                    "the task, or give it a text"
                )
        return super().loglikelihood(list(requests), disable_tqdm)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the model's template, which lm_eval records with its results; always the default one."""
        if isinstance(chat_template, str):
            raise KvjaxError(
                f"lm_eval's tasks take the model's default chat template, none is called {chat_template!r} here; leave "
                "the name out"
            )
        return "" if self.model.chat_template is None else self.model.chat_template.find()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Writes a conversation by the model's chat template.

        Without add_generation_prompt the last message is the beginning of the answer, which the model continues.
        """
        variables, is_continued = self.chat_template_args, not add_generation_prompt
        (text,) = self.model.chat_texts(
            chat_history, chat_template_kwargs=variables, continue_final_message=is_continued
        )
        return text

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts (natural log) in windows of max_length, as lm_eval; unscored tokens are the prompt."""
        prefix, pairs, owner = self.prefix_token_id, [], []
        for i, (text,) in enumerate(r.args for r in requests):
            windows = get_rolling_token_windows(self.tok_encode(text, False), prefix, self.max_length, context_len=1)
            disjoint = [make_disjoint_window(w) for w in windows]
            pairs, owner = pairs + disjoint, owner + [i] * len(disjoint)
        out = [0.0] * len(requests)
        for i, (logp, _) in zip(owner, self._scores(pairs, disable_tqdm), strict=True):
            out[i] += logp
        for r, total in zip(requests, out, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", r.args, total)
        return out

    def _loglikelihood_tokens(self, requests: Sequence[tuple], disable_tqdm: bool = False, **_: Any) -> list:
        """Returns (natural log, whether greedy decoding makes it) of the continuation of each (texts, prompt, ids)."""
        out = self._scores([(prompt, continuation) for _, prompt, continuation in requests], disable_tqdm)
        for (texts, _, _), answer in zip(requests, out, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return out

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]], quiet: bool) -> list[tuple[float, bool]]:
        if any(not rest for _, rest in pairs):
            raise KvjaxError(
                "a continuation has no tokens, so that there is nothing to score; give a text of at least one token"
            )
        out: list = [None] * len(pairs)
        # The last token of a continuation is scored and never fed, and so takes no position.
        pairs = [(self._truncate(prompt, len(rest) - 1), rest) for prompt, rest in pairs]
        sizes = {i: (len(prompt), len(rest)) for i, (prompt, rest) in enumerate(pairs)}
        for indices in self._batches(sizes, "loglikelihood", quiet):
            prompts, rests = zip(*(pairs[i] for i in indices), strict=True)
            # Similar continuations share one compiled program.
            width = round_up(max(map(len, rests)) - 1, 16)
            # The width is padding, and no text grows to it.
            longest = max(len(prompt) + len(rest) - 1 for prompt, rest in zip(prompts, rests, strict=True))
            model = model_for(self.model, prompts, longest)
            context = read(model, prompts, self.method, headroom=width + 1)
            for i, rest, (logp, likeliest) in zip(indices, rests, context.score(rests, width=width), strict=True):
                out[i] = float(logp.sum(dtype=float)), likeliest.tolist() == list(rest)
        return out

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates texts up to their first stop string, an end-of-sequence id, or max_gen_toks tokens."""
        out, groups = [""] * len(requests), {}
        for i, r in enumerate(requests):
            groups.setdefault(json.dumps(r.args[1], sort_keys=True), []).append(i)
        for group in groups.values():
            until, most, sampling = self._parse_options(requests[group[0]].args[1])
            encoded = {i: self.tok_encode(requests[i].args[0]) or [self.prefix_token_id] for i in group}
            prompts = {i: self._truncate(prompt, most) for i, prompt in encoded.items()}
            sizes = {i: (len(prompt), 0) for i, prompt in prompts.items()}
            batches = self._batches(sizes, "generate_until", disable_tqdm)
            for number, indices in enumerate(batches):
                options = {"max_new_tokens": most, "stop": until, **sampling, "seed": self.seed + number}
                result = generate(self.model, [prompts[i] for i in indices], self.method, **options)
                # The first of repeated indices has the draws that its place in the batch determines.
                for i, text in reversed(list(zip(indices, result.text, strict=True))):
                    out[i] = text
        for r, text in zip(requests, out, strict=True):
            self.cache_hook.add_partial("generate_until", r.args, text)
        return out

    def _parse_options(self, options: dict) -> tuple[list[str], int, dict[str, Any]]:
        """(stop strings, most tokens, sampling) of a request's generation arguments."""
        known = ("until", "do_sample", *MAX_TOKENS_NAMES, *SAMPLING, *PENALTIES, "skip_special_tokens")
        options = {
            name: value for name, value in options.items() if value is not None and value not in NEUTRAL.get(name, ())
        }
        if unknown := next((name for name in options if name not in known), None):
            neutral = f"; {unknown}={NEUTRAL[unknown][0]} asks for nothing, and passes" if unknown in NEUTRAL else ""
            raise KvjaxError(
                f"generation argument {unknown!r} is not supported; supported: {', '.join(known)}{neutral}"
            )
        until = options.get("until") or []
        limits = (int(options[name]) for name in MAX_TOKENS_NAMES if name in options)
        sampling = {"temperature": 1.0 if options.get("do_sample") else 0.0}
        sampling |= {name: options[name] for name in SAMPLING if name in options}
        if options.get("do_sample") is False or not sampling["temperature"]:
            sampling = {}  # greedy, whatever the filters are
        sampling |= {name: options[name] for name in (*PENALTIES, "skip_special_tokens") if name in options}
        stops = [stop for stop in (until if isinstance(until, list | tuple) else [until]) if stop]
        return stops, next(limits, self.max_gen_toks), sampling

    def _truncate(self, prompt: list[int], num_following: int) -> list[int]:
        """Cuts a prompt, so that more tokens fit into max_length; raises KvjaxError if not even one token does."""
        left = self.max_length - num_following
        if left < 1:
            raise KvjaxError(
                f"{num_following} tokens after a prompt leave no room in max_length={self.max_length}; raise it"
            )
        if len(prompt) > left:
            logging.getLogger(__name__).warning("a prompt of %d tokens is cut to %d", len(prompt), left)
        first = left // 2 if self.truncation == "middle" and len(prompt) > left else 0
        return prompt[:first] + prompt[first - left :]

    def _batches(self, sizes: dict[int, tuple[int, int]], name: str, quiet: bool) -> Iterator[list[int]]:
        """Indices of similar size together, the longest first."""
        indices = sorted(sizes, key=sizes.__getitem__, reverse=True)
        batches = [indices[i : i + self.batch_size] for i in range(0, len(indices), self.batch_size)]
        for batch in track(batches, f"{name} ({name_of(self.method)})", disable=quiet, transient=True):
            # The last batch repeats its last index, so that all batches share programs.
            yield batch + batch[-1:] * (self.batch_size - len(batch))


def _restore_commas(method: str) -> str:
    """Replaces "/" by "," where lm_eval has split at commas; a string that has one came as JSON, and may hold paths."""
    return method if "," in method else method.replace("/", ",")


def main() -> None:
    """Runs lm_eval's own command line, with the model kvjax registered."""
    from lm_eval.__main__ import cli_evaluate

    from kvjax.core.compile_cache import use_compilation_cache

    use_compilation_cache()
    cli_evaluate()


if __name__ == "__main__":
    main()
