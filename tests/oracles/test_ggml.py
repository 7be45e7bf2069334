"""The cache types of llama.cpp against the quantizers of the package gguf, which are GGML's reference code in NumPy.

That package restores iq4_nl and does not quantize it: the quantizer of `ggml-quants.c` is written here.
"""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.errors import KvjaxError
from kvjax.methods.ggml import GgmlBlock, RotatedAsInLlamaCpp
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded

TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
LEVELS = gguf.quants.IQ4_NL.kvalues


def quantize_nonlinear(block: np.ndarray) -> np.ndarray:
    """Quantizes 32 numbers to iq4_nl and restores them, as `quantize_row_iq4_nl_impl` without a search for scales."""
    block = block.astype(np.float32)
    largest = block[np.abs(block).argmax()]
    if largest == 0:
        return np.zeros(32)
    inverse = np.float32(1) / (largest / np.float32(LEVELS[0]))
    products, squares, chosen = 0.0, 0.0, []
    for x in block:
        y = x * inverse
        best = min(range(16), key=lambda i: (abs(y - LEVELS[i]), -i))
        chosen.append(LEVELS[best])
        products += float(x) ** 3 * LEVELS[best]
        squares += float(x) ** 2 * LEVELS[best] ** 2
    return np.float64(np.float16(products / squares)) * np.array(chosen)


def fake_quantize(x: np.ndarray, name: str) -> np.ndarray:
    """Quantizes rows [n H] and restores them."""
    if name == "iq4_nl":
        return np.stack([quantize_nonlinear(block) for block in x.reshape(-1, 32)]).reshape(x.shape)
    kind = gguf.GGMLQuantizationType[name.upper()]
    return gguf.quants.dequantize(gguf.quants.quantize(x.astype(np.float32), kind), kind)


def round_trip(name: str, x: np.ndarray) -> np.ndarray:
    quantizer = GgmlBlock(name)
    return np.asarray(jax.jit(lambda x: quantizer.decode(quantizer.encode(x)))(jnp.asarray(x, jnp.float32)))


def rows() -> np.ndarray:
    """Random numbers of several sizes, ties, rows of zeros and of one number."""
    rng = np.random.default_rng(0)
    random = rng.standard_normal((300, 64)) * 10.0 ** rng.integers(-3, 4, (300, 1))
    return np.concatenate([random, rng.integers(-8, 9, (100, 64)), np.zeros((1, 64)), np.full((1, 64), -2.5)])


@pytest.mark.parametrize("name", TYPES)
def test_numbers_are_those_of_ggmls_reference_code(name):
    found, expected = round_trip(name, rows()), fake_quantize(rows(), name)
    if name == "iq4_nl":  # its scale is a quotient of sums, whose order may move the last bit of a float16
        np.testing.assert_allclose(found, expected, rtol=1.1e-3)
        assert np.mean(found == expected) > 0.95
    else:
        np.testing.assert_array_equal(found, expected)


def test_the_example_by_hand():
    """The largest number is -8 units of 0.5: 0.75 is 1.5 units, which is rounded up, and 4 would need the code 16."""
    x = np.zeros((1, 32))
    x[0, :4] = [-4.0, 0.75, 4.0, -0.2]
    assert round_trip("q4_0", x)[0, :5].tolist() == [-4.0, 1.0, 3.5, 0.0, 0.0]


def rotate(x: np.ndarray, width: int) -> np.ndarray:
    """Multiplies blocks of `width` channels of x [n H] by Hadamard's matrix: its sign is -1 to the bits of i & j."""
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(width)] for i in range(width)]) / np.sqrt(width)
    return (x.reshape(len(x), -1, width) @ signs).reshape(x.shape)


@pytest.mark.parametrize(("H", "k_width", "v_width"), [(64, 64, 64), (128, 128, 64), (192, 64, 64), (96, 0, 0)])
def test_heads_are_rotated_as_in_llama_cpp(H, k_width, v_width):
    x = np.random.default_rng(1).standard_normal((40, H)).astype(np.float32)
    for width, largest in ((k_width, True), (v_width, False)):
        codec = RotatedAsInLlamaCpp(GgmlBlock("q4_0"), "hadamard", largest=largest)
        pos = jnp.arange(40)[None, None]
        found = jax.jit(lambda x, codec=codec, pos=pos: codec.decode(codec.encode(x, pos)))(x[None, None])[0, 0]
        expected = rotate(fake_quantize(rotate(x, width), "q4_0"), width) if width else fake_quantize(x, "q4_0")
        # The rotation's sums round differently, so that a number at a tie may take the other code.
        difference = np.abs(np.asarray(found) - expected)
        assert np.quantile(difference, 0.9) < 1e-5 and difference.max() < 0.5
        assert np.abs(expected - x).mean() > 0.01


@pytest.mark.parametrize(("H", "width"), [(128, 128), (96, 0)])
def test_keys_in_pairs_are_interleaved_before_they_are_rotated(H, width):
    x = np.random.default_rng(1).standard_normal((40, H)).astype(np.float32)
    order = np.arange(H).reshape(2, -1).T.ravel()  # 0, H/2, 1, H/2 + 1, ..
    codec = kvjax.methods.ggml("q4_0", pairs=True).k
    pos = jnp.arange(40)[None, None]
    found = jax.jit(lambda x: codec.decode(codec.encode(x, pos)))(x[None, None])[0, 0]
    interleaved, expected = x[:, order].astype(np.float64), np.zeros(x.shape)
    turned = (
        rotate(fake_quantize(rotate(interleaved, width), "q4_0"), width)
        if width
        else fake_quantize(interleaved, "q4_0")
    )
    expected[:, order] = turned
    difference = np.abs(np.asarray(found) - expected)
    assert np.quantile(difference, 0.9) < 1e-5 and difference.max() < 0.5


def test_heads_that_are_not_rotated_whole_have_no_pairs():
    codec = kvjax.methods.ggml(pairs=True).k
    with pytest.raises(KvjaxError, match="of 192 channels 64 are rotated together; use rotate=false or pairs=false"):
        codec.count_rotated_channels(192)


@pytest.mark.parametrize(("k", "v"), [("q5_1", "iq4_nl"), ("q8_0", "q4_0"), ("f16", "q5_0")])
def test_a_batch_is_its_oracle_and_padding_may_hold_infinity(k, v):
    batch, method = layer.random_batch(), kvjax.methods.ggml(k, v)
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))

    def reconstruct(name: str):
        return lambda x, prompt: x if name == "f16" else fake_quantize(x, name)

    np.testing.assert_allclose(out, attend_decoded(batch, reconstruct(k), reconstruct(v)), atol=1e-4)
