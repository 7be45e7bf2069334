"""Logits that are no numbers: told as an error, which names where in the model they begin."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from kvjax.core.attention import causal
from kvjax.core.types import Array, KvjaxError
from kvjax.engine.positions import token_positions
from kvjax.generation.prompts import pad, place
from kvjax.models.config import Config
from kvjax.models.decoder import Decoder
from kvjax.models.model import Model

STEPS = ("attention_norm", "attention", "mlp_norm", "mlp")
"""Of a layer, in the order in which they run; then comes what the layer itself gives."""


def check_finite(model: Model, ids: Sequence[Sequence[int]], logits: Array) -> None:
    """Raises KvjaxError where the logits f32[B V] behind prompts are not finite, or a row's are all the same.

    Equal logits are what a norm leaves of numbers too large to be squared; they are an error only where such numbers
    are found. What is found costs one exact pass over the first such prompt, and nothing where the logits are sound.
    """
    found = np.asarray(logits)
    strange = ~np.isfinite(found).all(-1)
    suspect = strange | (found.max(-1) == found.min(-1))
    if not suspect.any():
        return
    row = int(np.argmax(strange if strange.any() else suspect))
    where = _first(model, list(ids[row]))
    if where:
        raise KvjaxError(
            f"prompt {row} makes the model compute what {model.dtype} cannot hold; the first such numbers are {where}. "
            "Load it with dtype='float32'; where that is so already, copy its checkpoint and convert it again"
        )
    if strange.any():
        raise KvjaxError(
            f"the logits after prompt {row} are not finite, although the model's exact attention is: the method's "
            f"numbers do not fit {model.dtype}; load the model with dtype='float32', or use another method"
        )


def _first(model: Model, row: list[int]) -> str:
    """Where numbers that are not finite, or too large to be squared, first come up; empty where there are none."""
    for path, x in flatten_dict(nn.unbox(model.params), sep="/").items():
        if not bool(jnp.isfinite(x).all()):
            return f"in the parameter {path}"
    tokens = place(model, pad([row])[0][:, : len(row)], "B T")
    sound = _sound(model.params, tokens, config=model.config)
    order = [(f"layer_{i}", step) for i in range(model.config.layers) for step in (*STEPS, "")]
    for layer, step in order:
        if not bool(sound["/".join(filter(None, (layer, step)))]):
            return f"those of {layer}" + (f", {step}" if step else ", where they are added up")
    return "" if bool(sound["final_norm"]) else "those of final_norm"


@functools.partial(jax.jit, static_argnames="config")
def _sound(params: Any, tokens: Array, config: Config) -> dict[str, Array]:
    """Whether all numbers that a module of the decoder gives are finite and can be squared, by the module's path."""
    named = {"final_norm", *STEPS, *(f"layer_{i}" for i in range(config.layers))}

    def attend(i: int, q: Array, k: Array, v: Array, x: Array):
        return causal(q, k, v, window=config.window(i)), None

    def wanted(module: nn.Module, method: str) -> bool:
        return module.name in named and method == "__call__"

    more = {"capture_intermediates": wanted, "mutable": ["intermediates"]}
    decoder = Decoder(config, params["embedding"].dtype)
    _, seen = decoder.apply({"params": params}, tokens, token_positions(tokens), attend, **more)
    outputs = flatten_dict(seen["intermediates"], sep="/")
    return {path.removesuffix("/__call__"): _fits(jax.tree.leaves(x)[0]) for path, x in outputs.items()}


def _fits(x: Array) -> Array:
    return jnp.isfinite(jnp.square(x.astype(jnp.float32)).mean(-1)).all()
