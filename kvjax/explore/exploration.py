"""The exploration of a text: the cache state of each token under several methods, step by step on the same answer."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import CacheBytes, state_bytes
from kvjax.cache.protocol import BoundLayer, Cache, KVMethod, LayerState
from kvjax.cache.token_status import token_status
from kvjax.core.attention import Rule, scores, softmax
from kvjax.core.types import Array
from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.explore import token_codes
from kvjax.explore.answer_state import AnswerState
from kvjax.explore.traced_state import TracedLayer, TracedMethod, TracedState, inner_cache
from kvjax.generation.context import read
from kvjax.generation.inputs import round_up
from kvjax.generation.model_calls import model_for
from kvjax.models.decoder import sinks_of
from kvjax.models.model import Model
from kvjax.registry.strings import Methods, resolve
from kvjax.utils.mesh_context import leaves_callers_mesh


@dataclasses.dataclass(frozen=True, eq=False)
class MethodTrace:
    """The state of P tokens under one method at each of T steps; see `kvjax.explore.token_codes` for the codes."""

    name: str
    status_codes: np.ndarray  # u8[L K T P], as the query of a step finds the token
    error_codes: np.ndarray  # u8[L K T P], relative error of key and value
    lost_attention: np.ndarray  # f32[L K T], the part of the exact attention that falls on tokens that are gone
    likeliest: list[int]  # the T tokens that it would put next, each after the same tokens before it
    own_answer: list[int]  # the answer that it would have written by itself
    bytes: CacheBytes  # of the prompt
    has_reader_state: bool  # whether its reader keeps tokens outside the slots, which no code shows


@dataclasses.dataclass(frozen=True, eq=False)
class Exploration:
    """A text, the answer of `full`, and the trace of each method while that answer was read token by token."""

    model: str
    groups: int  # query heads of each key/value head
    prompt: list[int]
    answer: list[int]  # T tokens
    likeliest: list[int]  # the exact cache's next tokens, each after the tokens before it
    attention: np.ndarray  # f32[L K T P], exact, of the answer's T tokens; the mean over a head's query heads
    methods: list[MethodTrace]


@leaves_callers_mesh
def explore(
    model: Model,
    prompt: Sequence[int],
    methods: Methods,
    steps: int,
    say: Callable[[str], None] = lambda line: None,
) -> Exploration:
    """Reads a prompt under each method, and then the answer of `full`, one token at a time.

    Args:
      model: from `kvjax.load`.
      prompt: ids.
      methods: values, strings, or strings separated by ";".
      steps: most tokens of the answer, which may end earlier with an end-of-sequence id.
      say: called with each method's name as it begins.

    Raises:
      KvjaxError: a model whose layers have different numbers of heads.
    """
    if len(model.config.attention_layers) < model.config.layers:
        raise KvjaxError(
            "some layers of this model hold a recurrent state and no tokens, and the page shows what each layer holds "
            "of each token; explore a model whose layers all have attention"
        )
    heads = {(kind.attention.kv_heads, kind.attention.groups) for kind in model.config.kinds}
    if len(heads) > 1:
        raise KvjaxError(
            f"the layers of this model have different heads ({model.config.describe_heads()}), and the page shows one "
            "grid of heads for all; explore a model whose layers have equal ones"
        )
    ((_, groups),) = heads
    say("full")
    capacity = round_up(len(prompt) + steps)
    model = model_for(model, [prompt], len(prompt) + steps)  # no text grows to the rounded capacity
    state = _read_prompt(model, prompt, resolve("full")["full"], capacity)
    answer = _write_greedily(state, steps)
    attention, likeliest = [], []
    for token in answer:
        state = state.feed(token)
        likeliest.append(state.likeliest)
        by_layer = [
            _attention_weights(
                layer_state, state.cache.length, sinks_of(model.auto_params[f"layer_{i}"]), layer.spec.rule
            )
            for i, (layer, layer_state) in enumerate(zip(state.cache.plan, state.cache.layers, strict=True))
            if isinstance(layer, TracedLayer)
        ]
        attention.append(np.stack(by_layer)[:, :, : len(prompt) + len(answer)])
    exact = np.stack(attention, 2)
    traces = []
    for name, method in resolve(methods).items():
        say(name)
        traces.append(_trace_answer(_read_prompt(model, prompt, method, capacity), name, answer, exact))
    return Exploration(model.name, groups, list(prompt), answer, likeliest, exact, traces)


def _read_prompt(model: Model, prompt: Sequence[int], method: KVMethod, capacity: int) -> AnswerState:
    with warnings.catch_warnings():
        # A traced cache holds a copy of all tokens, so no method ever saves anything.
        warnings.filterwarnings("ignore", ".* saves nothing on this prompt", KvjaxWarning)
        context = read(model, [list(prompt)], TracedMethod(method, capacity), capacity=capacity)
    return AnswerState(model, context.cache, context.last_logits)


def _write_greedily(state: AnswerState, most: int) -> list[int]:
    """The likeliest tokens one after the other, up to an end-of-sequence id, which is the last one."""
    answer = [state.likeliest]
    while len(answer) < most and answer[-1] not in state.model.config.eos_ids:
        state = state.feed(answer[-1])
        answer.append(state.likeliest)
    return answer


def _trace_answer(state: AnswerState, name: str, answer: Sequence[int], exact: np.ndarray) -> MethodTrace:
    """Feeds the answer to a traced method; exact: the attention of `Exploration`."""
    inner = inner_cache(state.cache)
    own_answer, size = _write_greedily(state, len(answer)), state_bytes(inner)
    has_reader_state = any(isinstance(x, LayerState) and bool(jax.tree.leaves(x.reader_state)) for x in inner.layers)
    before, codes, likeliest = _encode_cache(state.cache), [], []
    for token in answer:
        state = state.feed(token)
        after = _encode_cache(state.cache)
        codes.append(token_codes.codes_of_step(before, after, int(state.cache.length[0]) - 1))
        likeliest.append(state.likeliest)
        before = after
    status, errors = (np.stack(x, 2)[..., : exact.shape[3]] for x in zip(*codes, strict=True))
    lost = np.where(status & token_codes.HELD, 0, exact).sum(3).astype(np.float32)
    return MethodTrace(name, status, errors, lost, likeliest, own_answer, size, has_reader_state)


def _encode_cache(cache: Cache) -> tuple[np.ndarray, np.ndarray]:
    """Both bytes of all tokens of a traced cache, u8[L K C] each."""
    layers = zip(inner_cache(cache).plan, cache.layers, strict=True)
    status, errors = zip(*(_encode_layer(state, layer=layer) for layer, state in layers), strict=True)
    return np.stack(jax.device_get(status)), np.stack(jax.device_get(errors))


@functools.partial(jax.jit, static_argnames="layer")
def _encode_layer(state: TracedState, layer: BoundLayer) -> tuple[Array, Array]:
    tolerance = max(1e-6, float(jnp.finfo(state.k.dtype).eps) / 8)
    return token_codes.encode_status(token_status(layer, state.inner, state.exact), state.roles, tolerance)


@functools.partial(jax.jit, static_argnums=3)
def _attention_weights(state: TracedState, length: Array, sinks: Array | None, rule: Rule) -> Array:
    """f32[K C]: the exact attention of the last token, the mean over each head's query heads."""
    exact = state.exact
    logits = rule.logits(scores(state.q, exact.k), exact.pos, length[:, None] - 1)
    return softmax(logits, sinks)[0, :, :, 0].mean(1)
