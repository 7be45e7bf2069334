"""Keyword arguments of public calls: an unknown one is an error that names the known one that is meant."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from kvjax.errors import UnknownKeyword
from kvjax.utils.arguments import suggest_name
from kvjax.utils.mesh_context import outside_callers_mesh

P = ParamSpec("P")
R = TypeVar("R")

MEANT = {
    "max_new_tokens": "max_tokens max_length max_gen_toks max_completion_tokens max_output_tokens n_predict",
    "stop": "stop_strings stop_sequences stop_words stop_str until",
    "eos_ids": "eos_token_id eos_token_ids eos_id stop_token_ids",
    "sampling": "sampling_params generation_config sampler",
    "seed": "random_seed random_state manual_seed rng key",
    "repetition_penalty": "repeat_penalty rep_penalty penalty penalty_repeat",
    "presence_penalty": "penalty_present",
    "frequency_penalty": "penalty_freq",
    "logprobs": "top_logprobs output_scores output_logits return_logprob n_probs",
    "chat_template_kwargs": "template_variables template_kwargs chat_template_args template_args",
    "chat_template": "template template_name chat_template_name",
    "messages": "conversation conversations history",
    "continue_final_message": "add_generation_prompt",
    "prompts": "prompt text texts input inputs input_ids",
    "prompt": "prompts text input inputs input_ids",
    "documents": "document docs prompts prompt text texts input inputs input_ids",
    "questions": "question prompts prompt text texts",
    "continuations": "continuation targets answers",
    "ids": "prompts prompt text texts input inputs input_ids tokens",
    "cache": "past_key_values kv_cache past",
    "capacity": "max_cache_len max_seq_len max_model_len max_len",
    "method": "press cache_implementation kv_cache_method compression",
    "headroom": "room headroom_tokens max_new_tokens max_tokens",
    "dtype": "torch_dtype precision",
    "path": "name model model_id model_path model_name pretrained_model_name_or_path directory",
}
"""The names of kvjax, and those of transformers, vLLM, llama.cpp and others that mean the same."""

REMEDIES = {
    "do_sample": "a temperature above 0 draws tokens, and decoding is greedy without one",
    "num_beams": "there is no beam search; kvjax.functional.take moves the caches of your own",
    "best_of": "give a prompt several times, and each copy draws for itself",
    "n": "give a prompt several times, and each copy draws for itself",
    "num_return_sequences": "give a prompt several times, and each copy draws for itself",
    "num_samples": "give a prompt several times, and each copy draws for itself",
    "ignore_eos": "eos_ids=() ends at no token",
    "pad_token_id": "kvjax pads by itself; leave it out",
    "attention_mask": "kvjax pads by itself; leave it out, and give each prompt without padding",
    "use_cache": "the method says what is cached, and 'full' caches everything",
    "streamer": "kvjax.stream, kvjax.stream_text and kvjax.stream_chat yield what is generated",
    "stream": "kvjax.stream, kvjax.stream_text and kvjax.stream_chat yield what is generated",
    "prompt_logprobs": "kvjax.score has the log-probabilities of a given text",
    "system": 'a message {"role": "system", "content": ..} opens a conversation of kvjax.chat',
    "system_prompt": 'a message {"role": "system", "content": ..} opens a conversation of kvjax.chat',
    "device": "JAX chooses the device; set JAX_PLATFORMS before Python starts",
    "device_map": "JAX chooses the device; give kvjax.load a mesh for several",
    "chat_template": "the template is the checkpoint's; dataclasses.replace(model, chat_template=..) changes it",
}
"""Remedies for arguments that have no counterpart."""

VARIABLES = ("enable_thinking", "thinking", "reasoning_effort", "date_string", "custom_tools")
"""Names that chat templates read."""


class _Default:
    """A default that the description names; as in a stub, it is written `...`."""

    def __repr__(self) -> str:
        return "..."


def checks_keywords(call: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public call: an unknown keyword raises `UnknownKeyword`, which names the one that is meant.

    The call runs outside the mesh that its caller has set, as a model lies on one of its own, except where it is
    decorated by `keeps_callers_mesh` too.

    Keywords that the call takes as `**options: Unpack[Options]` (PEP 692) stand one by one in the signature that
    notebooks and `help` show, and their descriptions, from the docstring of `Options`, end that of the call.
    """
    signature, options = _expand_options(call)
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    known = [x.name for x in signature.parameters.values() if x.kind in by_name]
    title = call.__qualname__.removesuffix(".__init__")
    leave_mesh = contextlib.nullcontext if hasattr(call, "keeps_callers_mesh") else outside_callers_mesh

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise UnknownKeyword(describe_unknown_keyword(title, name, known))
        with leave_mesh():
            return call(*args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    if options is not None and checked.__doc__ and options.__doc__:  # `python -OO` strips all docstrings
        described = inspect.cleandoc(options.__doc__).partition("Attributes:\n")[2]
        checked.__doc__ = f"{inspect.cleandoc(checked.__doc__)}\n\nOptions:\n{described}\n"
    return checked


def caller_level() -> int:
    """The `stacklevel` at which a warning names the line that called kvjax, whatever wraps the call."""
    frame, level = sys._getframe(1), 1
    # jaxtyping wraps functions of kvjax where their annotations are checked, as in kvjax' own tests.
    passed_over = "kvjax", "jaxtyping"
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in passed_over:
        frame, level = frame.f_back, level + 1
    return level


def describe_unknown_keyword(call: str, name: str, known: Iterable[str]) -> str:
    """The error text for an unknown keyword of a call: what is meant, or all that the call takes."""
    known = [x for x in known if x != "self"]
    text = f"{call}() got an unexpected keyword argument {name!r}"
    if meant := next((x for x in known if name.lower() in MEANT.get(x, "").split()), None):
        return f"{text}; did you mean {meant!r}?"
    variable = f"a variable of the chat template goes into chat_template_kwargs={{{name!r}: ..}}"
    if name.lower() in VARIABLES and "chat_template_kwargs" in known:
        return f"{text}: {variable}"
    if name.lower() in REMEDIES:
        return f"{text}: {REMEDIES[name.lower()]}"
    if nearest := suggest_name(name, known, 0.65):
        return text + nearest
    text = f"{text}; it takes {', '.join(known)}"
    return f"{text}; {variable}" if "chat_template_kwargs" in known else text


def _expand_options(call: Callable[..., Any]) -> tuple[inspect.Signature, Any]:
    """The signature with the keys of an unpacked TypedDict as keywords of their own, and the TypedDict, if any."""
    signature, parameters, options = inspect.signature(call), [], None
    for parameter in signature.parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter)
            continue
        (options,) = typing.get_args(eval(parameter.annotation, inspect.unwrap(call).__globals__))
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_Default(), annotation=_text_of(annotation))
            for name, annotation in options.__annotations__.items()
        ]
    return signature.replace(parameters=parameters), options


def _text_of(annotation: Any) -> Any:
    return getattr(annotation, "__forward_arg__", annotation)
