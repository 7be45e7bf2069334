"""Prompts of one batch that begin alike: each shared beginning is read once (BatchLLM's global prefix tree).

Zheng et al. 2024, arXiv 2412.03594: common prefixes are found over the whole batch before anything runs, and the tree
of them is flattened into one level, so that the most tokens are saved. A group of n prompts that share p tokens saves
(n - 1) p of them; a prompt lies in one group. Their scheduling of requests has no place here: a batch is one program.
Unverified: no code is public, and the rule is written from the paper's description.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.cache.protocol import KVMethod
from kvjax.generation.context import ROOM, Context, read
from kvjax.generation.inputs import Prompts, token_ids
from kvjax.models.model import Model
from kvjax.utils import arguments


class Group(NamedTuple):
    """Prompts that share their first tokens."""

    length: int  # of the shared prefix
    rows: tuple[int, ...]

    @property
    def saved(self) -> int:
        """Tokens that need not be read again."""
        return (len(self.rows) - 1) * self.length


def read_batch(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod = "full",
    *,
    prefix: str | KVMethod = "full",
    least: int = 16,
    room: int = ROOM,
) -> Context:
    """Prompts, texts or lists of ids, as one batch in which what several of them begin with is read and held once.

    method: for what is a prompt's own; prefix: for what is shared. least: prefixes of fewer tokens are not shared.
    room: tokens per row that may follow. Without a shared prefix it is `kvjax.read`.
    """
    arguments.integer("least", least)
    ids = token_ids(model, prompts)
    shared = [g for g in groups(ids) if g.length >= least and len(g.rows) > 1]
    if not shared:
        return read(model, ids, method, room=room)
    of, before = [-1] * len(ids), [0] * len(ids)
    for number, group in enumerate(shared):
        for row in group.rows:
            of[row], before[row] = number, group.length
    prefixes = read(model, [ids[g.rows[0]][: g.length] for g in shared], prefix, room=0)
    return prefixes.share([row[n:] for row, n in zip(ids, before, strict=True)], method, of=of, room=room)


class Division(NamedTuple):
    """Rows that begin alike, divided as far as they share more tokens than those around them."""

    groups: tuple[Group, ...]
    left: tuple[int, ...]  # rows that lie in none of these yet

    @property
    def saved(self) -> int:
        """Tokens that need not be read again."""
        return sum(group.saved for group in self.groups)


def groups(ids: Sequence[Sequence[int]]) -> list[Group]:
    """Prompts divided into groups by what they begin with, so that the most tokens are saved; each row in one.

    A prefix leaves at least one token of each prompt. From the leaves of the prefix tree upwards, the best division is
    kept for each number of rows that are left for a shorter prefix; rows that meet in a node form one group or none,
    since a further row saves more there than nearer to the root.
    """
    order = sorted(range(len(ids)), key=lambda row: list(ids[row]))
    divisions = _divisions(ids, tuple(order), 0)
    best = max(divisions.values(), key=lambda division: division.saved)
    return sorted([*best.groups, *(Group(0, (row,)) for row in best.left)], key=lambda group: group.rows)


def _divisions(ids: Sequence[Sequence[int]], rows: tuple[int, ...], known: int) -> dict[int, Division]:
    """Of sorted rows that share `known` tokens: the best division that leaves so many rows, by that number."""
    if len(rows) == 1:
        return {1: Division((), rows)}
    length = _shared(ids, rows, known)
    over = [row for row in rows if len(ids[row]) <= length + 1]  # they share no more with anyone
    longer = [row for row in rows if len(ids[row]) > length + 1]
    parts = [(row,) for row in over]
    parts += [tuple(part) for _, part in itertools.groupby(longer, key=lambda row: ids[row][length])]
    found = {0: Division((), ())}
    for part in parts:
        found = _together(found, _divisions(ids, part, length))
    grouped = [
        Division((*d.groups, Group(length, tuple(sorted(d.left)))), ()) for d in found.values() if len(d.left) > 1
    ]
    whole = max([*grouped, *filter(None, [found.get(0)])], key=lambda d: d.saved)
    return {**found, 0: whole}


def _shared(ids: Sequence[Sequence[int]], rows: tuple[int, ...], known: int) -> int:
    """How many first tokens sorted rows share, at least one of each left out."""
    first, last = ids[rows[0]], ids[rows[-1]]
    most = min(len(ids[row]) for row in rows) - 1
    return next((n for n in range(known, most) if first[n] != last[n]), max(most, known))


def _together(a: dict[int, Division], b: dict[int, Division]) -> dict[int, Division]:
    """The best divisions of two sets of rows as one."""
    found: dict[int, Division] = {}
    for x, y in itertools.product(a.values(), b.values()):
        both = Division(x.groups + y.groups, x.left + y.left)
        if len(both.left) not in found or both.saved > found[len(both.left)].saved:
            found[len(both.left)] = both
    return found
