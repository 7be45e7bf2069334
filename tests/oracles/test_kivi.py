"""KIVI equals its NumPy oracle step by step, on ragged sequences around whole blocks, and takes its bytes (C7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax import methods
from kvjax.cache.codecs.group_quant import Kivi
from tests.contract import layer
from tests.oracles import kivi

B, K, G, H, R = 7, 2, 2, 8, 8
LENGTHS = np.array([1, 5, R - 1, R, R + 1, 2 * R - 1, 2 * R], np.int32)
STEPS, CAPACITY = 11, 40
SPECS = [(1, 8, "improved"), (1, 8, "original"), (2, 8, "improved"), (4, 4, "improved"), (8, 8, "improved")]


def random_batch(seed: int = 0, padding: float = 0.0, num_new: int = STEPS, dtype=np.float32) -> layer.SequenceBatch:
    """Random prompts of LENGTHS with `num_new` tokens after each, followed by `padding`."""
    rng = np.random.default_rng(seed)
    S = int(LENGTHS.max()) + num_new
    shape = (B, K, S, H)
    q = 2 * rng.normal(size=(*shape[:2], G, *shape[2:]))
    k, v = rng.normal(size=(2, *shape))
    is_token = np.arange(S)[None] < (LENGTHS + num_new)[:, None]
    is_token = is_token[:, None, :, None]

    def pad(x, is_token):
        return jnp.asarray(np.where(is_token, x, padding).astype(dtype))

    return layer.SequenceBatch(pad(q, is_token[:, :, None]), pad(k, is_token), pad(v, is_token), LENGTHS)


def bind(method, window: int | None = None):
    return layer.bind(method, window, H)


@functools.cache
def _compile_prefill(method):
    return jax.jit(lambda block: bind(method).prefill(block, None, CAPACITY))


def prefill(method, batch: layer.SequenceBatch, padding: float = 0.0):
    """Returns the state after the prompts; after each prompt the block holds `padding`."""
    return _compile_prefill(method)(layer.prompt(batch, padding, int(LENGTHS.max()))[1])


@functools.cache
def _compile_decode(method, window: int | None):
    return jax.jit(functools.partial(layer.scan_steps, bind(method, window)))


def decode(method, batch: layer.SequenceBatch, padding: float = 0.0, window: int | None = None) -> np.ndarray:
    """Decodes one token at a time -> f32[B K G STEPS H]."""
    return np.asarray(
        _compile_decode(method, window)(prefill(method, batch, padding), layer.stack_steps(batch, STEPS))[0]
    )


def oracle_outputs(
    batch: layer.SequenceBatch, bits: int, group: int, one_bit="improved", window=None, residual=R
) -> np.ndarray:
    """The oracle's outputs, f64[B K G STEPS H]."""
    q, k, v = (np.asarray(x) for x in (batch.q, batch.k, batch.v))
    out = np.zeros((*q.shape[:3], STEPS, H))
    for b, n in enumerate(batch.lengths):
        for h in range(K):
            cache = kivi.KiviCache(k[b, h, :n], v[b, h, :n], bits, group, residual, one_bit)
            for t in range(STEPS):
                pos = n + t
                out[b, h, :, t] = cache.step(q[b, h, :, pos], k[b, h, pos], v[b, h, pos], window)
    return out


@pytest.mark.parametrize("T0", [1, R - 1, R, R + 1, 2 * R, 3 * R - 1])
def test_the_oracle_quantises_blocks_of_keys_and_single_values(T0):
    """Its order is the code's: append, attend, flush; in closed form, with n tokens in a step, the new one included."""
    x = np.random.default_rng(T0).normal(size=(T0 + 20, H)).astype(np.float32)
    cache = kivi.KiviCache(x[:T0], x[:T0], 2, 4, R)
    assert (len(cache.low_k), len(cache.low_v)) == (T0 - T0 % R, max(T0 - R, 0))
    for n in range(T0 + 1, T0 + 21):
        cache.append(x[n - 1], x[n - 1])
        assert sorted(cache.low_k) == list(range(max(T0 - T0 % R, (n - 1) // R * R)))
        assert sorted(cache.low_v) == list(range(max(n - 1 - R, 0)))
        exact = cache.visible_keys()[len(cache.low_k) :], cache.visible_values()[len(cache.low_v) :]
        np.testing.assert_array_equal(exact[0], x[len(cache.low_k) : n])
        np.testing.assert_array_equal(exact[1], x[len(cache.low_v) : n])
        cache.flush()


def test_the_oracle_by_hand():
    """Two tokens make a group of keys per channel, two channels a group of values per token; R = 2, 1 bit."""
    k = np.array([[0, 8], [4, 0]], np.float32)
    cache = kivi.KiviCache(k, k, 1, 2, 2)
    np.testing.assert_array_equal(cache.visible_keys(), [[1, 6], [3, 2]])
    np.testing.assert_array_equal(cache.visible_values(), k)
    out = cache.step(np.zeros((1, 2), np.float32), np.array([5, 5], np.float32), np.array([3, 1], np.float32))
    np.testing.assert_allclose(out, [[7 / 3, 9 / 3]])
    np.testing.assert_array_equal(cache.visible_values(), [[2, 6], [4, 0], [3, 1]])
    original = kivi.KiviCache(k, k, 1, 2, 2, "original")
    np.testing.assert_array_equal(original.visible_keys(), k)
    two = kivi.KiviCache(np.array([[0.0], [3], [1.4], [1.5]], np.float32), np.zeros((4, 1), np.float32), 2, 4, 4)
    np.testing.assert_array_equal(two.visible_keys(), [[0], [3], [1], [2]])


@pytest.mark.parametrize(("bits", "group", "one_bit"), SPECS)
def test_kivi_equals_the_paper(bits, group, one_bit):
    batch = random_batch(seed=bits + group)
    out = decode(methods.kivi(bits, group, R, one_bit), batch)
    np.testing.assert_allclose(out, oracle_outputs(batch, bits, group, one_bit), atol=3e-6)


class WithSinks(kivi.KiviCache):
    """The oracle whose first two tokens never become codes for those who read them."""

    def visible_keys(self) -> np.ndarray:
        return np.concatenate([np.array(self.k[:2], np.float64), super().visible_keys()[2:]])

    def visible_values(self) -> np.ndarray:
        return np.concatenate([np.array(self.v[:2], np.float64), super().visible_values()[2:]])


def test_sinks_stay_exact(monkeypatch):
    batch = random_batch(seed=4)
    without = oracle_outputs(batch, 2, 8)
    monkeypatch.setattr(kivi, "KiviCache", WithSinks)
    expected = oracle_outputs(batch, 2, 8)
    np.testing.assert_allclose(decode(methods.kivi(2, 8, R, sinks=2), batch), expected, atol=3e-6)
    assert np.abs(expected - without).max() > 0.1


def test_kivi_equals_the_paper_in_a_sliding_window():
    batch = random_batch(seed=5)
    out = decode(methods.kivi(2, 8, R), batch, window=11)
    np.testing.assert_allclose(out, oracle_outputs(batch, 2, 8, window=11), atol=3e-6)


def test_kivi_in_bfloat16_is_the_papers_up_to_rounding_in_the_attention():
    batch = random_batch(seed=6, dtype=ml_dtypes.bfloat16)
    np.testing.assert_allclose(decode(methods.kivi(2, 8, R), batch), oracle_outputs(batch, 2, 8), atol=0.02)


def test_the_improved_bit_errs_less_than_the_original():
    batch = random_batch(seed=9)
    exact = oracle_outputs(batch, 1, 8, residual=1000)
    improved, original = (
        np.abs(decode(methods.kivi(1, 8, R, x), batch) - exact).mean() for x in ("improved", "original")
    )
    assert 0 < improved < 0.8 * original


@pytest.mark.parametrize(("bits", "dtype"), [(1, np.float32), (4, np.float16), (8, ml_dtypes.bfloat16)])
def test_the_codecs_hold_what_the_paper_holds_bit_by_bit(bits, dtype):
    batch = random_batch(seed=12, dtype=dtype)
    slots = np.array([0, 1, 5, 8, 11], np.int32)  # the newest token of the shortest sequence included
    slot = np.arange(64)[None]  # whole words, whole blocks
    x = jnp.pad(batch.k, [(0, 0), (0, 0), (0, 64 - batch.k.shape[2]), (0, 0)])
    pos = jnp.asarray(np.where(slot < LENGTHS[:, None], slot, -1), jnp.int32)[:, None]

    def run(codec, new):
        def write(stored, token):
            x, at = token
            return codec.append(stored, x[:, :, None], at), None

        at = jnp.asarray(LENGTHS[None] + np.arange(STEPS)[:, None], jnp.int32)[..., None]
        stored = jax.lax.scan(write, codec.encode(x, pos), (jnp.moveaxis(new, 2, 0), at))[0]
        return codec.decode(stored), codec.gather(stored, jnp.broadcast_to(slots, (B, K, len(slots))))

    both = [Kivi(bits, 4, axis, R) for axis in ("channel", "token")]
    actual = jax.jit(lambda new: [run(codec, new) for codec in both])(batch.tokens(0, STEPS)[1].k)
    assert all(y.dtype == dtype for y in jax.tree.leaves(actual))
    for b, n in enumerate(LENGTHS):
        k = np.asarray(batch.k[b, 0])
        cache = kivi.KiviCache(k[:n], k[:n], bits, 4, R)
        for t in range(STEPS):  # the last step quantizes after it has read
            cache.flush()
            cache.append(k[n + t], k[n + t])
        for (decoded, gathered), expected in zip(actual, (cache.visible_keys(), cache.visible_values()), strict=True):
            np.testing.assert_array_equal(np.asarray(decoded[b, 0, : n + STEPS]).astype(np.float64), expected)
            np.testing.assert_array_equal(np.asarray(gathered[b, 0]).astype(np.float64), expected[slots])
