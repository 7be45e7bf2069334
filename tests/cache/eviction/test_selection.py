"""Selection: exact counts, ties, order, protected tokens, and errors."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.cache.components import PromptSelection, Scorer, Scores, Selection
from kvjax.cache.eviction.budgets import Uniform
from kvjax.cache.eviction.granularity import Chunk, Page, Token
from kvjax.cache.eviction.selection import select_slots
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from tests.contract import layer
from tests.oracles import eviction as oracle

LENGTHS = (21, 5, 14)


class ValueScorer(Scorer):
    """A scorer that reads the scores from the values."""

    def scores(self, block, observation, spec):
        return Scores(block.v[:, :, None, :, 0], block.v[..., 0])


def select(scores, pos, keep, slots, sinks, recent, unit, scope="head"):
    block = KVBlock(scores[..., None], scores[..., None], pos)
    selection = PromptSelection(layer.spec(), Selection(ValueScorer(), Uniform(slots), sinks, recent, unit, scope))
    return select_slots(selection, block, None, keep, slots).slots


jitted_select = jax.jit(select, static_argnums=(3, 4, 5, 6, 7))


def random_scores(fill: float = -np.inf, levels: int = 4):
    """Scores f32[B K S] with many ties, and pos i32[B 1 S]; empty slots hold `fill`."""
    rng = np.random.default_rng(0)
    is_token = np.arange(21)[None] < np.array(LENGTHS)[:, None]
    scores = np.where(is_token[:, None], rng.integers(0, levels, (3, 2, 21)), fill).astype(np.float32)
    return scores, np.where(is_token, np.arange(21)[None], -1).astype(np.int32)[:, None]


def expected_slots(keep, sinks, recent, unit, per="head"):
    scores = random_scores()[0].astype(np.float64)
    kept_tokens = [
        oracle.select_tokens(scores[b, :, :n], m, sinks, recent, unit.size, unit.score, per)
        for b, (n, m) in enumerate(zip(LENGTHS, keep, strict=True))
    ]
    return [[kept + [-1] * (12 - len(kept)) for kept in sequence] for sequence in kept_tokens]


@pytest.mark.parametrize(
    ("keep", "sinks", "recent", "unit"),
    [
        ((12, 7, 9), 2, 3, Token()),
        ((5, 5, 5), 2, 3, Token()),
        ((1, 0, 2), 0, 0, Token()),
        ((11, 12, 8), 2, 3, Chunk(4)),
        ((12, 12, 12), 0, 1, Chunk(5, "max")),
        ((10, 6, 12), 3, 2, Page(3, "mean")),
        ((9, 9, 9), 4, 4, Chunk(20)),
    ],
)
def test_the_best_stay_with_ties_to_the_earlier(keep, sinks, recent, unit):
    scores, pos = random_scores()
    slots = jitted_select(scores, pos, np.array(keep, np.int32), 12, sinks, recent, unit)
    assert np.asarray(slots).tolist() == expected_slots(keep, sinks, recent, unit)
    for fill in (1e4, np.inf, np.nan):  # scores of padding
        filled, _ = random_scores(fill)
        others = jitted_select(filled, pos, np.array(keep, np.int32), 12, sinks, recent, unit)
        np.testing.assert_array_equal(slots, others)


def test_one_set_for_the_layer():
    scores, pos = random_scores()
    slots = jitted_select(scores, pos, np.array([9, 9, 9], np.int32), 12, 2, 3, Token(), "layer")
    expected = expected_slots((9, 9, 9), 2, 3, Token(), "layer")
    assert slots.shape == (3, 1, 12) and np.asarray(slots)[:, 0].tolist() == [heads[0] for heads in expected]


def test_a_rows_count_is_known_before_its_scores():
    for keep in range(5, 13):
        slots = jitted_select(*random_scores(), np.full(3, keep, np.int32), 12, 2, 3, Chunk(4))
        counts = (np.asarray(slots) >= 0).sum(-1)
        for b, n in enumerate(LENGTHS):
            first_chunk_tokens = (n - 5) % 4
            num_selected = 5 + min(first_chunk_tokens, keep - 5) + max(0, keep - 5 - first_chunk_tokens) // 4 * 4
            assert (counts[b] == (n if n <= keep else num_selected)).all()


def test_all_tokens_of_a_short_prompt_stay_when_there_are_more_slots_than_tokens():
    scores, pos = random_scores()
    slots = jitted_select(scores, pos, np.array([30, 30, 30], np.int32), 30, 9, 9, Chunk(4))
    for b, n in enumerate(LENGTHS):
        assert np.asarray(slots)[b].tolist() == [list(range(n)) + [-1] * (30 - n)] * 2


@pytest.mark.parametrize(
    ("keep", "slots", "sinks", "recent", "unit", "says"),
    [
        ((9, 9, 9), 9, -1, 2, Token(), "sinks must be 0 or more, got -1"),
        ((9, 9, 9), 9, 3, 2, Page(2), "3 sinks do not fill whole pages of 2 tokens; use 4"),
    ],
)
def test_parts_that_always_stay_have_a_size_that_can_be(keep, slots, sinks, recent, unit, says):
    scores, pos = random_scores()
    with pytest.raises(KvjaxError, match=says):
        select(scores, pos, np.array(keep, np.int32), slots, sinks, recent, unit)


def test_a_traced_budget_below_what_is_protected_keeps_the_sinks_then_the_newest():
    slots = jitted_select(*random_scores(), np.array([5, 5, 2], np.int32), 12, 3, 4, Token())
    assert np.asarray(slots)[0, 0, :6].tolist() == [0, 1, 2, 19, 20, -1]
    assert np.asarray(slots)[2, 1, :3].tolist() == [0, 1, -1]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Chunk(0), "Chunk: size must be at least 1, got 0"),
        (lambda: Page(-2), "Page: size must be at least 1, got -2"),
        (lambda: Chunk(2, "min"), "score must be one of 'sum', 'mean', 'max', got 'min'"),
        (
            lambda: select(*random_scores(), np.full(3, 9, np.int32), 9, 2, 2, Token(), "row"),
            "scope must be one of 'head', 'layer'",
        ),
    ],
)
def test_wrong_settings_are_named(make, says):
    with pytest.raises(KvjaxError, match=says):
        make()
