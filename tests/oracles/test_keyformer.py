"""Keyformer against its oracle, on ragged sequences, and its noise.

Keyformer in NumPy, float64, from its paper (arXiv 2403.09054), with given noise: one head of one sequence.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods.keyformer import Keyformer, temper_weights
from tests.contract import layer


def softmax(s: np.ndarray) -> np.ndarray:
    """The softmax over the last axis."""
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def keyformer(q, k, v, noise, n: int, budget: int, recent: int, tau: float, tau_end: float, steps: int, window=None):
    """Decodes q [G S H], k, v [S H] with noise [G S S] of queries and keys, after a prompt of n tokens.

    Returns (outputs [G S-n H] of the tokens after the prompt, the tokens cached at the end).
    """
    G, S, H = q.shape
    cached: list[int] = []
    scores = np.zeros(S)
    out = np.empty((G, S - n, H))
    for t in range(S):
        cached.append(t)
        visible = [s for s in cached if window is None or s > t - window]
        logits = q[:, t] @ k[visible].T / np.sqrt(H)
        step = max(t - n + 1, 0)
        temperature = tau + (tau_end - tau) * min(step, steps) / steps
        scores[visible] += softmax((logits + noise[:, t, visible]) / temperature).sum(0)
        if t >= n:
            out[:, t - n] = softmax(logits) @ v[visible]
        while t >= n - 1 and len(cached) > budget:
            cached.remove(min((s for s in cached if s <= t - recent), key=lambda s: (scores[s], s)))
    return out, cached


SETTINGS = {"budget": 5, "recent": 2, "tau": 0.5, "tau_end": 3.0, "steps": 4}
STRING = "keyformer:" + ",".join(f"{name}={value}" for name, value in SETTINGS.items())


def noise(count: int, seed: int = 0, spec=None, first: int = 0, num_sequences: int = 1) -> np.ndarray:
    """The noise [B K G count count] of consecutive positions."""
    pos = jnp.arange(first, first + count, dtype=jnp.int32)[None].repeat(num_sequences, 0)
    spec = spec or layer.spec()
    draw = functools.partial(Keyformer(**SETTINGS, seed=seed).at(spec).noise, spec.without_index, layer.K)
    return np.asarray(jax.jit(draw)(pos, pos[:, None]))


def decode(batch: layer.SequenceBatch, window: int | None = None, padding: float = 0.0):
    """Decodes -> (f32[B K G STEPS H], the tokens cached at the end by each head of each sequence)."""
    bound = layer.bind(STRING, window)
    state = layer.prefill(bound, batch, padding)
    out, state = jax.jit(functools.partial(layer.scan_steps, bound))(state, layer.stack_steps(batch))
    return np.asarray(out), [[sorted(head[head >= 0].tolist()) for head in heads] for heads in np.asarray(state.pos)]


@pytest.mark.parametrize("window", [None, 5])
def test_each_step_loses_the_lowest_score_outside_the_recent_ones(window):
    batch = layer.random_batch(3)
    out, cached = decode(batch, window)
    random_noise = noise(int(layer.TOTAL.max()))[0].astype(np.float64)
    for b, n in enumerate(batch.lengths.tolist()):
        for head in range(layer.K):
            q, k, v = batch.exact(b, head)
            expected, want_held = keyformer(q, k, v, random_noise[head], n, **SETTINGS, window=window)
            np.testing.assert_allclose(out[b, head], expected, atol=2e-5)
            assert cached[b][head] == want_held


def test_a_temperature_of_two_takes_roots_by_hand():
    actual = temper_weights(jnp.array([0.2, 0.8, 0.0]), jnp.zeros(3), jnp.array(2.0))
    np.testing.assert_allclose(actual, [1 / 3, 2 / 3, 0], atol=1e-6)
    doubled = temper_weights(jnp.array([0.2, 0.8, 0.0]), jnp.array([np.log(4.0), 0.0, 9.0]), jnp.array(1.0))
    np.testing.assert_allclose(doubled, [0.5, 0.5, 0], atol=1e-6)
    assert not np.any(temper_weights(jnp.zeros(3), jnp.zeros(3), jnp.array(1.0)))


def test_noise_is_gumbels():
    random_noise = noise(100)
    assert np.isfinite(random_noise).all()
    np.testing.assert_allclose([random_noise.mean(), random_noise.std()], [0.5772, np.pi / np.sqrt(6)], atol=0.03)
    below = [(random_noise < x).mean() for x in (-1.0, 0.0, 1.0, 3.0)]
    np.testing.assert_allclose(below, np.exp(-np.exp([1.0, 0.0, -1.0, -3.0])), atol=0.01)


def test_noise_depends_on_seed_layer_head_and_positions_alone():
    random_noise = noise(6)
    np.testing.assert_array_equal(noise(6, num_sequences=3), random_noise.repeat(3, 0))
    np.testing.assert_array_equal(noise(4, first=2), random_noise[:, :, :, 2:, 2:])
    flat = [
        random_noise,
        noise(6, seed=1),
        noise(6, spec=dataclasses.replace(layer.spec(), index=1, num_layers=2, method_layers=None)),
    ]
    assert len(np.unique(np.concatenate(flat))) > 0.99 * sum(x.size for x in flat)  # nothing is drawn twice
