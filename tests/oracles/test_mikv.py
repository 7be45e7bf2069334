"""MiKV against its oracle, and the properties of balanced channels and of codes per token.

MiKV in NumPy, float64, from its paper (arXiv 2402.18096, sections 3.1 and 3.2): one head of one sequence.
"""

from __future__ import annotations

from math import floor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs.chunk_quant import Tokenwise
from kvjax.cache.codecs.plain import Plain
from kvjax.core import attention
from kvjax.core.attention_mass import Observation
from kvjax.core.memory import array_bytes
from kvjax.errors import KvjaxError
from kvjax.methods.mikv import ChannelBalancer
from kvjax.testing import dense_attention
from tests.contract import layer
from tests.oracles.eviction import accumulated_scores
from tests.oracles.eviction import attention_weights as causal


def low_tier_tokens(received: np.ndarray, fraction: float, recent: float) -> list[int]:
    """The tokens of the low tier, ascending, by attention received [n]; ties go to the earlier token."""
    n = len(received)
    count = floor(fraction * n + 1e-9)
    num_recent = floor(recent * (n - count) + 1e-9)
    order = sorted(range(n - num_recent), key=lambda t: (received[t], t))
    return sorted(order[:count])


def oracle_channel_balance(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The factor of each key channel [H], from queries q [G n H] and keys k [n H] of a prompt."""
    query_max, key_max = np.abs(q).max((0, 1)), np.abs(k).max(0)
    return np.array([np.sqrt(a / b) if a > 0 and b > 0 else 1.0 for a, b in zip(query_max, key_max, strict=True)])


def round_to_levels(vector: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Rounds each group of channels of a vector [H] to 2^bits levels from its minimum to its maximum."""
    out = vector.astype(float).copy()
    for first in range(0, len(vector), group):
        numbers = vector[first : first + group]
        step = (numbers.max() - numbers.min()) / (2**bits - 1)
        if step > 0:
            out[first : first + group] = np.round((numbers - numbers.min()) / step) * step + numbers.min()
    return out


def reconstruct(k, v, tokens: list[int], balance, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """The stored keys and values [n H] when these tokens are quantized."""
    k, v = k.astype(float).copy(), v.astype(float).copy()
    for t in tokens:
        k[t], v[t] = round_to_levels(k[t] * balance, bits, group) / balance, round_to_levels(v[t], bits, group)
    return k, v


@pytest.mark.parametrize(
    ("text", "bits", "group", "balance"),
    [("mikv:share=0.6,low=3", 3, 32, True), ("mikv:share=0.6,low=2,group=8,balance=false", 2, 8, False)],
)
def test_it_is_its_oracle_where_padding_holds_infinity(text, bits, group, balance):
    batch, noisy = layer.random_batch(), layer.random_batch(padding=np.inf)
    out = layer.decode(text, batch, state=layer.prefill(layer.bind(text), noisy, padding=np.inf))
    for b, n in enumerate(map(int, layer.LENGTHS)):
        prompts = np.asarray(batch.q[b, :, :, :n], np.float64), np.asarray(batch.k[b, :, :n], np.float64)
        received = accumulated_scores(causal(*prompts))[1]
        for h in range(layer.K):
            tokens = low_tier_tokens(received[h], 0.6, 0.5)
            weight = oracle_channel_balance(prompts[0][h], prompts[1][h]) if balance else np.ones(layer.H)
            for t in range(layer.STEPS):
                k, v = (np.asarray(x[b, h, : n + t + 1]) for x in (batch.k, batch.v))
                keys, values = reconstruct(k, v, tokens, weight, bits, group)
                q = np.asarray(batch.q[b, h, :, n + t : n + t + 1])
                expected = dense_attention(q, keys[None], values[None], np.array([n + t]))[:, 0]
                np.testing.assert_allclose(out[b, h, :, t], expected, atol=1e-5)


def test_the_newest_of_the_high_tier_stay_whatever_they_receive():
    """Eight of ten tokens are low; one of the others is the newest, the other the most attended."""
    assert low_tier_tokens(np.array([9, 1, 8, 7, 6, 5, 4, 3, 2, 0.0]), 0.8, 0.5) == [1, 2, 3, 4, 5, 6, 7, 8]
    low = layer.prefill(layer.bind("mikv:share=0.5,recent=1"), layer.random_batch()).side_store.pos[0]
    assert np.asarray(low).tolist() == [[0, 1, 2, 3]] * layer.K


def test_the_high_tier_in_eight_bits():
    batch = layer.random_batch()
    exact, coded = (layer.decode(f"mikv:share=0.6{more}", batch) for more in ("", ",high=8"))
    assert 0 < np.abs(coded - exact).max() < 0.05
    sizes = [array_bytes(layer.prefill(layer.bind(f"mikv:share=0.6{more}"), batch)) for more in ("", ",high=8")]
    slots = 4 + 16  # four of nine prompt tokens, and headroom
    rows = 2 * layer.B * layer.K * slots
    assert sizes[0]["device"] - sizes[1]["device"] == rows * (4 * layer.H - (layer.H + 4))


def channel_balance(q, k) -> np.ndarray:
    """The balance of one head's channels with queries q [n H] and keys k [n H]."""
    q, k = (jnp.asarray(x, jnp.float32)[None, None] for x in (q, k))
    pos = jnp.arange(q.shape[2], dtype=jnp.int32)[None]
    return np.asarray(ChannelBalancer(Plain()).fit_prompt(k, pos[:, None], Observation(q[:, :, None], pos)))[0, 0, 0]


def test_weights_by_hand():
    np.testing.assert_allclose(channel_balance([[8, -1], [1, 0]], [[1, 4], [-2, 3]]), [2.0, 0.5])
    np.testing.assert_allclose(channel_balance([[0, 3, 1e30]], [[2, 0, 1e-30]]), [1.0, 1.0, 1e30], rtol=1e-5)


def test_balance_alone_changes_no_product_and_gives_keys_back():
    rng = np.random.default_rng(0)
    x, q = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 2, 6, 8), (2, 2, 3, 6, 8)))
    pos = jnp.asarray([np.arange(6), [0, 1, -1, -1, -1, -1]], jnp.int32)
    noisy = jnp.where(pos[:, None, :, None] < 0, jnp.inf, x)
    codec, at = ChannelBalancer(Plain()), jnp.asarray([[5], [2]], jnp.int32)

    @jax.jit
    def run(x, q):
        stored = codec.encode(x, pos[:, None], Observation(q, pos))
        stored = codec.append(stored, x[:, :, :1], at)
        rows = codec.gather(stored, jnp.broadcast_to(at[:, :, None], (2, 2, 1)))
        return stored, codec.decode(stored), codec.scores(q[:, :, :, :1], stored), rows

    stored, decoded, scores, rows = run(noisy, q)
    assert not np.allclose(stored.inner.data[0], x[0]) and np.isfinite(decoded).all()
    np.testing.assert_allclose(decoded[0, :, :5], x[0, :, :5], rtol=1e-5)
    np.testing.assert_allclose(rows, x[:, :, :1], rtol=1e-5)
    np.testing.assert_allclose(scores, attention.scores(q[:, :, :, :1], decoded), atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_by_token_are_the_oracles_and_really_packed(bits):
    """Groups of 16 channels restore a vector of zeros and a constant one exactly."""
    x = np.random.default_rng(bits).normal(size=(1, 2, 5, 32)).astype(np.float32)
    x[0, 0, 1], x[0, 1, 2] = 0.0, -7.5
    pos = jnp.asarray([[[0, 1, 2, 3, -1]]], jnp.int32)
    codec = Tokenwise(bits, group=16)
    idx = jnp.asarray([[[3, 0], [2, 2]]], jnp.int32)

    @jax.jit
    def run(x):
        stored = codec.encode(x, pos)
        return stored, codec.decode(stored), codec.gather(stored, idx)

    stored, decoded, rows = run(jnp.where(pos[..., None] >= 0, x, jnp.inf))
    expected = np.array([[round_to_levels(row, bits, 16) for row in head[:4]] for head in x[0]])
    np.testing.assert_allclose(decoded[0, :, :4], expected, atol=1e-5)
    np.testing.assert_array_equal(decoded[0, 1, 2], x[0, 1, 2])
    np.testing.assert_array_equal(rows, jnp.take_along_axis(decoded, idx[..., None], 2))
    assert array_bytes(stored)["device"] == 2 * 5 * (32 * bits // 8 + 2 * 2 * 4) + 2 * 4


def test_what_has_no_meaning_is_refused():
    with pytest.raises(KvjaxError, match="has seen none"):
        ChannelBalancer(Plain()).encode(jnp.ones((1, 1, 2, 4)), jnp.zeros((1, 1, 2), jnp.int32), None)
