"""The kernel over codes of single tokens in interpret mode, against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.kernels import token_attention
from kvjax.core.kernels.token_attention import TokenCodes

B, K, S = 2, 2, 150  # more than two blocks of slots, the last of them not full
EMPTY = (5, 6, 7, *range(140, S))  # slots


def random_codes(bits: int, H: int, has_zero: bool, seed: int) -> tuple[TokenCodes, np.ndarray]:
    """Codes, and the numbers f64[B K S H] that they stand for."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (B, K, S, H))
    places = codes.reshape(B, K, S, -1, 8 // bits)
    data = sum(places[..., j] << bits * j for j in range(8 // bits)).astype(np.uint8)
    scale = rng.uniform(1, 3, (B, K, S)).astype(np.float32) / 2**bits
    zero = rng.integers(0, 2**bits, (B, K, S)).astype(np.float32) if has_zero else None
    middle = 2 ** (bits - 1) if zero is None else zero.astype(float)[..., None]
    return TokenCodes(*(None if x is None else jnp.asarray(x) for x in (data, scale, zero))), (
        codes - middle
    ) * scale.astype(float)[..., None]


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Exact attention of q [B K G T H], in float64."""
    s = np.einsum("bkgth,bksh->bkgts", q.astype(float), keys) / np.sqrt(q.shape[-1])
    p = np.where(visible, np.exp(s - s.max(-1, keepdims=True)), 0)
    return np.einsum("bkgts,bksh->bkgth", p / p.sum(-1, keepdims=True), values)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("bits", "has_zero", "H", "G", "T", "pos_heads"),
    [
        ((8, 8), False, 64, 4, 1, 1),
        ((4, 4), True, 64, 9, 2, 2),
        ((8, 2), True, 128, 1, 3, 1),
        ((1, 8), False, 128, 2, 1, 2),
    ],
)
def test_attention_is_that_to_the_numbers(bits, has_zero, H, G, T, pos_heads, window):
    (k, keys), (v, values) = (random_codes(b, H, has_zero, seed) for seed, b in enumerate(bits))
    # What an empty slot holds must not matter.
    k, v = (x._replace(scale=x.scale.at[:, :, np.asarray(EMPTY)].set(bad)) for x, bad in ((k, np.inf), (v, np.nan)))
    pos = np.where(np.isin(np.arange(S), EMPTY), -1, np.arange(S)).astype(np.int32)
    q_pos = np.array([np.arange(139 - T, 139), np.arange(90, 90 + T)], np.int32)
    q = np.random.default_rng(9).normal(size=(B, K, G, T, H)).astype(np.float32)
    visible = (pos >= 0) & (pos <= q_pos[..., None])
    visible = visible if window is None else visible & (pos > q_pos[..., None] - window)
    heads_pos = jnp.asarray(np.broadcast_to(pos, (B, pos_heads, S)))
    options = {"bits": bits, "window": window}
    part = token_attention.attend(jnp.asarray(q), k, v, heads_pos, jnp.asarray(q_pos), interpret=True, **options)
    expected = attend(q, keys, values, visible[:, None, None])
    np.testing.assert_allclose(part.o / part.l[..., None], expected, atol=2e-5)
    reference = token_attention.attend_reference(jnp.asarray(q), k, v, heads_pos, jnp.asarray(q_pos), **options)
    np.testing.assert_allclose(reference.o / reference.l[..., None], expected, atol=2e-5)
    np.testing.assert_allclose(part.m, reference.m, atol=1e-5)


def test_a_query_that_sees_nothing_gets_no_weight():
    codes, _ = random_codes(8, 64, False, 0)
    q, pos = jnp.ones((B, K, 1, 1, 64)), jnp.full((B, 1, S), -1, jnp.int32)
    part = token_attention.attend(q, codes, codes, pos, jnp.zeros((B, 1), jnp.int32), bits=(8, 8), interpret=True)
    assert not part.o.any() and not part.l.any()


def test_the_sizes_that_have_tiles():
    assert token_attention.fits(128, 1) and token_attention.fits(16, 8) and token_attention.fits(256, 8)
    assert not token_attention.fits(64, 1) and not token_attention.fits(80, 8) and not token_attention.fits(128, 3)
