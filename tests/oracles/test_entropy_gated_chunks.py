"""Entropy-gated chunks and chunk budgets in NumPy: kvpress' greedy passes over the chunks of one sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.types import KVBlock
from kvjax.methods.chunk_budgets import ChunkRanks
from kvjax.methods.entropy_gated_chunks import EntropyGate
from tests.contract import layer
from tests.oracles import eviction

LENGTHS, S = (30, 1, 23, 7), 30


def gate(scores: np.ndarray, chunk: int, kept: int, budget: int) -> list[int]:
    """The tokens that stay, by scores [T] that are averaged over heads."""
    T = len(scores)
    chunks = [np.arange(start, min(start + chunk, T)) for start in range(0, T, chunk)]
    means, entropies = [], []
    for tokens in chunks:
        shifted = scores[tokens] - min(scores[tokens].min(), 0)
        p = shifted / (shifted.sum() + 1e-8)
        means.append(scores[tokens].mean())
        entropy = -(p * np.log(p + 1e-8)).sum() / np.log(len(tokens)) if len(tokens) > 1 else 0.0
        entropies.append(np.clip(entropy, 0, 1))
    middle = (len(chunks) - 1) // 2
    score_median, entropy_median = np.sort(means)[middle], np.sort(entropies)[middle]
    stays: list[int] = []
    for i in np.argsort(-np.array(means), kind="stable"):
        is_gated = means[i] >= score_median and entropies[i] < entropy_median
        best = chunks[i][np.argsort(-scores[chunks[i]], kind="stable")]
        stays += best[: kept if is_gated else chunk][: max(budget - len(stays), 0)].tolist()
    others = [s for s in np.argsort(-scores, kind="stable").tolist() if s not in stays]
    return sorted(stays + others[: budget - len(stays)])


def keep_of_chunks(scores: np.ndarray, chunk: int, fraction: float) -> list[int]:
    """Each chunk's best tokens, as many as its fraction, rounded down."""
    stays = []
    for start in range(0, len(scores), chunk):
        tokens = np.arange(start, min(start + chunk, len(scores)))
        best = tokens[np.argsort(-scores[tokens], kind="stable")]
        stays += best[: int(len(tokens) * fraction)].tolist()
    return sorted(stays)


def second_scores(stage, own: np.ndarray) -> np.ndarray:
    """The scores of a second stage for ragged sequences with scores own [B K S]."""
    pos = np.where(np.arange(S)[None] < np.array(LENGTHS)[:, None], np.arange(S), -1).astype(np.int32)[:, None]
    own = np.where(pos >= 0, own, -np.inf).astype(np.float32)
    keys = jnp.zeros((*own.shape, 2))
    block = KVBlock(keys, keys, jnp.asarray(pos))
    new = np.asarray(jax.jit(lambda own: stage.scores(block, own, None, layer.spec()))(own))
    np.testing.assert_array_equal(new == -np.inf, np.broadcast_to(pos < 0, own.shape))
    return new


@pytest.mark.parametrize(("chunk", "kept", "sign"), [(4, 2, 1), (10, 4, 1), (5, 1, -1)])
def test_every_budget_keeps_what_the_greedy_pass_keeps(chunk, kept, sign):
    """The scores are a total order of tokens, so that one order serves all budgets."""
    own = sign * np.random.default_rng(chunk).exponential(size=(len(LENGTHS), 2, S)) ** 2
    new = second_scores(EntropyGate(chunk, kept), own)
    np.testing.assert_array_equal(new[:, 0], new[:, 1])  # one set for all heads
    for row, scores, n in zip(new[:, 0], own.astype(np.float32).mean(1), LENGTHS, strict=True):
        for budget in range(1, n + 1):
            best = sorted(np.argsort(-row[:n], kind="stable")[:budget].tolist())
            assert best == gate(scores[:n].astype(float), chunk, kept, budget), (n, budget)


def test_a_peak_takes_few_tokens_and_an_even_chunk_stays_whole():
    """By hand: chunk 1 has the largest mean by one token, so that it offers one, and chunk 0 follows whole."""
    own = np.ones((len(LENGTHS), 1, S))
    own[0, 0, :8] = [2, 2, 2, 2, 20, 0, 0, 0]
    new = second_scores(EntropyGate(4, 1), own)[0, 0]
    assert np.argsort(-new, kind="stable")[:5].tolist() == [4, 0, 1, 2, 3]


@pytest.mark.parametrize(("chunk", "fraction"), [(5, 0.4), (8, 0.5), (64, 0.3)])
def test_chunk_budgets_keep_the_same_fraction_of_every_chunk(chunk, fraction):
    own = np.random.default_rng(chunk).normal(size=(len(LENGTHS), 2, S))
    new = second_scores(ChunkRanks(chunk), own)
    for b, n in enumerate(LENGTHS):
        for head in range(2):
            expected = keep_of_chunks(own[b, head, :n].astype(np.float32), chunk, fraction)
            best = np.argsort(-new[b, head, :n], kind="stable")[: len(expected)]
            assert sorted(best.tolist()) == expected


def test_chunk_budgets_give_each_chunk_its_part_of_a_prompt():
    batch = layer.random_batch(2)
    positions = np.asarray(layer.prefill(layer.bind("keynorm:budget=6 + chunk_budgets:chunk=3"), batch).pos)
    norms = np.linalg.norm(np.asarray(batch.k, np.float64), axis=-1)
    for head in range(layer.K):
        expected = keep_of_chunks(-norms[0, head, :9], 3, 2 / 3)
        assert sorted(p for p in positions[0, head].tolist() if p >= 0) == expected


def test_a_chunk_scored_alone_keeps_what_it_keeps_as_a_prompt_of_its_own():
    """SnapKV in each chunk, by the chunk's last query; the window always stays, and is counted in its chunk."""
    window, chunk, batch = 1, 3, layer.random_batch(3)
    method = "snapkv:budget=6,window=1,kernel=3 + chunk_budgets:chunk=3,score=chunk"
    positions = np.asarray(layer.prefill(layer.bind(method), batch).pos)
    whole = np.asarray(layer.prefill(layer.bind(method.replace("score=chunk", "score=prompt")), batch).pos)
    for b, n in ((0, 9), (2, 6)):
        fraction = 6 / n
        expected = [[] for _ in range(layer.K)]
        for start in range(0, n, chunk):
            q, k = (np.asarray(x[b][..., start : start + chunk, :], np.float64) for x in (batch.q, batch.k))
            _, scores = eviction.snapkv_scores(eviction.attention_weights(q, k), window, kernel=3)
            for head in range(layer.K):
                expected[head] += [start + s for s in keep_of_chunks(scores[head], chunk, fraction)]
        for head in range(layer.K):
            assert sorted(p for p in positions[b, head].tolist() if p >= 0) == expected[head]
    assert (positions != whole).any()
