"""The public calls on a model and an explicit state: logits, prefill, extend, score."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from kvjax.cache.contract import State
from kvjax.cache.method import Method
from kvjax.core import memory
from kvjax.core.mesh import named
from kvjax.core.program import Program
from kvjax.core.types import Array, KvjaxError
from kvjax.models.model import Model
from kvjax.run import forward
from kvjax.run.forward import Setting
from kvjax.run.prompts import Prompts, pad, round_up, token_ids

UNCACHED = Program(forward.uncached, static=("setting",))
PREFILL = Program(forward.prefill, static=("setting",))
CHUNK = Program(forward.prefill_chunk, static=("setting",), donate=("past",))
ENCODE = Program(forward.encode_layer, static=("layer", "setting"))
UNEMBED = Program(forward.unembed, static=("setting",))
EXTEND = Program(forward.extend, static=("setting",))


def setting(
    model: Model, method: Method | None = None, capacity: int = 0, prompts: Sequence[int] | np.ndarray | None = None
) -> Setting:
    """What programs of this model under this method are compiled for; prompts: their lengths, for a prefill."""
    if method is None:
        return Setting(model.config, mesh=model.mesh)
    if method.uses_host:
        memory.require_host_memory()
    plan, slots = method.plan(model.config), ()
    if prompts is not None:
        lengths = {int(n) for n in prompts}
        room = round_up(capacity - max(lengths), 16)  # so that similar prompts share one compiled program
        slots = tuple(min(capacity, max(map(layer.kept, lengths)) + room) for layer in plan)
    return Setting(model.config, plan, capacity, slots, model.mesh)


def place(model: Model, x: np.ndarray, axes: str) -> Array:
    """An input array on the model's mesh, if it has one."""
    return jnp.asarray(x) if model.mesh is None else jax.device_put(x, named(axes, model.mesh))


def logits(model: Model, ids: Prompts) -> Array:
    """The exact uncached forward pass: f32[B T V], T the longest prompt; beyond a row's length it means nothing."""
    tokens, lengths = pad(token_ids(model, ids))
    out = UNCACHED(params=model.params, tokens=place(model, tokens, "B T"), setting=setting(model))
    return out[:, : int(lengths.max())]


def room(ids: Sequence[Sequence[int]], capacity: int | None, extra: int) -> int:
    """Capacity in tokens per row, checked against the longest prompt and `extra` tokens to come."""
    need = max(map(len, ids)) + extra
    if capacity is not None and capacity < need:
        raise KvjaxError(
            f"capacity {capacity} is too small: the longest prompt has {need - extra} tokens and {extra} more are to "
            f"come; raise capacity to at least {need}, or shorten the prompt"
        )
    return round_up(need if capacity is None else capacity)


def prefill(
    model: Model,
    ids: Prompts,
    method: Method,
    *,
    capacity: int | None = None,
    chunk: int | None = None,
    progress: bool = False,
) -> tuple[Array, State]:
    """Runs the prompts; returns (logits of each row's last token f32[B V], state).

    capacity: tokens per row that the state has room for, the prompt included (default: 128 more than the longest).
    chunk: process so many tokens at a time (memory then holds the full keys and values of all layers at once, where
    otherwise one layer's suffice); progress: show a bar over the chunks.
    """
    ids = token_ids(model, ids)
    capacity = room(ids, capacity, 0 if capacity is not None else 128)
    if chunk is not None:
        return _prefill_chunks(model, ids, method, capacity, chunk, progress)
    s = setting(model, method, capacity, [len(row) for row in ids])
    return PREFILL(params=model.params, **inputs(model, *pad(ids)), setting=s)


def inputs(model: Model, tokens: np.ndarray, lengths: np.ndarray) -> dict[str, Array]:
    """Padded prompts where the model lives."""
    return {"tokens": place(model, tokens, "B T"), "lengths": place(model, lengths, "B")}


def fresh_inputs(model: Model, ids: Sequence[Sequence[int]], state: State, extra: int = 0) -> dict[str, Array]:
    """`inputs` for tokens that follow a state, checked against its rows and its room (`extra` more are to come)."""
    if len(ids) != state.length.shape[0]:
        raise KvjaxError(f"{len(ids)} rows were given for a state of {state.length.shape[0]} rows")
    tokens, lengths = pad(ids, max(map(len, ids)))
    used = int(np.max(jax.device_get(state.length)))
    need = used + tokens.shape[1] + extra
    if need > state.capacity:
        raise KvjaxError(
            f"the state has room for {state.capacity} tokens per row and holds {used}; {need - used} more do not fit: "
            f"prefill with capacity={need} or more"
        )
    return inputs(model, tokens, lengths)


def _prefill_chunks(model, ids, method, capacity, chunk, progress):
    if chunk < 1:
        raise KvjaxError(f"chunk must be at least 1 token, got {chunk}")
    tokens, lengths = pad(ids, round_up(max(map(len, ids)), chunk))
    s = setting(model, method, capacity, lengths)
    if any(m.restricted for m in s.plan):
        raise KvjaxError("this method feeds a prompt in chunks of its own; leave `chunk` out")
    place_lengths = place(model, lengths, "B")
    past = forward.start_chunks(len(ids), tokens.shape[1], model.dtype, s)
    starts = range(0, tokens.shape[1], chunk)
    for start in track(starts, "prefill", transient=True) if progress else starts:
        part = place(model, tokens[:, start : start + chunk], "B T")
        past = CHUNK(
            params=model.params, tokens=part, start=jnp.int32(start), lengths=place_lengths, past=past, setting=s
        )
        if progress:
            jax.block_until_ready(past.last)  # otherwise the bar would only show how fast work is queued
    out = UNEMBED(params=model.params, hidden=past.last, setting=s)
    dense, layers = list(past.layers), []
    del past
    while dense:  # one layer's dense arrays are freed before the next layer is encoded
        k, v, q = dense.pop(0)
        layers.append(ENCODE(k=k, v=v, q=q, lengths=place_lengths, layer=len(layers), setting=s))
    return out, State(tuple(layers), place_lengths, capacity)


def extend(
    model: Model, ids: Prompts, state: State, method: Method, *, decoded: bool | Sequence[Sequence[bool]] = False
) -> tuple[Array, State]:
    """Runs further tokens of every row on a state: (logits f32[B T V], a new state); the given state stays usable.

    Rows may be of unequal length; beyond a row's length the logits mean nothing. decoded: which tokens stand for what
    the method would decode, all or those marked in each row: one that looks ahead must guess these, as it does then,
    and is not told. Raises when the state has no room.
    """
    ids = token_ids(model, ids)
    args = fresh_inputs(model, ids, state)
    if method.lookahead and decoded is not False:
        marks = [[True] * len(row) for row in ids] if decoded is True else decoded
        told = [[not d for d in row[1:]] + [False] for row in marks]
        args["told"] = place(model, pad(told, args["tokens"].shape[1])[0] > 0, "B T")
    return EXTEND(params=model.params, **args, state=state, setting=setting(model, method, state.capacity))


def score(model: Model, prompts: Prompts, continuations: Prompts, method: Method) -> list[np.ndarray]:
    """Natural-log probabilities of each continuation's tokens after its prompt, under a method; one f32[T] per row."""
    prompts, continuations = token_ids(model, prompts), token_ids(model, continuations)
    if len(prompts) != len(continuations):
        raise KvjaxError(f"{len(prompts)} prompts but {len(continuations)} continuations; give one per prompt")
    longest = max(map(len, continuations))
    first, state = prefill(model, prompts, method, capacity=max(map(len, prompts)) + longest)
    out = first[:, None]
    if longest > 1:
        fed = [c[:-1] or [0] for c in continuations]  # a row of one token feeds padding that nothing reads
        out = jnp.concatenate([out, extend(model, fed, state, method, decoded=True)[0]], 1)
    tokens, _ = pad(continuations, longest)
    logp = np.asarray(log_probs(out, jnp.asarray(tokens)))
    return [row[: len(c)] for row, c in zip(logp, continuations, strict=True)]


@jax.jit
def log_probs(out: Array, tokens: Array) -> Array:
    """logits f32[B T V], tokens i32[B T] -> natural-log probabilities f32[B T]."""
    return jnp.take_along_axis(jax.nn.log_softmax(out, -1), tokens[..., None], -1)[..., 0]
