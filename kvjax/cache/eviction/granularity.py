"""Granularity: whether single tokens, chunks or pages of a prompt are kept or evicted as a whole.

A prompt divides, in order, into its sinks; whole units of `size` consecutive tokens; a remainder shorter than a unit;
and its recent tokens. Sinks and recent tokens always stay. The remainder is not scored: like the page that a paged
cache is writing, it stays with the recent tokens and is paid for by the budget (by its newest tokens, where the budget
is shorter). Of the units, as many stay as fit whole into the rest of the budget. A prompt therefore keeps

    sinks + recent + remainder + size * floor((budget - sinks - recent - remainder) / size)

tokens of every head, and all of its tokens if there are no more than `budget`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.core.types import Array
from kvjax.errors import KvjaxError
from kvjax.utils.parameter_types import PositiveInt, check_fields


@dataclasses.dataclass(frozen=True)
class Token:
    """Every token for itself."""

    size: ClassVar[int] = 1
    score: ClassVar[str] = "sum"
    is_aligned: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Runs of `size` tokens, counted from the first token after the sinks.

    Args:
      size: consecutive tokens of a unit.
      score: a unit's score from its tokens' scores: "sum", "mean" or "max".
    """

    size: PositiveInt
    score: Literal["sum", "mean", "max"] = "sum"
    is_aligned: ClassVar[bool] = False  # whether units are counted from the very first token, and not after the sinks

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class Page(Chunk):
    """Chunks that coincide with the pages of a paged cache, so the sinks must fill whole pages."""

    is_aligned: ClassVar[bool] = True


Granularity = Token | Chunk


def parse_granularity(text: str) -> Granularity:
    """Parses "token", "chunk8" or "page32" and the like; raises KvjaxError for anything else."""
    kind = text.rstrip("0123456789")
    size = text[len(kind) :]
    if text == "token":
        return Token()
    if kind in ("chunk", "page") and size and int(size):
        return (Chunk if kind == "chunk" else Page)(int(size))
    raise KvjaxError(f"unit must be 'token', 'chunk' or 'page' with a size, as in 'chunk8' or 'page32', got {text!r}")


class PromptSplit(NamedTuple):
    """The parts of each prompt of a batch; every field is i32[B]."""

    num_sinks: Array
    num_recent: Array  # recent tokens, and as much of the remainder as stays
    num_units: Array  # whole units between sinks and recent tokens, each kept or evicted
    num_kept_units: Array
    length: Array  # tokens of the prompt

    @property
    def num_always(self) -> Array:
        """Tokens of each head that stay whatever they score."""
        return self.num_sinks + self.num_recent


def split_prompt(
    pos: Array, num_kept: Array, num_slots: int, sinks: int, recent: int, granularity: Granularity
) -> PromptSplit:
    """Divides each prompt into what always stays and the units that compete for the rest of the budget.

    Args:
      pos: i32[B 1|K S], sequences left-aligned, -1 in empty slots.
      num_kept: i32[B], tokens that each sequence keeps. Below `sinks + recent`, sinks come first, then the newest.
      num_slots: static bound of `num_kept`.
      sinks: first tokens that always stay.
      recent: last tokens that always stay.
      granularity: the size of a unit.
    """
    size = granularity.size
    length = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
    num_kept = jnp.clip(jnp.asarray(num_kept, jnp.int32), 0, jnp.minimum(length, num_slots))
    # A budget that layers or heads divide may leave fewer tokens than sinks and recents: sinks come first then.
    num_sinks = jnp.minimum(sinks, num_kept)
    num_recent = jnp.minimum(recent, num_kept - num_sinks)
    budget_left, num_between = num_kept - num_sinks - num_recent, length - num_sinks - num_recent
    num_recent = num_recent + jnp.minimum(num_between % size, budget_left)
    num_kept_units = (num_kept - num_sinks - num_recent) // size
    return PromptSplit(num_sinks, num_recent, num_between // size, num_kept_units, length)


def group_into_units(x: Array, sinks: int, size: int, axis: int = -1) -> Array:
    """Cuts the slots after the sinks into units: axis S becomes U, size.

    Slots after the last whole unit are dropped. An axis shorter than one unit is padded with zeros to one, so that U is
    never 0.
    """
    axis %= x.ndim
    U = max((x.shape[axis] - sinks) // size, 1)
    padding = max(sinks + U * size - x.shape[axis], 0)
    x = jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)])
    x = jax.lax.slice_in_dim(x, sinks, sinks + U * size, axis=axis)
    return x.reshape(*x.shape[:axis], U, size, *x.shape[axis + 1 :])


def score_units(scores: Array, sinks: int, granularity: Granularity) -> Array:
    """Scores of tokens f32[B K S] -> of units f32[B K U]; entries beyond a sequence's whole units are arbitrary."""
    grouped = group_into_units(scores, sinks, granularity.size)
    return {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}[granularity.score](grouped, -1)


def evictable_mask(split: PromptSplit, num_units: int) -> Array:
    """bool[B U]: which of `num_units` padded units each sequence really has."""
    return jnp.arange(num_units)[None] < split.num_units[:, None]


def units_to_slots(
    kept_units: Array, split: PromptSplit, num_tokens: int, num_slots: int, sinks: int, size: int
) -> Array:
    """Lists the slots of kept units bool[B K U], sinks and recent tokens: i32[B K num_slots], ascending, -1 unused."""
    padding = [(0, 0), (0, 0), (sinks, num_tokens)]
    tokens = jnp.pad(jnp.repeat(kept_units, size, -1), padding)[..., :num_tokens]
    slot = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    length = split.length[:, None]
    is_sink, is_recent = slot < split.num_sinks[:, None], (slot >= length - split.num_recent[:, None]) & (slot < length)
    # Sorting puts kept slots first in their order, at a static size: how many there are is only known when it runs.
    slots = jnp.sort(jnp.where(tokens | (is_sink | is_recent)[:, None], slot[None], num_tokens), -1)[..., :num_slots]
    # A budget may hold more tokens than the padded prompt has.
    slots = jnp.pad(slots, [(0, 0), (0, 0), (0, num_slots - slots.shape[-1])], constant_values=num_tokens)
    return jnp.where(slots < num_tokens, slots, -1)
