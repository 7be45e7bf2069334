"""CUR against its oracle, on ragged sequences.

CURPress of kvpress in NumPy, float64, after CurDKV (arXiv 2509.15038): one key/value head of one sequence.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.types import KVBlock
from kvjax.methods.cur import Cur
from tests.contract import layer


def local_leverage(x: np.ndarray, window: int) -> np.ndarray:
    """The squared norms of x [S H] over their sum in windows from the first token on, [S]."""
    out = np.zeros(len(x))
    for first in range(0, len(x), window):
        squares = (x[first : first + window] ** 2).sum(1)
        out[first : first + window] = squares / squares.sum()
    return out


def scores(k: np.ndarray, v: np.ndarray, window: int, leverage: str = "product") -> np.ndarray:
    """The scores [S] of tokens with k, v [S H]."""
    key_leverage, value_leverage = local_leverage(k, window), local_leverage(v, window)
    score = {
        "product": key_leverage * value_leverage,
        "mean": (key_leverage + value_leverage) / 2,
        "key": key_leverage,
        "value": value_leverage,
    }[leverage]
    return score / score.sum()


def select_tokens(scores: np.ndarray, budget: int, sinks: int) -> list[int]:
    """Selects the sinks and the highest scores, ascending."""
    ranking = np.where(np.arange(len(scores)) < sinks, np.inf, scores)
    return sorted(np.argsort(-ranking, kind="stable")[:budget].tolist())


def score_tokens(k, v, **more) -> np.ndarray:
    block = KVBlock(jnp.asarray(k)[None, None], jnp.asarray(v)[None, None], jnp.arange(len(k))[None, None])
    return np.asarray(Cur(**more).scores(block, None, layer.spec()).per_kv_head)[0, 0]


def test_shares_of_a_window_by_hand():
    """Squared norms 1, 3 | 2 of keys and 1, 1 | 5 of values: products 1/8, 3/8 and, alone in its window, 1."""
    k, v = np.sqrt([[1.0], [3.0], [2.0]]), np.sqrt([[1.0], [1.0], [5.0]])
    np.testing.assert_allclose(score_tokens(k, v, window=2), np.array([1, 3, 8]) / 12, atol=1e-6)
    np.testing.assert_allclose(score_tokens(k, v, window=2, leverage="mean"), np.array([3, 5, 8]) / 16, atol=1e-6)


@pytest.mark.parametrize("padding", [0.0, np.inf])
@pytest.mark.parametrize("leverage", ["product", "mean", "key", "value"])
def test_scores_are_those_of_real_tokens_alone(padding, leverage):
    block = layer.prompt(layer.random_batch(2), padding)[1]
    actual = np.asarray(Cur(4, leverage).scores(block, None, layer.spec()).per_kv_head)
    for b, n in enumerate(layer.LENGTHS.tolist()):
        for head in range(layer.K):
            k, v = (np.asarray(x[b, head, :n], np.float64) for x in (block.k, block.v))
            np.testing.assert_allclose(actual[b, head, :n], scores(k, v, 4, leverage), atol=1e-6)
        assert (actual[b, :, n:] == -np.inf).all()


def test_each_head_keeps_its_sinks_and_its_highest_scores():
    batch = layer.random_batch(1)
    positions = layer.prefill(layer.bind("cur:budget=5,window=4,sinks=1"), batch).pos
    for b, n in enumerate(batch.lengths.tolist()):
        for head in range(layer.K):
            k, v = (np.asarray(x[b, head, :n], np.float64) for x in (batch.k, batch.v))
            expected = select_tokens(scores(k, v, 4), 5, 1)
            assert sorted(p for p in positions[b, head].tolist() if p >= 0) == expected
