"""R-KV against its oracle, on ragged sequences and keys that nearly repeat one another.

R-KV in NumPy, float64, from its paper (arXiv 2505.24133) and public code: one key/value head of one sequence.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.methods.rkv import RKV, redundancy
from tests.contract import layer
from tests.oracles.online import softmax


def oracle_redundancy(keys: np.ndarray, threshold: float = 0.5) -> np.ndarray:
    """The softmax [S] of each key's mean cosine to all keys [S H], without the newest near duplicate of each."""
    unit = keys / (np.linalg.norm(keys, axis=1, keepdims=True) + 1e-8)
    total = np.zeros(len(keys))
    for i in range(len(keys)):
        similarities = unit @ unit[i]
        similarities[i] = 0
        similarities[max([j for j in range(len(keys)) if similarities[j] > threshold], default=0)] = 0
        total += similarities
    return softmax(total / len(keys))


def scores(q, keys, window: int, kernel: int, mix: float, threshold: float) -> np.ndarray:
    """The scores [S - window] of tokens before the window, from the last queries q [G w H] and keys [S H]."""
    past = len(keys) - window
    logits = (q @ keys[:past].T / np.sqrt(keys.shape[1])).max(0)
    observed = softmax(logits).mean(0)
    radius = kernel // 2
    attention = np.array([observed[max(i - radius, 0) : i + radius + 1].max() for i in range(past)])
    return mix * attention - (1 - mix) * oracle_redundancy(keys, threshold)[:past]


def select_tokens(q, k, cached: list[int], t: int, budget: int, window: int, kernel: int, mix: float, threshold: float):
    """Selects `budget` of the cached tokens by the queries up to t: q [G S H], k [S H]."""
    token_scores = scores(q[:, t - window + 1 : t + 1], k[cached], window, kernel, mix, threshold)
    best = np.argsort(-token_scores, kind="stable")[: budget - window]
    return [cached[i] for i in sorted(best)] + cached[-window:]


def decode(q, k, v, n: int, interval: int, budget: int, **options) -> np.ndarray:
    """Decodes q [G S H], k, v [S H], a prompt of n tokens -> outputs [G S-n H]; a full cache shrinks before a token."""
    G, S, H = q.shape
    cached, out = list(range(n)), np.empty((G, S - n, H))
    if n > budget:
        cached = select_tokens(q, k, cached, n - 1, budget, **options)
    for t in range(n, S):
        if len(cached) == budget + interval:
            cached = select_tokens(q, k, cached, t, budget, **options)
        cached.append(t)
        out[:, t - n] = softmax(q[:, t] @ k[cached].T / np.sqrt(H)) @ v[cached]
    return out


SETTINGS = {"window": 2, "kernel": 3, "mix": 0.3, "threshold": 0.5}


def score_tokens(scorer: RKV, block: KVBlock, observation: Observation) -> np.ndarray:
    """The scores f32[B K S] of a block."""
    return np.asarray(jax.jit(lambda *x: scorer.scores(*x, layer.spec()).per_kv_head)(block, observation))


def similar_keys(seed: int) -> layer.SequenceBatch:
    """Sequences whose keys have two channels, so that many point in nearly the same direction."""
    batch = layer.random_batch(seed)
    return dataclasses.replace(batch, k=batch.k.at[..., 2:].set(0.0))


def test_three_equal_keys_by_hand():
    k = jnp.ones((1, 1, 3, 2))
    actual = redundancy(KVBlock(k, k, jnp.arange(3)[None, None]), 0.5)
    np.testing.assert_allclose(actual[0, 0], [0.4484, 0.3213, 0.2302], atol=5e-5)


def test_redundancy_is_counted_a_block_at_a_time():
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(2, 2, 9, 3)), jnp.float32)
    block = KVBlock(k, k, jnp.arange(9)[None, None].repeat(2, 0))
    actual = redundancy(block, 0.5, at_once=4)
    for keys, row_scores in zip(np.asarray(k, np.float64).reshape(4, 9, 3), actual.reshape(4, 9), strict=True):
        np.testing.assert_allclose(row_scores, oracle_redundancy(keys), atol=1e-6)


@pytest.mark.parametrize("padding", [0.0, np.inf])
def test_scores_are_those_of_real_tokens_alone(padding):
    q, block = layer.prompt(similar_keys(2), padding)
    scorer = RKV(SETTINGS["window"], *(SETTINGS[name] for name in ("kernel", "mix", "threshold")))
    actual = score_tokens(scorer, block, Observation(q, block.pos[:, 0]))
    for b, n in enumerate(layer.LENGTHS.tolist()):
        past = max(n - 2, 0)
        assert (actual[b, :, past:n] == 1).all() and (actual[b, :, n:] == -np.inf).all()
        for head in range(layer.K) if past else ():
            queries, keys = np.asarray(q[b, head, :, past:n], np.float64), np.asarray(block.k[b, head, :n], np.float64)
            np.testing.assert_allclose(actual[b, head, :past], scores(queries, keys, **SETTINGS), atol=1e-6)


def test_a_full_buffer_is_compressed_by_the_latest_queries():
    batch = similar_keys(4)
    out = layer.decode("rkv:budget=5,every=2,window=2,kernel=3,mix=0.3", batch)
    for b, n in enumerate(batch.lengths.tolist()):
        for head in range(layer.K):
            q, k, v = batch.exact(b, head)
            np.testing.assert_allclose(out[b, head], decode(q, k, v, n, 2, 5, **SETTINGS), atol=2e-5)
