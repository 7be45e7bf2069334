"""Documents read behind a context that is held once, whatever method holds what is their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.contract import Cache, slots_of
from kvjax.cache.shared import Behind, Shared, members_of, moved
from kvjax.core import memory
from kvjax.core.mesh import layer_axes, named, per_device
from kvjax.core.observe import Obs
from kvjax.core.program import Program
from kvjax.core.types import Array, Block, KvjaxError
from kvjax.models.decoder import Decoder, pick
from kvjax.models.model import Model
from kvjax.run import forward, reading
from kvjax.run.clock import Clock
from kvjax.run.filled import checked
from kvjax.run.forward import Plan, Setting
from kvjax.run.plan import bind, make_cache
from kvjax.run.prompts import pad, place, round_up
from kvjax.run.reading import Prompt


def read_behind(
    model: Model,
    prefix: Cache,
    method: Behind,
    ids: Sequence[Sequence[int]],
    of: Sequence[int] | None,
    room: int,
    clock: Clock,
) -> tuple[Array, Cache]:
    """Documents, lists of ids, behind the rows of a cache: (logits of each row's last token f32[B V], their cache).

    of: the row of the cache that each document follows, -1 for none; default row 0, the only one. On a mesh all follow
    row 0, and the cache has as many equal rows as the mesh divides rows among.
    """
    checked(model, prefix)
    which, plan = _chosen(prefix, len(ids), of), bind(method, model.config)
    shared = np.asarray(prefix.length)
    before = np.where(which >= 0, shared[np.maximum(which, 0)], 0)
    lengths = np.array([len(row) for row in ids])
    capacity = round_up(int((before + lengths).max()) + room)
    own = capacity - int(before.min())  # no row's own tokens are more
    slots = tuple(slots_of(layer, tuple(lengths.tolist()), own) for layer in plan)
    tokens, _ = pad(ids, min(round_up(int(lengths.max())), own))
    one = (len(shared) == 1 or model.mesh is not None) and (which == 0).all()
    if model.mesh is not None and not one:
        raise KvjaxError("on a mesh all rows share one prefix, row 0; read each group of rows as a batch of its own")
    last, layers = clock.call(
        BEHIND,
        params=model.params,
        tokens=place(model, tokens, "B T"),
        lengths=place(model, lengths.astype(np.int32), "B"),
        before=place(model, before.astype(np.int32), "B"),
        prefix=prefix.layers if model.mesh is None else _first_row(prefix, model.mesh),
        members=None if one else members_of(which, len(shared)),
        setting=Setting(model.config, model.mesh),
        plan=plan,
        slots=slots,
    )
    return last, make_cache(model, plan, layers, place(model, (before + lengths).astype(np.int32), "B"), capacity)


def _chosen(prefix: Cache, count: int, of: Sequence[int] | None) -> np.ndarray:
    """The row of the prefix for each of so many documents."""
    rows = prefix.length.shape[0]
    if of is None:
        if rows != 1:
            raise KvjaxError(f"the context has {rows} rows; say with `of` which of them each document follows")
        return np.zeros(count, np.int64)
    which = np.asarray(of)
    if which.shape != (count,) or not np.issubdtype(which.dtype, np.integer):
        raise KvjaxError(f"`of` names one row of the context for each of {count} documents, got {of!r}")
    if which.min() < -1 or which.max() >= rows:
        raise KvjaxError(f"`of` names rows 0..{rows - 1} of the context, or -1 for none, got {of!r}")
    return which.astype(np.int64)


def _first_row(prefix: Cache, mesh: Mesh) -> tuple[Any, ...]:
    """Row 0 of a cache, on all devices along the rows."""

    def one(x: Array) -> Array:
        row = jax.device_put(x, memory.DEVICE)[:1]
        sharding = named(layer_axes(row.shape, 2, prefix.config.kv_heads), mesh)
        return jax.device_put(row, sharding.with_memory_kind(x.sharding.memory_kind))

    return jax.tree.map(one, prefix.layers)


def _behind(
    params: Any,
    tokens: Array,
    lengths: Array,
    before: Array,
    prefix: tuple[Any, ...],
    members: Array | None,
    setting: Setting,
    plan: Plan,
    slots: tuple[int, ...],
) -> tuple[Array, tuple[Any, ...]]:
    """Tokens i32[B T] behind before i32[B] shared ones -> (logits of the last tokens f32[B V], the layers' states)."""

    def attend(i: int, q: Array, k: Array, v: Array, x: Array) -> tuple[Array, Any]:
        layer: Shared = plan[i]
        queries, hidden = reading.shown(layer, q, 0, lengths), x[:, None] if layer.needs.hidden else None
        prompt = reading.with_output(params, layer, i, Prompt(k, v, queries, hidden))
        block, seen = reading.seen_by(layer, prompt, lengths)

        def run(prefix: Any, before: Array, members: Array | None, q: Array, block: Block, seen: Obs | None):
            return layer.begin(prefix, before, members, q, block, seen, slots[i])

        spread = per_device(run, tokens.shape[0], setting.config.kv_heads, setting.mesh)
        return spread(prefix[i], before, members, q, block, seen)

    pos = moved(forward.positions(tokens, lengths), before)
    hidden, layers = forward.apply(params, setting, tokens, jnp.maximum(pos, 0), attend, Decoder.__call__)
    return forward.unembed(params, pick(hidden, lengths[:, None] - 1)[:, 0], setting), layers


BEHIND = Program(_behind, static=("setting", "plan", "slots"))
