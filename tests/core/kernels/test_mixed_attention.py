"""The kernel that reads codes, recent and fetched tokens, in interpret mode against its reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.kernels import mixed_attention
from kvjax.core.kernels.mixed_attention import GroupedTokens, SlotVectors
from kvjax.core.kernels.packed_attention import PackedCodes

K, S, GROUP, RESIDUAL, N = 2, 400, 16, 32, 12
LENGTHS = np.array([373, 20])  # the second sequence has no codes yet


def random_tokens(rng: np.random.Generator, bits: int, axis: str, H: int) -> GroupedTokens:
    rows, B = S // 32, len(LENGTHS)
    words = rng.integers(0, 2**32, (B, K, rows * bits, H), np.uint64).astype(np.uint32)
    shape = (B, K, rows * 32 // GROUP, H) if axis == "channel" else (B, K, rows * 32, H // GROUP)
    scale, lo = rng.uniform(0.5, 1, shape) * 3 / (2**bits - 1), rng.uniform(-1.5, -0.5, shape)
    places = RESIDUAL if axis == "channel" else RESIDUAL + 1
    num_codes = LENGTHS // RESIDUAL * RESIDUAL if axis == "channel" else np.maximum(LENGTHS - RESIDUAL, 0)
    codes = PackedCodes(jnp.asarray(words), *(jnp.asarray(x, jnp.float32) for x in (scale, lo)))
    recent = jnp.asarray(rng.normal(size=(B, K, places, H)), jnp.float32)
    return GroupedTokens(codes, recent, jnp.asarray(num_codes, jnp.int32))


@pytest.mark.parametrize(
    ("bits", "H", "G", "T", "window", "pos_heads"),
    [(2, 32, 2, 2, None, 1), (1, 16, 1, 1, 100, 2), (8, 48, 3, 2, None, 1)],
)
def test_each_slot_is_read_from_its_own_place(bits, H, G, T, window, pos_heads):
    """Fetched are codes, keys whose values are still exact, and, of a short sequence, nothing."""
    rng, B = np.random.default_rng(bits), len(LENGTHS)
    k, v = random_tokens(rng, bits, "channel", H), random_tokens(rng, bits, "token", H)
    idx = np.full((B, K, N), -1)
    idx[0, :, 1:] = np.stack([rng.permutation(340)[: N - 1] for _ in range(K)])
    idx[0, 1, 1] = 350  # a code of a key, and an exact value
    exact = (jnp.asarray(rng.normal(size=(B, K, N, H)), jnp.float32) for _ in range(2))
    fetched = SlotVectors(*exact, jnp.asarray(idx, jnp.int32))
    pos = np.where(np.arange(S) < LENGTHS[:, None], np.arange(S), -1)
    pos = jnp.asarray(np.broadcast_to(pos[:, None], (B, pos_heads, S)), jnp.int32)
    q = jnp.asarray(rng.normal(size=(B, K, G, T, H)), jnp.float32)
    q_pos = jnp.asarray(LENGTHS[:, None] - 1 + np.arange(T), jnp.int32)
    arguments = q, k, v, fetched, pos, q_pos, jnp.asarray(LENGTHS, jnp.int32)
    part, last = mixed_attention.attend(*arguments, bits=bits, window=window, interpret=True)
    expected, expected_last = mixed_attention.attend_reference(*arguments, bits=bits, window=window)
    np.testing.assert_allclose(part.o / part.l[..., None], expected.o / expected.l[..., None], atol=2e-5)
    np.testing.assert_allclose(part.m, expected.m, atol=2e-5)
    for b, n in enumerate(LENGTHS):
        np.testing.assert_allclose(last[b, :, :, :n], expected_last[b, :, :, :n], atol=2e-5)
