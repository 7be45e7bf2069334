"""Prefill-time eviction as one function: a prompt's block becomes a smaller one."""

from __future__ import annotations

import jax.numpy as jnp

from kvjax.cache.select.scorers import Scorer
from kvjax.cache.select.units import (
    Split,
    Unit,
    by_unit,
    check,
    evictable,
    gather,
    indices,
    per_head,
    split,
    top,
    unit_scores,
)
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block
from kvjax.methods.kvcrush import Rest, Units, part_of


def evict(
    block: Block,
    obs: Obs | None,
    keep: Array,
    slots: int,
    scorer: Scorer,
    sinks: int,
    recent: int,
    unit: Unit,
    per: str = "head",
    rest: Rest | None = None,
    window: int | None = None,
) -> Block:
    """The `keep` i32[B] tokens of each row that matter most, as a block of `slots` slots, chronological.

    block: a prompt, rows left-aligned. How many tokens stay, and what units are: kvjax/kv/selection.py. pos becomes
    i32[B K slots], with K = 1 for per = "layer" (all heads keep the same tokens).
    With `rest`, a share of the units that the budget has room for, rounded down, goes to representatives: one set for
    the whole layer (KVCrush's bits mix the heads), chosen from the units that no key/value head keeps as important.
    Where `rest` finds fewer, each head's next best units take the places: a row keeps as many tokens as without it.
    """
    S = block.k.shape[2]
    check(block.pos, keep, slots, sinks, recent, unit)
    heads, scores = scorer.score_both(block, obs, window)
    part = split(block.pos, keep, slots, sinks, recent, unit.size)
    s = unit_scores(per_head(scores, per), sinks, unit)
    taken = jnp.zeros((s.shape[0], s.shape[2]), bool)
    places = 0 if rest is None else part_of(rest.share, max(slots - sinks - recent, 0) // unit.size)
    if places:
        taken = _representatives(block, heads, s, part, sinks, unit, rest, places)
    allowed = evictable(part, s.shape[2]) & ~taken
    chosen = top(s, allowed[:, None], part.quota - taken.sum(-1, dtype=jnp.int32)) | taken[:, None]
    return gather(block, indices(chosen, part, S, slots, sinks, unit.size))


def _representatives(
    block: Block, heads: Array, s: Array, part: Split, sinks: int, unit: Unit, rest: Rest, places: int
) -> Array:
    """bool[B U]: the units of each row that stand for others."""
    B, _, U = s.shape
    valid = evictable(part, U)
    count = part_of(rest.share, part.quota)
    important = top(s, valid[:, None], part.quota - count).any(1)
    units = Units(by_unit(heads, sinks, unit.size), by_unit(block.k, sinks, unit.size, 2), valid, valid & ~important)
    found = rest.representatives(units, count, places)
    at = jnp.where(found < 0, U, found)
    return jnp.zeros((B, U), bool).at[jnp.arange(B)[:, None], at].set(True, mode="drop")
