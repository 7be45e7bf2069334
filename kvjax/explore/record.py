"""What methods make of each token of a text while the model answers: a record of each, on the same answer."""

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
from kvjax.core.attention import MASKED_LOGIT, scores, visible, weights
from kvjax.core.types import Array
from kvjax.errors import KvjaxWarning
from kvjax.explore import state
from kvjax.explore.steps import Steps
from kvjax.explore.traced_state import Watch, Watched, own_cache, own_states, watched_layers
from kvjax.generation.context import read
from kvjax.generation.inputs import round_up
from kvjax.methods.strings import Methods, resolve
from kvjax.models.model import Model


@dataclasses.dataclass(frozen=True, eq=False)
class Watching:
    """What one method held at each of T steps, of P positions; see `kvjax.explore.state` for the codes."""

    name: str
    held: np.ndarray  # u8[L K T P], as the query of a step found it
    off: np.ndarray  # u8[L K T P], how far key and value were from those that came
    lost: np.ndarray  # f32[L K T], the share of the exact attention that falls on tokens that are gone
    likeliest: list[int]  # the T tokens that it would put next, each after the same tokens before it
    own: list[int]  # the answer that it would have written by itself
    bytes: CacheBytes  # of the prompt
    aside: bool  # whether its reader keeps something beside the slots, which is not looked at


@dataclasses.dataclass(frozen=True, eq=False)
class Explored:
    """A text, the answer of `full`, and what each method held while that answer was read token by token."""

    model: str
    groups: int  # query heads of each key/value head
    prompt: list[int]
    answer: list[int]  # T tokens
    likeliest: list[int]  # those that the exact cache would put next, each after the tokens before it
    attention: np.ndarray  # f32[L K T P], exact, of the answer's T tokens; the mean over a head's query heads
    methods: list[Watching]


def explored(
    model: Model,
    prompt: Sequence[int],
    methods: Methods,
    steps: int,
    say: Callable[[str], None] = lambda what: None,
) -> Explored:
    """Reads a prompt under each method, and then the answer of `full`, one token at a time.

    The answer has `steps` tokens, or ends with an end-of-sequence id. say: is told each method's name as it begins.
    """
    say("full")
    capacity = round_up(len(prompt) + steps)
    at = _begun(model, prompt, resolve("full")["full"], capacity)
    answer = greedy(at, steps)
    attention, likeliest = [], []
    for token in answer:
        at = at.then(token)
        likeliest.append(at.likeliest)
        attention.append(_exact_attention(at.cache)[:, :, : len(prompt) + len(answer)])
    exact = np.stack(attention, 2)
    found = []
    for name, method in resolve(methods).items():
        say(name)
        found.append(watched(_begun(model, prompt, method, capacity), name, answer, exact))
    return Explored(model.name, model.config.groups, list(prompt), answer, likeliest, exact, found)


def greedy(at: Steps, most: int) -> list[int]:
    """The likeliest tokens one after the other, up to an end-of-sequence id, which is the last one."""
    answer = [at.likeliest]
    while len(answer) < most and answer[-1] not in at.model.config.eos_ids:
        at = at.then(answer[-1])
        answer.append(at.likeliest)
    return answer


def watched(at: Steps, name: str, answer: Sequence[int], exact: np.ndarray) -> Watching:
    """What a watched method holds while it reads an answer; exact: the attention of `Explored`."""
    layers = own_states(at.cache.layers)
    own, size = greedy(at, len(answer)), state_bytes(own_cache(at.cache))
    aside = any(isinstance(x, LayerState) and bool(jax.tree.leaves(x.reader_state)) for x in layers)
    before, seen, likeliest = _codes(at.cache), [], []
    for token in answer:
        at = at.then(token)
        after = _codes(at.cache)
        seen.append(state.found(before, after, int(at.cache.length[0]) - 1))
        likeliest.append(at.likeliest)
        before = after
    held, off = (np.stack(x, 2)[..., : exact.shape[3]] for x in zip(*seen, strict=True))
    lost = np.where(held & state.HELD, 0, exact).sum(3)
    return Watching(name, held, off, lost.astype(np.float32), likeliest, own, size, aside)


def _begun(model: Model, prompt: Sequence[int], method: KVMethod, capacity: int) -> Steps:
    with warnings.catch_warnings():
        # A watched cache holds a copy of all tokens, so that none ever saves anything.
        warnings.filterwarnings("ignore", ".* saves nothing on this prompt", KvjaxWarning)
        return Steps.behind(read(model, [list(prompt)], Watched(method, capacity), capacity=capacity))


def _codes(cache: Cache) -> tuple[np.ndarray, np.ndarray]:
    """What a watched cache of one row holds: u8[L K C], twice, as `state` has it."""
    layers = zip(own_cache(cache).plan, cache.layers, strict=True)
    found = [_look(watch, layer=layer) for layer, watch in layers]
    held, off = zip(*found, strict=True)
    return np.stack(jax.device_get(held)), np.stack(jax.device_get(off))


@functools.partial(jax.jit, static_argnames="layer")
def _look(watch: Watch, layer: BoundLayer) -> tuple[Array, Array]:
    exact = max(1e-6, float(jnp.finfo(watch.k.dtype).eps) / 8)
    return state.coded(token_status(layer, watch.own, watch.came), watch.notes, exact)


def _exact_attention(cache: Cache) -> np.ndarray:
    """f32[L K C]: the exact attention of a watched cache's last token, the mean over each head's query heads."""
    layers = zip(watched_layers(cache), cache.layers, strict=True)
    return np.stack([np.asarray(_weights(watch, cache.length, layer.spec.window)) for layer, watch in layers])


@functools.partial(jax.jit, static_argnums=2)
def _weights(watch: Watch, length: Array, window: int | None) -> Array:
    came = watch.came
    seen = visible(came.pos, length[:, None] - 1, window)
    p, _, l = weights(jnp.where(seen, scores(watch.q, came.k), MASKED_LOGIT))
    return (p / l[..., None])[0, :, :, 0].mean(1)
