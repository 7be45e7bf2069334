"""TOVA against its oracle, on ragged sequences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.eviction.decode_policy import evict_lowest
from tests.contract import layer
from tests.oracles import tova as oracle


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
        results.append(oracle.tova(q, k, v, n, **more))
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
