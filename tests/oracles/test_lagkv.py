"""LagKV against its oracle, on ragged sequences.

LagKV in NumPy, float64, from its paper (arXiv 2504.04704) and kvpress: one key/value head of one sequence.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.types import KVBlock
from kvjax.methods.lagkv import CutPartitions, LagKV, _spread
from tests.contract import layer


def spread_scores(part: np.ndarray, following: np.ndarray) -> np.ndarray:
    """The softmax [c] over tokens of the deviation of their channels, scaled to the ranges of the next partition."""
    low, high = following.min(0), following.max(0)
    deviations = []
    for token in part:
        normalized = [(x - a) / (b - a) if b > a else 0.0 for x, a, b in zip(token, low, high, strict=True)]
        mean = sum(normalized) / len(normalized)
        deviations.append(np.sqrt(sum((x - mean) ** 2 for x in normalized) / (len(normalized) - 1)))
    weights = np.exp(np.array(deviations) - max(deviations))
    return weights / weights.sum()


def scores(k: np.ndarray, v: np.ndarray, lag: int, sinks: int, cross: bool = False) -> np.ndarray:
    """The scores [S] of k, v [S H]; NaN for sinks and for tokens without a whole partition after their own."""
    out = np.full(len(k), np.nan)
    start = sinks
    while start + 2 * lag <= len(k):
        this, following = slice(start, start + lag), slice(start + lag, start + 2 * lag)
        chunk_scores = (spread_scores(k[this], k[following]) + spread_scores(v[this], v[following])) / 2
        rank = [sum(other < one for other in chunk_scores) for one in chunk_scores]
        out[this] = chunk_scores if cross else np.array(rank) / lag
        start += lag
    return out


def select_tokens(scores: np.ndarray, budget: int, sinks: int) -> list[int]:
    """Selects the sinks, then the latest tokens without a score, then the highest scores; ascending."""

    def rank_key(i: int) -> tuple:
        if i < sinks:
            return 2, 0
        return (1, i) if np.isnan(scores[i]) else (0, scores[i], -i)

    return sorted(sorted(range(len(scores)), key=rank_key, reverse=True)[:budget])


def decode(q, k, v, n: int, ratio: float, lag: int, sinks: int) -> np.ndarray:
    """Decodes q [G S H], k, v [S H], a prompt of n tokens -> outputs [G S-n H], as the class in the authors' code.

    Tokens come into a list and attend to all of it; then, when two partitions follow what was compressed, those with a
    full one behind them are cut to int(ratio * lag) tokens.
    """
    G, S, H = q.shape
    out, cached, compressed = np.empty((G, S - n, H)), [], sinks
    for t in range(n - 1, S):
        cached += range(n) if t < n else [t]
        if t >= n:
            logits = q[:, t] @ k[cached].T / np.sqrt(H)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            out[:, t - n] = weights / weights.sum(-1, keepdims=True) @ v[cached]
        while len(cached) >= compressed + 2 * lag:
            this, following = (cached[compressed + i * lag :][:lag] for i in (0, 1))
            score = spread_scores(k[this], k[following]) + spread_scores(v[this], v[following])
            best = sorted(np.argsort(-score, kind="stable")[: int(ratio * lag)])
            cached[compressed : compressed + lag] = [this[i] for i in best]
            compressed += len(best)
    return out


def score_tokens(scorer: LagKV, block: KVBlock) -> np.ndarray:
    """The scores f32[B K S] of a block."""
    return np.asarray(jax.jit(lambda x: scorer.scores(x, None, layer.spec()).per_kv_head)(block))


def test_a_partition_measured_by_the_next_by_hand():
    x = jnp.array([[[0.0, 2.0], [1.0, 1.0]], [[0.0, 0.0], [2.0, 4.0]]])[None, None]
    np.testing.assert_allclose(_spread(x)[0, 0], [[0.5441, 0.4559]], atol=5e-5)


@pytest.mark.parametrize("padding", [0.0, np.inf])
@pytest.mark.parametrize("cross", [False, True])
def test_scores_are_those_of_real_tokens_alone(padding, cross):
    block = layer.prompt(layer.random_batch(2), padding)[1]
    actual = score_tokens(LagKV(2, 1, cross), block)
    for b, n in enumerate(layer.LENGTHS.tolist()):
        for head in range(layer.K):
            k, v = (np.asarray(x[b, head, :n], np.float64) for x in (block.k, block.v))
            expected = scores(k, v, 2, 1, cross)
            has = ~np.isnan(expected)
            np.testing.assert_allclose(actual[b, head, :n][has], expected[has], atol=1e-6)
            above = actual[b, head, 1:n][~has[1:]]  # later tokens outrank earlier ones, and all that have a score
            assert (np.diff(above) > 0).all() and (above >= 1).all() and actual[b, head, 0] > above.max(initial=1)
        assert (actual[b, :, n:] == -np.inf).all()


@pytest.mark.parametrize("budget", [2, 6])
def test_each_head_keeps_its_highest_and_its_latest(budget):
    batch = layer.random_batch(1)
    positions = layer.prefill(layer.bind(f"lagkv:budget={budget},lag=2,sinks=1"), batch).pos
    for b, n in enumerate(batch.lengths.tolist()):
        for head in range(layer.K):
            k, v = (np.asarray(x[b, head, :n], np.float64) for x in (batch.k, batch.v))
            expected = select_tokens(scores(k, v, 2, 1), budget, 1)
            assert sorted(p for p in positions[b, head].tolist() if p >= 0) == expected


def test_where_nothing_varies_the_later_stay():
    same = jnp.full((1, 1, 9, 4), 3.0)
    actual = score_tokens(LagKV(2, 1), KVBlock(same, same, jnp.arange(9)[None, None]))
    np.testing.assert_allclose(actual[0, 0, :7], [2, 0, 0.5, 0, 0.5, 0, 0.5])


def test_a_partition_is_cut_when_the_next_one_is_full_while_decoding_too():
    def oracle(q, k, v, n):
        return np.stack([decode(*head, n, 0.4, 3, 1) for head in zip(q, k, v, strict=True)])

    layer.assert_decodes_as("lagkv:budget=40%,lag=3,sinks=1,while_decoding=true", oracle)


def test_a_prompt_that_ends_with_a_full_partition_is_cut_once():
    batch = dataclasses.replace(layer.random_batch(), lengths=np.array([7, 1, 4]))
    out = layer.decode("lagkv:budget=40%,lag=3,sinks=1,while_decoding=true", batch)
    for head in range(layer.K):
        np.testing.assert_allclose(out[0, head], decode(*batch.exact(0, head), 7, 0.4, 3, 1), atol=5e-6)


@pytest.mark.parametrize(("lag", "sinks", "ratio"), [(3, 1, 0.4), (2, 0, 0.5), (4, 2, 0.0)])
def test_its_slots_are_as_many_as_are_ever_held_and_one_more(lag, sinks, ratio):
    policy, most, compressed, cached = CutPartitions(ratio, lag, sinks), 0, sinks, 0
    for tokens in range(1, 40):
        if cached >= compressed + 2 * lag:
            cached, compressed = cached - policy.num_evicted, compressed + lag - policy.num_evicted
        cached += 1
        most = max(most, cached)
        assert policy.num_slots_of_text(tokens) == most + 1
