"""Shared prefixes of a batch are found and read once, and change no result."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError
from kvjax.reuse.prefix_tree import group_by_prefix
from kvjax.testing import toy_model


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=1)


def partitions(rows: list[int]):
    """Yields all ways to divide sequences into groups."""
    if not rows:
        yield []
        return
    first, rest = rows[0], rows[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            remaining = [row for row in rest if row not in others]
            for more in partitions(remaining):
                yield [(first, *others), *more]


def num_saved_tokens(ids: list[list[int]], group: tuple[int, ...]) -> int:
    """The tokens that need not be read if a group of sequences shares its prefix."""
    length = 0
    while all(len(ids[row]) > length + 1 for row in group) and len({ids[row][length] for row in group}) == 1:
        length += 1
    return (len(group) - 1) * length


def test_an_example_by_hand():
    """Four texts share 3 tokens, two of them 10: pairs save 10 and 3 tokens, while one group of all would save 9."""
    common, long = [1, 2, 3], [4] * 7
    ids = [[*common, 5, 0], [*common, *long, 8, 0], [*common, *long, 9, 0], [*common, 6, 0]]
    assert {group.rows: group.length for group in group_by_prefix(ids)} == {(1, 2): 10, (0, 3): 3}
    ids[1] = [*common, 4, 4, 0, 0]  # the two share 5 now: one group saves 9, pairs save 5 + 3
    assert {frozenset(group.rows): group.length for group in group_by_prefix(ids)} == {frozenset({0, 1, 2, 3}): 3}


@pytest.mark.parametrize("seed", range(8))
def test_no_grouping_saves_more(seed):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 2, rng.integers(1, 8)).tolist() for _ in range(6)]
    groups = group_by_prefix(ids)
    assert sorted(row for group in groups for row in group.rows) == list(range(6))
    for group in groups:
        assert len({tuple(ids[row][: group.length]) for row in group.rows}) == 1
        assert all(group.length < len(ids[row]) for row in group.rows)
    best = max(sum(num_saved_tokens(ids, group) for group in partition) for partition in partitions(list(range(6))))
    assert sum(group.num_saved for group in groups) == best


def test_a_batch_with_shared_prefixes_is_the_batch():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 97, n).tolist() for n in (80, 70))
    prompts = [a + [1, 2], b + [3], [4, 5, 6], a + [7], b + [8, 9], a[:60] + [1]]
    shared = kvjax.reuse.read_batch(make_model(), prompts, "full", headroom=20)
    plain = kvjax.read(make_model(), prompts, "full", headroom=20)
    np.testing.assert_allclose(shared.last_logits, plain.last_logits, atol=2e-5)
    more = [[1], [2, 3], [4], [5], [6, 7, 8], [9]]
    np.testing.assert_allclose(shared.feed(more).last_logits, plain.feed(more).last_logits, atol=2e-5)
    np.testing.assert_array_equal(shared.cache.layers[0].prefix.pos.max((1, 2)) + 1, [60, 70])


def test_nothing_shared_is_read_as_ever():
    context = kvjax.reuse.read_batch(make_model(), [[1, 2], [3, 4]], "int4", headroom=20)
    assert context.method == kvjax.parse("int4")
    with pytest.raises(KvjaxError, match="least must be an integer from 1 to .*, got 0"):
        kvjax.reuse.read_batch(make_model(), [[1]], least=0)
