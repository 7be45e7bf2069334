"""AdaKV against its oracle: budgets of heads, kept tokens, attention to them, and bytes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax.methods.adakv import AdaKV
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles import adakv as oracle
from tests.oracles import eviction

SNAPKV = "snapkv:budget=6,window=2,kernel=3"


def allocate(rule: AdaKV, scores, lengths, quota, num_always) -> np.ndarray:
    """The budgets for scores [B K U] of sequences with these numbers of units."""
    allowed = np.arange(np.shape(scores)[2])[None] < np.array(lengths)[:, None]
    args = (np.asarray(scores, np.float32), allowed, np.array(quota, np.int32), np.array(num_always, np.int32))
    return np.asarray(jax.jit(rule.allocate_local)(*args))


def test_the_example_by_hand():
    heads = [[9, 8, 7, 1], [3, 2, 1, 0]]
    assert oracle.num_won(heads, 2) == [3, 1]
    for rule in (AdaKV(), AdaKV(normalise=True), AdaKV(rule="kvpress"), AdaKV(alpha=0)):
        assert allocate(rule, [heads], [4], [2], [0]).tolist() == [[3, 1]]
    assert allocate(AdaKV(alpha=1), [heads], [4], [2], [0]).tolist() == [[2, 2]]


@pytest.mark.parametrize("levels", [3, 10**6])
@pytest.mark.parametrize("rule", ["adakv", "kvpress"])
def test_budgets_are_the_oracles_in_ragged_batches_with_many_ties(rule, levels):
    rng = np.random.default_rng(levels)
    lengths, quota, num_always = [20, 1, 13, 20, 7], [6, 1, 0, 20, 3], [2, 0, 5, 1, 0]
    scores = rng.integers(0, levels, (5, 3, 20)) * rng.integers(1, 4, (5, 3, 1))
    for fill in (0, np.inf, np.nan):
        padded = np.where(np.arange(20) < np.array(lengths)[:, None, None], scores, fill)
        actual = allocate(AdaKV(rule=rule), padded, lengths, quota, num_always).tolist()
        for b, n in enumerate(lengths):
            head_scores = scores[b, :, :n].tolist()
            extra = () if rule == "adakv" else (num_always[b],)
            assert actual[b] == getattr(oracle, "budgets" if rule == "adakv" else "kvpress_budgets")(
                head_scores, quota[b], *extra
            )
            assert sum(actual[b]) == 3 * quota[b] and max(actual[b]) <= n


def test_equal_heads_get_equal_budgets():
    scores = np.random.default_rng(0).integers(0, 3, (4, 1, 11)).repeat(4, 1)
    for rule in (AdaKV(), AdaKV(alpha=0.37), AdaKV(rule="kvpress"), AdaKV(normalise=True)):
        assert allocate(rule, scores, [11] * 4, [0, 3, 5, 11], [0] * 4).tolist() == [[n] * 4 for n in (0, 3, 5, 11)]


def test_normalised_heads_count_by_what_their_best_hold():
    flat, steep = [4, 4, 4, 4], [5, 3, 0, 0]  # their best two hold 1/2 and all: 2, 2, 2, 2 and 5, 3, 0, 0
    assert allocate(AdaKV(alpha=0), [[flat, steep]], [4], [2], [0]).tolist() == [[3, 1]]
    assert allocate(AdaKV(alpha=0, normalise=True), [[flat, steep]], [4], [2], [0]).tolist() == [[2, 2]]


def oracle_tokens(batch: layer.SequenceBatch, b: int, n: int, window: int | None) -> list[list[int]]:
    """The tokens that each head of sequence b keeps under SNAPKV + adakv."""
    q, k = (np.asarray(x[b, ..., :n, :]) for x in (batch.q, batch.k))
    scores = eviction.snapkv_scores(eviction.attention_weights(q, k, window), 2, 3, "max")[1]
    always, units, quota = eviction.split_units(n, 6, 0, 2, 1)
    worth = [eviction.unit_scores(head_scores, units) for head_scores in scores]
    counts = oracle.budgets(worth, quota) if quota else [0] * layer.K
    return [sorted(always + eviction.top_indices(values, c)) for values, c in zip(worth, counts, strict=True)]


@pytest.mark.parametrize("window", [None, 5])
def test_unequal_heads_keep_and_attend_as_under_a_mask(window):
    batch = layer.random_batch(5)
    bound = layer.bind(SNAPKV + " + adakv:page=4", window)
    state = layer.prefill(bound, batch)
    positions, out, unequal = np.asarray(bound.positions(state)), layer.decode(bound.method, batch, window, state), 0
    for b, n in enumerate(batch.lengths.tolist()):
        expected = oracle_tokens(batch, b, n, window)
        unequal += len({len(tokens) for tokens in expected}) > 1
        for head, tokens in enumerate(expected):
            assert sorted(p for p in positions[b, head].tolist() if p >= 0) == tokens
            q, k, v = (np.asarray(x[b, head]) for x in (batch.q, batch.k, batch.v))
            for t in range(layer.STEPS):
                dense = oracle.attend(q[:, n + t], k, v, tokens, n + t, n, window)
                np.testing.assert_allclose(out[b, head, :, t], dense, atol=5e-6)
    assert unequal


def test_each_layer_keeps_its_budget_to_the_token_whole_and_in_chunks():
    model, prompts = toy_model(), [list(range(50)), [5], list(range(30, 70))]
    text = "snapkv:budget=12,window=4,kernel=3 + adakv:page=4"
    full = kvjax.read(model, prompts, text)
    chunked = kvjax.read(model, prompts, text, chunk=8)
    unequal = 0
    for layer_heads, chunked_layer in zip(full.kept_positions(), chunked.kept_positions(), strict=True):
        for heads, chunked_heads, prompt in zip(layer_heads, chunked_layer, prompts, strict=True):
            n = len(prompt)
            assert [head.tolist() for head in heads] == [head.tolist() for head in chunked_heads]
            assert sum(map(len, heads)) == 2 * min(n, 12)
            assert all(set(range(max(n - 4, 0), n)) <= set(head.tolist()) for head in heads)
            unequal += len(heads[0]) != len(heads[1])
    assert unequal
    tokens = full.generate(max_new_tokens=5).tokens
    assert tokens == chunked.generate(max_new_tokens=5).tokens
    assert tokens[0] == kvjax.generate(model, prompts[:1], text, max_new_tokens=5).tokens[0]
