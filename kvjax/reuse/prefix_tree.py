"""Prompts of one batch with shared prefixes: each prefix is read and stored once (BatchLLM's global prefix tree).

Zheng et al. 2024, arXiv 2412.03594: common prefixes are found over the whole batch before anything runs, and the tree
of them is flattened into one level, so that the most tokens are saved. A group of n prompts that share p tokens saves
(n - 1) p of them; a prompt is in one group. Their scheduling of requests does not apply: a batch is one program here.
Unverified: no code is public, and the rule is written from the paper's description.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.cache.protocol import KVMethod
from kvjax.generation.context import DEFAULT_HEADROOM_TOKENS, Context, read
from kvjax.generation.inputs import Prompts, token_ids
from kvjax.generation.model_calls import model_for
from kvjax.models.model import Model
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords


class Group(NamedTuple):
    """Prompts that share their first tokens."""

    length: int  # tokens of the shared prefix
    rows: tuple[int, ...]  # the prompts' indices in the batch

    @property
    def num_saved(self) -> int:
        """Tokens that are not run again."""
        return (len(self.rows) - 1) * self.length


@checks_keywords
def read_batch(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod = "full",
    *,
    prefix: str | KVMethod = "full",
    least: int = 16,
    headroom: int | None = None,
) -> Context:
    """Reads prompts as one batch, in which prefixes that several of them share are read and stored once.

    Args:
      model: from `kvjax.load`.
      prompts: texts, or lists of ids.
      method: of each prompt's own tokens.
      prefix: method of the shared prefixes.
      least: the fewest tokens of a prefix that is shared.
      headroom: tokens per sequence that may follow; 512 by default.

    Returns:
      The context; without a shared prefix, that of `kvjax.read`.
    """
    arguments.integer("least", least)
    ids = token_ids(model, prompts, begins=True)
    groups = [g for g in group_by_prefix(ids) if g.length >= least and len(g.rows) > 1]
    if not groups:
        return read(model, ids, method, headroom=headroom)
    of, before = [-1] * len(ids), [0] * len(ids)
    for index, group in enumerate(groups):
        for row in group.rows:
            of[row], before[row] = index, group.length
    longest = max(map(len, ids))
    chosen = model_for(
        model, ids, longest if headroom is None else longest + arguments.integer("headroom", headroom, 0)
    )
    prefixes = read(chosen, [ids[g.rows[0]][: g.length] for g in groups], prefix, headroom=0)
    own_ids = [row[n:] for row, n in zip(ids, before, strict=True)]
    context = prefixes.extend_prefix(
        own_ids, method, of=of, headroom=DEFAULT_HEADROOM_TOKENS if headroom is None else headroom
    )
    return dataclasses.replace(context, model=model)


class Grouping(NamedTuple):
    """Prompts with a common prefix, some of them divided into groups that share more tokens."""

    groups: tuple[Group, ...]
    ungrouped: tuple[int, ...]  # indices of the prompts that are in no group yet

    @property
    def num_saved(self) -> int:
        """Tokens that are not run again."""
        return sum(group.num_saved for group in self.groups)


def group_by_prefix(ids: Sequence[Sequence[int]]) -> list[Group]:
    """Divides prompts into groups by their prefixes, so that the most tokens are saved; each prompt is in one group.

    A prefix leaves at least one token of each prompt. From the leaves of the prefix tree upwards, the best grouping is
    kept for each number of prompts that are left for a shorter prefix. Prompts that meet in a node form one group or
    none, since a further prompt saves more there than nearer to the root.
    """
    order = sorted(range(len(ids)), key=lambda row: list(ids[row]))
    best = max(_best_groupings(ids, tuple(order), 0).values(), key=lambda grouping: grouping.num_saved)
    return sorted([*best.groups, *(Group(0, (row,)) for row in best.ungrouped)], key=lambda group: group.rows)


def _best_groupings(ids: Sequence[Sequence[int]], rows: tuple[int, ...], num_shared: int) -> dict[int, Grouping]:
    """Finds the best grouping of sorted prompts that share `num_shared` tokens, by the number of ungrouped ones."""
    if len(rows) == 1:
        return {1: Grouping((), rows)}
    # The first and the last of sorted prompts share the fewest tokens.
    first, last = ids[rows[0]], ids[rows[-1]]
    limit = min(len(ids[row]) for row in rows) - 1
    length = next((n for n in range(num_shared, limit) if first[n] != last[n]), max(limit, num_shared))
    ending = [row for row in rows if len(ids[row]) <= length + 1]  # they share no more with any other
    longer = [row for row in rows if len(ids[row]) > length + 1]
    subtrees = [(row,) for row in ending]
    subtrees += [tuple(subtree) for _, subtree in itertools.groupby(longer, key=lambda row: ids[row][length])]
    best = {0: Grouping((), ())}
    for subtree in subtrees:
        merged: dict[int, Grouping] = {}
        for x, y in itertools.product(best.values(), _best_groupings(ids, subtree, length).values()):
            both = Grouping(x.groups + y.groups, x.ungrouped + y.ungrouped)
            num_ungrouped = len(both.ungrouped)
            if num_ungrouped not in merged or both.num_saved > merged[num_ungrouped].num_saved:
                merged[num_ungrouped] = both
        best = merged
    closed = [
        Grouping((*g.groups, Group(length, tuple(sorted(g.ungrouped)))), ())
        for g in best.values()
        if len(g.ungrouped) > 1
    ]
    if 0 in best:
        closed.append(best[0])
    return {**best, 0: max(closed, key=lambda g: g.num_saved)}
