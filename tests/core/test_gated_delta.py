"""The gated delta rule and its convolution against recurrent NumPy versions in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.gated_delta import apply_gated_delta_rule, convolve, last_inputs

B, K, G, H, V = 2, 2, 3, 4, 5


def recur(q, k, v, log_decay, write_strength, state):
    """Equation 10 of arXiv 2412.06464, S_t = S_{t-1} (a (I - b k k')) + b v k', one token and one head at a time.

    States are [V H] as in the paper, and transposed at both ends.
    """

    def unit(x):
        return x / np.sqrt((x**2).sum() + 1e-6)

    out, states = np.zeros(v.shape), np.zeros(state.shape)
    for b, head, g in np.ndindex(state.shape[:3]):
        S = state[b, head, g].T
        for t in range(q.shape[2]):
            key, query = unit(k[b, head, t]), unit(q[b, head, t]) / np.sqrt(q.shape[3])
            a, strength = np.exp(log_decay[b, head, g, t]), write_strength[b, head, g, t]
            S = S @ (a * (np.eye(len(key)) - strength * np.outer(key, key)))
            S = S + strength * np.outer(v[b, head, g, t], key)
            out[b, head, g, t] = S @ query
        states[b, head, g] = S.T
    return out, states


def draw_inputs(T: int, fastest_decay: float = 2.0):
    rng = np.random.default_rng(T)

    def draw(*shape):
        return rng.normal(size=shape)

    log_decay = -fastest_decay * rng.uniform(size=(B, K, G, T)) ** 2
    inputs = draw(B, K, T, H), draw(B, K, T, H), draw(B, K, G, T, V), log_decay, rng.uniform(size=(B, K, G, T))
    return *inputs, draw(B, K, G, H, V)


def run(*inputs):
    return jax.jit(apply_gated_delta_rule)(*(jnp.asarray(x, jnp.float32) for x in inputs))


@pytest.mark.parametrize(
    ("T", "fastest_decay"),
    [(1, 2.0), (7, 2.0), (64, 0.1), (150, 2.0), (80, 60.0)],
    ids=["a token", "part of a chunk", "a chunk", "several", "decays that underflow"],
)
def test_chunks_are_the_recurrence(T, fastest_decay):
    inputs = draw_inputs(T, fastest_decay)
    for ours, expected in zip(run(*inputs), recur(*inputs), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_tokens_that_neither_decay_nor_write_leave_the_state_bit_by_bit():
    *inputs, state = draw_inputs(10)
    inputs[3][..., 6:], inputs[4][..., 6:] = 0, 0
    _, padded = run(*inputs, state)
    q, k, v, log_decay, write_strength = inputs
    _, expected = run(q[:, :, :6], k[:, :, :6], v[..., :6, :], log_decay[..., :6], write_strength[..., :6], state)
    np.testing.assert_allclose(padded, expected, atol=1e-6)
    _, untouched = run(q, k, v, 0 * log_decay, 0 * write_strength, state)
    np.testing.assert_array_equal(untouched, np.float32(state))


def test_equal_keys_replace_their_value():
    # With b = 1 and no decay, a key reads the value that was written last, whatever was there before.
    k, v = np.tile([[3.0, 0, 0, 0]], (5, 1)), np.arange(25.0).reshape(5, 5)
    ones = np.ones((1, 1, 1, 5))
    out, state = run(k[None, None], k[None, None], v[None, None, None], 0 * ones, ones, np.ones((1, 1, 1, 4, 5)))
    np.testing.assert_allclose(out[0, 0, 0] * 2, v, atol=1e-4)  # queries have length H ** -0.5
    np.testing.assert_allclose(state[0, 0, 0], [v[-1], *np.ones((3, 5))], atol=1e-4)


def test_convolution_over_two_pieces_and_padding():
    rng = np.random.default_rng(0)
    T, W, C = 9, 4, 3
    x, kernel = rng.normal(size=(B, K, T, C)), rng.normal(size=(1, K, C, W))
    expected = np.zeros(x.shape)
    for b, head, t, c in np.ndindex(x.shape):
        y = sum(kernel[0, head, c, w] * x[b, head, t + w - 3, c] for w in range(W) if t + w >= 3)
        expected[b, head, t, c] = y / (1 + np.exp(-y))
    x, kernel = jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32)
    nothing = jnp.zeros((B, K, W - 1, C))
    np.testing.assert_allclose(convolve(x, nothing, kernel), expected, atol=1e-5)
    # Sequence 0 has two tokens in the first piece, fewer than the kernel reads back, and sequence 1 five.
    count = jnp.array([2, 5], jnp.int32)
    before = last_inputs(x[:, :, :6], nothing, count)
    np.testing.assert_array_equal(before[0], jnp.concatenate([nothing[0, :, :1], x[0, :, :2]], 1))
    np.testing.assert_array_equal(before[1], x[1, :, 2:5])
    np.testing.assert_allclose(convolve(x[1:, :, 5:], before[1:], kernel), expected[1:, :, 5:], atol=1e-5)
