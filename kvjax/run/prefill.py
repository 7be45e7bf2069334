"""Prompts into caches: in one piece, in pieces, or through the method; the one path that they all take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.contract import Cache, slots_of
from kvjax.cache.select.shares import SHARED_ROUNDING
from kvjax.core import arguments
from kvjax.core.mesh import constrain
from kvjax.core.program import Program
from kvjax.core.types import Array, Block, KvjaxError
from kvjax.models.decoder import pick
from kvjax.models.model import Model
from kvjax.run import by_layer, devices, limits, probe, reading
from kvjax.run.by_layer import through
from kvjax.run.clock import Clock
from kvjax.run.forward import Plan, Setting
from kvjax.run.passes import Piece, Site, Whole, sites
from kvjax.run.plan import make_cache
from kvjax.run.prompts import consecutive, pad, place, round_up
from kvjax.run.reading import Prompt

SHORT = 512
"""Tokens up to which a prompt asks the last layer for all of them: it then shares the other layers' program."""


class Past(NamedTuple):
    """A prompt on its way: per layer a `Prompt` or a state, and what the last layer gave of each row's last token."""

    layers: tuple[Any, ...]
    last: Array  # [B D]


def _begin(batch: int, width: int, dtype: Any, setting: Setting, site: Site) -> Prompt | Any:
    """A layer before the first piece of a prompt, with room for `width` tokens per row."""
    c, needs = setting.config, site.layer.needs

    def held(*axes: int) -> Array:
        return constrain(jnp.zeros((batch, c.kv_heads, *axes, c.head_dim), dtype), "B K", setting.mesh)

    if needs.chunk:
        nothing = Block(held(0), held(0), jnp.zeros((batch, 1, 0), jnp.int32))
        return devices.prefill(site.layer, nothing, None, site.slots, setting.mesh)
    queries = held(c.groups, width if needs.queries is None else needs.queries)
    hidden = jnp.zeros((batch, 1, width, c.width), dtype) if needs.hidden else None
    return Prompt(held(width), held(width), queries, hidden)


def _if_inside(x: Array, at: Array, otherwise: Array) -> Array:
    """x [B C D] at index at i32[B] where that is one of the C, otherwise [B D]."""
    inside = (at >= 0) & (at < x.shape[1])
    return jnp.where(inside[:, None], pick(x, jnp.clip(at, 0, x.shape[1] - 1)[:, None])[:, 0], otherwise)


def _measure(prompt: Prompt, lengths: Array, setting: Setting, site: Site) -> Array:
    return devices.measure(site.layer, *reading.seen_by(site.layer, prompt, lengths), setting.mesh)


def _shares(measures: Array, lengths: Array, plan: Plan) -> Array:
    return plan[0].shares(measures, lengths)


def _encode(
    prompt: Prompt, lengths: Array, setting: Setting, site: Site, capacity: int, keep: Array | None = None
) -> Any:
    return reading.encode(site.layer, prompt, lengths, site.slots, capacity, setting.mesh, keep)


BEGIN = Program(_begin, static=("batch", "width", "dtype", "setting", "site"))
LAST = Program(_if_inside)
MEASURE = Program(_measure, static=("setting", "site"))
SHARES = Program(_shares, static=("plan",))
ENCODE = Program(_encode, static=("setting", "site", "capacity"))


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
        with clock.timed():
            return jax.block_until_ready(_whole(model, plan, ids, slots, capacity, width, clock))
    # Pieces of a method's own end where its slots do; those of `chunk` are equal, to share one program.
    tokens, lengths = pad(ids, padded if chunk is None else round_up(padded, chunk))
    lengths = place(model, lengths, "B")
    past = pieces(model, setting, plan, tokens, lengths, slots, piece or tokens.shape[1], progress, clock)
    with clock.timed():
        out = jax.block_until_ready(by_layer.logits(model, past.last, clock))
    prompts = [reading.with_output(model.params, layer, i, past.layers[i]) for i, layer in enumerate(plan)]
    del past  # each layer's exact keys and values are freed as soon as the layer is encoded
    if any(layer.needs.probe for layer in plan):
        prompts = probe.probed(model, ids, prompts, lengths, plan, clock)
    layers = encoded(model, setting, prompts, lengths, plan, slots, capacity, clock)
    return out, make_cache(model, plan, layers, lengths, capacity)


def _whole(
    model: Model,
    plan: Plan,
    ids: Sequence[Sequence[int]],
    slots: tuple[int, ...],
    capacity: int,
    width: int | None,
    clock: Clock,
) -> tuple[Array, Cache]:
    """Prompts in one piece."""
    tokens, lengths = (place(model, *x) for x in zip(pad(ids, width), ("B T", "B"), strict=True))
    wanted = [layer.needs.queries for layer in plan]
    queries = None if None in wanted or tokens.shape[1] <= SHORT else max(1, *wanted)
    where, nothing = sites(plan, model.config, slots, queries is not None), (None,) * len(plan)
    work, pos = Whole(lengths, capacity, queries), consecutive(model, 0, tokens.shape)
    x, layers = through(model, tokens, pos, work, where, nothing, clock)
    at = [x.shape[1] if queries else len(row) for row in ids]
    last = clock.start(by_layer.PICK, x=x, at=place(model, np.array(at, np.int32) - 1, "B"))
    return by_layer.logits(model, last, clock), make_cache(model, plan, layers, lengths, capacity)


def _piece_width(plan: Plan, chunk: int | None) -> int | None:
    """Tokens at a time; None: all at once."""
    restricted = {layer.needs.chunk for layer in plan} - {0}
    if chunk is None:
        return min(restricted, default=None)
    arguments.integer("chunk", chunk)
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
) -> Past:
    """Prompts, tokens i32[B T], so many tokens at a time, held exactly."""
    B, width = tokens.shape
    where = sites(plan, model.config, slots)
    more = {"batch": B, "width": width, "dtype": model.dtype, "setting": setting}
    layers = tuple(clock.call(BEGIN, **more, site=site) for site in where)
    past = Past(layers, jnp.zeros((B, model.config.width), model.dtype))
    starts = range(0, width, piece)
    if progress:
        from rich.progress import track  # here, as only a bar needs it

        starts = track(starts, "prefill", transient=True)
    for start in starts:
        part = place(model, tokens[:, start : start + piece], "B T")
        work, pos = Piece(jnp.int32(start), lengths), consecutive(model, start, part.shape)
        with clock.timed():
            x, layers = through(model, part, pos, work, where, past.layers, clock)
            last = clock.start(LAST, x=x, at=lengths - 1 - start, otherwise=past.last)
            past = jax.block_until_ready(Past(layers, last))
    return past


def measured(model: Model, setting: Setting, prompts: Sequence[Any], lengths: Array, plan: Plan, clock: Clock) -> Any:
    """What every layer measures of its prompt, for a budget that all layers share: arrays [L B ...]."""
    more = {"lengths": lengths, "setting": setting}
    seen = zip(prompts, sites(plan, model.config), strict=True)
    measures = [clock.call(MEASURE, prompt=prompt, site=site, **more) for prompt, site in seen]
    return jax.tree.map(lambda *layers: jnp.stack(layers), *measures)


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
    sized = plan  # the layers with the room that they turn out to need; the cache's plan stays as it is
    if any(layer.needs.all_layers for layer in plan):
        every = measured(model, setting, prompts, lengths, plan, clock)
        tokens = np.asarray(clock.call(SHARES, measures=every, lengths=lengths, plan=plan))
        room = round_up(capacity - int(np.max(lengths)), 16)
        most = [round_up(layer.slots_for(kept), SHARED_ROUNDING) for layer, kept in zip(plan, tokens, strict=True)]
        slots = tuple(min(capacity, layer.holding(n, room)) for layer, n in zip(plan, most, strict=True))
        keep = [place(model, kept, "B") for kept in tokens]
        sized = tuple(layer.with_room_for(n) for layer, n in zip(plan, most, strict=True))
    where = sites(sized, model.config, slots)
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
        more = {"lengths": lengths, "keep": keep[i], "setting": setting, "capacity": capacity}
        layers.append(clock.call(ENCODE, prompt=prompt, site=where[i], **more))
    return tuple(layers)
