"""Prompts into caches: in one piece, in pieces, or through the method; the one path that they all take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from kvjax.cache.contract import Cache, slots_of
from kvjax.core.program import Program
from kvjax.core.types import Array, KvjaxError
from kvjax.models.model import Model
from kvjax.run import devices, forward, limits, probe, reading
from kvjax.run.forward import Plan, Setting
from kvjax.run.prompts import pad, place, round_up
from kvjax.run.reading import Prompt


@dataclasses.dataclass
class Clock:
    """Seconds of wall-clock time, those spent compiling apart."""

    compiling: float = 0.0
    running: float = 0.0

    def call(self, program: Program, **arguments: Any) -> Any:
        """Runs a program, and waits for what it gives."""
        try:
            run, seconds = program.compile(**arguments)
            self.compiling += seconds
            start = time.perf_counter()
            out = jax.block_until_ready(run(**program.traced(arguments)))
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise KvjaxError(
                f"there is not enough memory ({e}); give fewer or shorter prompts at a time, ask for fewer new tokens, "
                "or use a method that holds less"
            ) from e
        self.running += time.perf_counter() - start
        return out


def _whole(
    params: Any,
    tokens: Array,
    lengths: Array,
    setting: Setting,
    plan: Plan,
    slots: tuple[int, ...],
    capacity: int,
) -> tuple[Array, Cache]:
    """A prompt in one piece: (logits of each row's last token f32[B V], cache)."""

    def finish(i: int, prompt: Prompt) -> Any:
        return reading.encode(plan[i], prompt, lengths, slots[i], capacity, setting.mesh)

    hidden, layers = reading.whole_prompt(params, tokens, lengths, setting, plan, finish)
    return forward.unembed(params, hidden, setting), Cache(layers, lengths, capacity, plan, setting.config)


def _measure(prompt: Prompt, lengths: Array, setting: Setting, plan: Plan, layer: int) -> Array:
    return devices.measure(plan[layer], *reading.seen_by(plan[layer], prompt, lengths), setting.mesh)


def _shares(measures: Array, lengths: Array, plan: Plan) -> Array:
    return plan[0].shares(measures, lengths)


def _encode(
    prompt: Prompt,
    lengths: Array,
    setting: Setting,
    plan: Plan,
    layer: int,
    slots: int,
    capacity: int,
    keep: Array | None = None,
) -> Any:
    return reading.encode(plan[layer], prompt, lengths, slots, capacity, setting.mesh, keep)


WHOLE = Program(_whole, static=("setting", "plan", "slots", "capacity"))
START = Program(reading.start_prompt, static=("batch", "width", "dtype", "setting", "plan", "slots"))
PIECE = Program(reading.prompt_piece, static=("setting", "plan"), donate=("past",))
MEASURE = Program(_measure, static=("setting", "plan", "layer"))
SHARES = Program(_shares, static=("plan",))
ENCODE = Program(_encode, static=("setting", "plan", "layer", "slots", "capacity"))
UNEMBED = Program(forward.unembed, static=("setting",))


def run(
    model: Model,
    plan: Plan,
    ids: Sequence[Sequence[int]],
    capacity: int,
    *,
    chunk: int | None = None,
    width: int | None = None,
    progress: bool = False,
    clock: Clock | None = None,
) -> tuple[Array, Cache]:
    """Runs prompts, lists of ids: (logits of each row's last token f32[B V], cache).

    chunk: so many tokens at a time; default all at once. width: what prompts are padded to, default what suits the
    longest. progress: a bar over the pieces.
    """
    clock = clock or Clock()
    setting = Setting(model.config, model.mesh)
    slots = tuple(slots_of(layer, tuple(map(len, ids)), capacity) for layer in plan)
    piece = _piece_width(plan, chunk)
    longest = max(map(len, ids))
    padded = width or round_up(longest)
    limits.check_prompts(model, plan, tuple(map(len, ids)), slots, capacity, padded, piece or padded)
    if piece is None and not any(n.all_layers or n.probe or n.neighbour for n in (layer.needs for layer in plan)):
        tokens, lengths = (place(model, *x) for x in zip(pad(ids, width), ("B T", "B"), strict=True))
        return clock.call(
            WHOLE,
            params=model.params,
            tokens=tokens,
            lengths=lengths,
            setting=setting,
            plan=plan,
            slots=slots,
            capacity=capacity,
        )
    width = width or round_up(longest)
    # Pieces of a method's own end where its slots do; those of `chunk` are equal, to share one program.
    tokens, lengths = pad(ids, width if chunk is None else round_up(width, chunk))
    lengths = place(model, lengths, "B")
    past = pieces(model, setting, plan, tokens, lengths, slots, piece or tokens.shape[1], progress, clock)
    out = clock.call(UNEMBED, params=model.params, hidden=past.last, setting=setting)
    prompts = [reading.with_output(model.params, layer, i, past.layers[i]) for i, layer in enumerate(plan)]
    del past  # each layer's exact keys and values are freed as soon as the layer is encoded
    if any(layer.needs.probe for layer in plan):
        prompts = probe.probed(model, setting, ids, prompts, lengths, plan, clock)
    layers = encoded(model, setting, prompts, lengths, plan, slots, capacity, clock)
    return out, Cache(layers, lengths, capacity, plan, model.config)


def _piece_width(plan: Plan, chunk: int | None) -> int | None:
    """Tokens at a time; None: all at once."""
    restricted = {layer.needs.chunk for layer in plan} - {0}
    if chunk is None:
        return min(restricted, default=None)
    if chunk < 1:
        raise KvjaxError(f"chunk must be at least 1 token, got {chunk}")
    if restricted:
        raise KvjaxError("this method feeds a prompt in chunks of its own; leave `chunk` out")
    return chunk


def pieces(
    model: Model,
    setting: Setting,
    plan: Plan,
    tokens: np.ndarray,
    lengths: Array,
    slots: tuple[int, ...],
    piece: int,
    progress: bool,
    clock: Clock,
) -> reading.Past:
    past = clock.call(
        START,
        batch=tokens.shape[0],
        width=tokens.shape[1],
        dtype=model.dtype,
        setting=setting,
        plan=plan,
        slots=slots,
    )
    starts = range(0, tokens.shape[1], piece)
    for start in track(starts, "prefill", transient=True) if progress else starts:
        past = clock.call(
            PIECE,
            params=model.params,
            tokens=place(model, tokens[:, start : start + piece], "B T"),
            start=jnp.int32(start),
            lengths=lengths,
            past=past,
            setting=setting,
            plan=plan,
        )
    return past


def encoded(
    model: Model,
    setting: Setting,
    prompts: list[Any],
    lengths: Array,
    plan: Plan,
    slots: tuple[int, ...],
    capacity: int,
    clock: Clock,
) -> tuple[Any, ...]:
    """The states of all layers; a layer's exact keys and values are freed when no other layer has to see them."""
    keep: list[Array | None] = [None] * len(plan)
    if any(layer.needs.all_layers for layer in plan):
        more = {"lengths": lengths, "setting": setting, "plan": plan}
        measures = [clock.call(MEASURE, prompt=p, layer=i, **more) for i, p in enumerate(prompts)]
        tokens = np.asarray(clock.call(SHARES, measures=jnp.stack(measures), lengths=lengths, plan=plan))
        room = round_up(capacity - int(np.max(lengths)), 16)
        most = [round_up(int(row.max()), 16) for row in tokens]
        slots = tuple(min(capacity, layer.holding(n, room)) for layer, n in zip(plan, most, strict=True))
        keep = [place(model, row, "B") for row in tokens]
    layers: list[Any] = []
    below = None
    while prompts:
        i, prompt = len(layers), prompts.pop(0)
        if plan[i].needs.neighbour:
            other = prompts[0] if plan[i].needs.neighbour > 0 else below
            prompt = prompt._replace(neighbour=(other.k, other.v))
        below = prompt if prompts and plan[i + 1].needs.neighbour < 0 else None
        if plan[i].needs.chunk:
            layers.append(prompt)  # fed through the method, it is a state already
            continue
        layers.append(
            clock.call(
                ENCODE,
                prompt=prompt,
                lengths=lengths,
                keep=keep[i],
                setting=setting,
                plan=plan,
                layer=i,
                slots=slots[i],
                capacity=capacity,
            )
        )
    return tuple(layers)
