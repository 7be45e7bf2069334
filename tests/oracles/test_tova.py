"""TOVA against its oracle, on ragged sequences.

TOVA in NumPy, float64, from its paper (arXiv 2401.06104, section 3.2): one sequence, one token at a time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.eviction.decode_policy import evict_lowest
from tests.contract import layer
from tests.oracles.online import softmax


def tova(q, k, v, n: int, budget: int, keep_newest: bool = False, window: int | None = None):
    """Decodes q [K G S H], k, v [K S H], a prompt of n tokens -> (outputs [K G S-n H] of the rest, cached tokens).

    Over budget the token with the lowest weight, in the mean over all K * G query heads, is evicted; a prompt is cut at
    once.
    """
    K, G, S, H = q.shape
    cached: list[int] = []
    out = np.empty((K, G, S - n, H))
    for t in range(S):
        cached.append(t)
        if t < n - 1:
            continue
        keys = np.array(cached)
        hidden = np.zeros(len(cached), bool) if window is None else keys <= t - window
        weight = np.zeros(len(cached))
        for head in range(K):
            p = softmax(np.where(hidden, -np.inf, q[head, :, t] @ k[head, keys].T / np.sqrt(H)))
            weight += p.sum(0) / (K * G)
            if t >= n:
                out[head, :, t - n] = p @ v[head, keys]
        if keep_newest:
            weight[-1] = np.inf
        order = sorted(range(len(cached)), key=lambda i: (weight[i], cached[i]))
        cached = sorted(cached[i] for i in order[max(len(cached) - budget, 0) :])
    return out, cached


def decode(method: str, batch: layer.SequenceBatch, padding: float = 0.0, window: int | None = None):
    """Decodes -> (f32[B K G STEPS H], the tokens cached at the end of each sequence)."""
    bound = layer.bind(method, window)
    state = layer.prefill(bound, batch, padding)
    out, state = jax.jit(functools.partial(layer.scan_steps, bound))(state, layer.stack_steps(batch))
    assert state.pos.shape[1] == 1  # one set for all heads
    return np.asarray(out), [sorted(pos[pos >= 0].tolist()) for pos in np.asarray(state.pos[:, 0])]


def oracle_outputs(batch: layer.SequenceBatch, **more):
    results = []
    for b, n in enumerate(batch.lengths.tolist()):
        q, k, v = batch.exact(b)
        results.append(tova(q, k, v, n, **more))
    return np.stack([out for out, _ in results]), [cached for _, cached in results]


@pytest.mark.parametrize(
    ("budget", "keep_newest", "window"), [(4, False, None), (4, True, None), (1, False, None), (6, False, 5)]
)
def test_each_step_loses_the_token_of_the_lowest_mean_weight(budget, keep_newest, window):
    batch = layer.random_batch(3)
    out, cached = decode(f"tova:budget={budget},keep_newest={keep_newest}", batch, window=window)
    expected, want_held = oracle_outputs(batch, budget=budget, keep_newest=keep_newest, window=window)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    assert cached == want_held


def test_the_newest_token_may_leave_unless_it_is_kept():
    batch = layer.random_batch()
    k = batch.k.at[:].set(0.0).at[:, :, :, 0].set(-jnp.arange(batch.k.shape[2], dtype=jnp.float32))
    # Each key has less attention than the one before.
    falling = layer.SequenceBatch(jnp.ones_like(batch.q), k, batch.v, batch.lengths)
    assert decode("tova:budget=3", falling)[1] == [[0, 1, 2]] * layer.B
    assert decode("tova:budget=3,keep_newest=true", falling)[1] == [[0, 1, n + layer.STEPS - 1] for n in layer.LENGTHS]


def test_over_budget_the_oldest_of_the_lowest_leaves_and_only_where_there_is_no_empty_slot():
    pos = jnp.array([[[7, 2, 5, 3]], [[7, 2, -1, 3]], [[7, 2, 5, 3]]])
    rank = jnp.array([[[0.1, 0.2, 0.1, 0.1]]] * 3)
    real = jnp.array([True, True, False])[:, None, None]
    remaining = evict_lowest(rank, pos, pos >= 0, real)
    assert remaining.tolist() == [[[7, 2, 5, -1]], [[7, 2, -1, 3]], [[7, 2, 5, 3]]]
    assert evict_lowest(rank, pos, pos > 5, real)[0].tolist() == [[-1, 2, 5, 3]]


def test_it_decodes_under_a_selection_whose_heads_hold_the_same():
    decode("snapkv:budget=6,window=2,kernel=3,per=layer + tova:budget=4", layer.random_batch())
