"""KVMerger against its oracle: the merging sets of neighbors, their pivots and weights.

KVMerger in NumPy, float64, from its paper (arXiv 2407.08454): one sequence, one key/value head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods.kvmerger import GaussianMerge, MergeSets
from tests.contract import layer
from tests.oracles import eviction
from tests.oracles.slots import head_slots
from tests.oracles.test_merge import make_prompt, ragged_prompts, run_rule


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two keys; 0 for a key of zeros."""
    return a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12)


def merge_sets(k: np.ndarray, received: np.ndarray, budget: int, heavy: int, recent: int) -> list[list[int]]:
    """Groups consecutive tokens that become one each, joined pair by pair: keys [T H], attention received [T]."""
    T = len(k)
    old = range(max(T - recent, 0))
    unmerged = {*sorted(old, key=lambda t: -received[t])[:heavy], *range(len(old), T)}
    groups = [[t] for t in range(T)]
    while len(groups) > budget:
        free = [i for i in range(1, len(groups)) if groups[i][0] not in unmerged and groups[i - 1][-1] not in unmerged]
        i = max(free, key=lambda i: cosine(k[groups[i - 1][-1]], k[groups[i][0]]))
        groups[i - 1 : i + 1] = [groups[i - 1] + groups[i]]
    return groups


def find_pivots(sets: list[list[int]], received: np.ndarray) -> list[int]:
    """The most attended token of each set."""
    return [max(members, key=lambda t: received[t]) for members in sets]


def merge_tokens(k, v, sets, pivots, sigma: float = 0.0) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Merges each pivot with the evicted tokens of its set -> (keys, values, tokens that each represents)."""
    keys, values, counts = [], [], []
    for pivot in pivots:
        members = [t for group in sets if pivot in group for t in group if t == pivot or t not in pivots]
        distances = np.array([np.sum((k[pivot] - k[t]) ** 2) for t in members])
        width = sigma**2 or distances.mean()
        weights = np.exp(-distances / (2 * width)) if width else np.ones(len(members))
        keys.append(weights @ k[members] / weights.sum())
        values.append(weights @ v[members] / weights.sum())
        counts.append(len(members))
    return np.array(keys), np.array(values), counts


SMALL = "kvmerger:budget=6,heavy=1,recent=2,count=true"
ONE_SET = MergeSets(1, 0, 0)


def test_each_head_joins_its_most_similar_neighbours():
    batch = layer.random_batch()
    state = layer.prefill(layer.bind(SMALL), batch)
    num_merged = 0
    for b, n in enumerate(batch.lengths.tolist()):
        q, k, v = (np.asarray(x[b, ..., :n, :], np.float64) for x in (batch.q, batch.k, batch.v))
        received = eviction.accumulated_scores(eviction.attention_weights(q, k))[1]
        for head in range(layer.K):
            sets = merge_sets(k[head], received[head], 6, 1, 2)
            pivots = find_pivots(sets, received[head])
            num_merged += len(sets) < n
            positions, *actual = head_slots(state, b, head)
            assert positions == pivots
            keys, values, counts = merge_tokens(k[head], v[head], sets, pivots)
            for x, expected in zip(actual, (keys, values), strict=True):
                np.testing.assert_allclose(x, expected, atol=2e-6)
            np.testing.assert_allclose(state.bias[b, head, : len(pivots)], np.log(counts), atol=1e-6)
    assert num_merged == layer.K  # the sequence of nine tokens


@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_another_selection_may_have_lost_pivots_or_keep_two_of_a_set(sigma):
    """Evicted tokens of a set without a kept token are lost; those of a set with two go into the first."""
    sets = MergeSets(4, 0, 1)
    block, choice = ragged_prompts(3)
    actual = run_rule(GaussianMerge(sets, sigma, count=True), block, choice)
    k, v = (np.asarray(x[0, 0], np.float64) for x in (block.k, block.v))
    groups = merge_sets(k, np.asarray(choice.scores.per_kv_head[0, 0]), 4, 0, 1)
    slots = np.asarray(choice.slots[0, 0]).tolist()
    first = [min(set(slots) & set(one)) for one in groups if set(slots) & set(one)]
    assert len(first) < len(groups) or len(first) < len(slots)
    keys, values, counts = merge_tokens(k, v, [sorted({*one} - ({*slots} - {*first})) for one in groups], first, sigma)
    at = [slots.index(t) for t in first]
    np.testing.assert_allclose(actual.k[0, 0, at], keys, atol=2e-6)
    np.testing.assert_allclose(actual.v[0, 0, at], values, atol=2e-6)
    np.testing.assert_allclose(actual.bias[0, 0, at], np.log(counts), atol=1e-6)
    jax.tree.map(
        np.testing.assert_array_equal,
        run_rule(GaussianMerge(sets, sigma, count=True), *ragged_prompts(3, padding=np.inf)),
        actual,
    )


def test_by_hand_two_neighbours_at_distance_one():
    """The mean square distance is 1/2, so the Gaussian is exp(-1)."""
    block, choice = make_prompt([[1, 0], [1, 1]], [[1], [5]], [0])
    actual = run_rule(GaussianMerge(ONE_SET), block, choice)
    np.testing.assert_allclose(actual.k[0, 0], [[1, 0.2689]], atol=5e-5)
    np.testing.assert_allclose(actual.v[0, 0], [[2.0758]], atol=5e-5)


@pytest.mark.parametrize("key", [[1, 2], [0, 0]], ids=["equal keys", "keys of zeros"])
def test_equal_tokens_that_are_counted_become_one_that_stands_for_all(key):
    block, choice = make_prompt([key] * 3, [[2], [4], [6]], [1])
    actual = run_rule(GaussianMerge(ONE_SET, count=True), block, choice)
    np.testing.assert_array_equal(actual.k[0, 0, 0], key)
    np.testing.assert_allclose(actual.v[0, 0], [[4]], atol=1e-6)
    np.testing.assert_allclose(actual.bias[0, 0], [np.log(3)], atol=1e-6)


def test_nothing_is_joined_across_a_heavy_hitter_or_with_a_recent_token():
    """Among equal keys the earliest neighbors are joined first; token 3 is heavy, 6 and 7 are recent."""
    block, _ = make_prompt([[1, 1]] * 8, [[1]] * 8, [0])
    received = jnp.asarray([[[1, 3, 2, 9, 5, 5, 8, 8]]], jnp.float32)
    rules = (MergeSets(5, 1, 2), MergeSets(6, 1, 2))
    sets = jax.jit(lambda *args: [(rule.assign(*args), rule.pivots(*args)) for rule in rules])(block, received)
    (five, of_five), (six, of_six) = sets
    assert five[0, 0].tolist() == [0, 0, 0, 1, 2, 2, 3, 4]
    assert six[0, 0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert np.flatnonzero(of_five[0, 0]).tolist() == [1, 3, 4, 6, 7]
    assert np.flatnonzero(of_six[0, 0]).tolist() == [1, 3, 4, 5, 6, 7]
