"""RotateKV against its oracle: codes, rotation over heads, the order of channels, and the exact first tokens.

RotateKV in NumPy, float64, from its authors' code (arXiv 2501.16383): one sequence, one token at a time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kvjax
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.bases import Bases
from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.errors import KvjaxError
from kvjax.methods.rotatekv import CrossHeadRotation, ZeroPointQuantizer
from kvjax.testing import dense_attention
from tests.contract import layer
from tests.oracles.online import rope
from tests.oracles.token_codes import hadamard


def quantize(x: np.ndarray, bits: int, clip: float) -> tuple[list[int], int, float]:
    """Quantizes a group [g] -> (its codes, the zero point, the step, which is stored in bfloat16)."""
    top, least, most = 2**bits - 1, x.min() * clip, x.max() * clip
    scale = max((most - least) / top, max(abs(least), abs(most)) / 2**14, 1e-30)
    scale = float(ml_dtypes.bfloat16(scale))
    zero = round(-least / scale)
    return [min(max(round(y / scale) + zero, 0), top) for y in x.tolist()], zero, scale


def dequantize(codes: list[int], zero: int, scale: float) -> np.ndarray:
    """Decodes a group of numbers."""
    return (np.array(codes, np.float64) - zero) * scale


def fake_quantize_value(v: np.ndarray, bits: int, clip: float) -> np.ndarray:
    """Quantizes and dequantizes a value [H]."""
    rotation = hadamard(len(v))
    return rotation @ dequantize(*quantize(rotation @ v, bits, clip))


def channel_order(mean: np.ndarray, heads: int) -> np.ndarray:
    """The order of a layer's rotated channels, by any multiple of the mean key before RoPE [K H]."""
    return np.argsort(rotate_heads(mean, heads), kind="stable")


def rotate_heads(k: np.ndarray, heads: int) -> np.ndarray:
    """Rotates the channels [K*H] of a key before RoPE [K H] within each group of heads."""
    groups = k.reshape(-1, heads * k.shape[1])
    return (groups @ hadamard(groups.shape[1])).ravel()


def fake_quantize_key(k: np.ndarray, order: np.ndarray, heads: int, bits: int, clip: float) -> np.ndarray:
    """Quantizes and dequantizes a key before RoPE [K H], in groups of H ordered channels."""
    K, H = k.shape
    ordered = rotate_heads(k, heads)[order].reshape(K, H)
    channels = np.empty(K * H)
    channels[order] = np.concatenate([dequantize(*quantize(group, bits, clip)) for group in ordered])
    groups = channels.reshape(-1, heads * H)
    return (groups @ hadamard(heads * H)).reshape(K, H)


def test_the_codes_by_hand():
    """Steps are 0.2, in bfloat16 205 / 1024, and the zero point is 5; it may lie outside the codes for one sign."""
    assert quantize(np.array([-1.0, 0, 0.5, 2]), 4, 1) == ([0, 5, 7, 15], 5, 205 / 1024)
    assert quantize(np.array([4.0, 5, 6, 7]), 2, 1) == ([0, 1, 2, 3], -4, 1.0)
    assert quantize(np.array([-5.0, 1, 2, 5]), 2, 0.6)[:2] == ([0, 2, 3, 3], 2)  # 1.5 rounds to 2, 0.5 to 0


def round_trip(quantizer: ZeroPointQuantizer, x: np.ndarray) -> np.ndarray:
    run = jax.jit(lambda x: quantizer.decode(quantizer.encode(x)))
    return np.asarray(run(jnp.asarray(x, jnp.float32)))


@pytest.mark.parametrize(("bits", "clip"), [(2, 0.8), (3, 1.0)])
def test_rows_of_any_sign_and_size_are_their_oracles(bits, clip):
    x = np.random.default_rng(bits).normal(size=(12, 32)) + np.array([0, 5, -40, 0.5])[np.arange(12) % 4, None]
    x[8:] *= np.array([[1e4], [1e-20], [0], [1]])
    actual = round_trip(ZeroPointQuantizer(bits, clip), x)
    np.testing.assert_allclose(actual, [dequantize(*quantize(vector, bits, clip)) for vector in x], rtol=1e-5)
    alike = round_trip(ZeroPointQuantizer(bits), np.full((1, 32), -3.0))
    np.testing.assert_allclose(alike, -3.0, rtol=1e-4)


def test_a_batch_is_its_oracle_and_padding_may_hold_infinity():
    batch, method = layer.random_batch(), kvjax.parse("rotatekv:heads=2,sinks=2")
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))
    for b, n in enumerate(map(int, batch.lengths)):
        at = np.arange(n + layer.STEPS)
        k, v = (np.asarray(x[b, :, at], np.float64).swapaxes(0, 1) for x in (batch.k, batch.v))
        bare = rope(k, -at)
        order = channel_order(bare[:, :n].sum(1), 2)
        keys = np.stack([fake_quantize_key(bare[:, t], order, 2, 2, 0.8) for t in at], 1)
        values = np.array([[fake_quantize_value(vector, 2, 0.8) for vector in head] for head in v])
        keys[:, :2], values[:, :2] = bare[:, :2], v[:, :2]
        q = np.asarray(batch.q[b])[:, :, n:][:, :, : layer.STEPS].reshape(-1, layer.STEPS, layer.H)
        expected = dense_attention(q, rope(keys, at), values, at[n:])
        np.testing.assert_allclose(out[b], expected.reshape(out[b].shape), atol=2e-5)


def test_channels_may_stand_in_the_order_of_a_table(tmp_path):
    spec, rng = layer.spec(), np.random.default_rng(0)
    mean = rng.normal(size=(layer.K, layer.H)).astype(np.float32)
    path = table_file.write(tmp_path / "means", "bases", spec, [{"bare_keys_mean": mean}])
    codec = CrossHeadRotation(PerTokenCodec(ZeroPointQuantizer(8)), 2, Bases.table_file(str(path))).at(spec)
    x, pos = jnp.asarray(rng.normal(size=(3, 2, 4, 32)), jnp.float32), jnp.zeros((3, 1, 4), jnp.int32)
    idx = jnp.asarray([[[0, 3], [2, 1]]] * 3, jnp.int32)

    def run(x):
        stored = codec.encode(x, pos)
        return stored.order, codec.decode(stored), codec.gather(stored, idx)

    order, decoded, gathered = jax.jit(run)(x)
    np.testing.assert_array_equal(order[0].ravel(), channel_order(mean.astype(float), 2))
    np.testing.assert_allclose(decoded, x, atol=0.03)
    np.testing.assert_array_equal(gathered, np.take_along_axis(np.asarray(decoded), np.asarray(idx)[..., None], 2))


def test_a_size_without_hadamards_matrix_is_refused():
    with pytest.raises(KvjaxError, match="powers of two, and 48 channels, of 2 heads"):
        kvjax.parse("rotatekv:heads=2").bind(dataclasses.replace(layer.spec(), head_dim=24))
