"""TurboQuant against its oracle: levels, keys, values, bytes, and the exact layers at the ends of a model.

TurboQuant in NumPy, float64, from its paper (arXiv 2504.19874) and vLLM's rules: one vector at a time.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.codecs.plain import Host, Plain
from kvjax.cache.codecs.quantizers import Quantizer
from kvjax.cache.protocol import LayerSpec
from kvjax.core.rope import Rope
from kvjax.errors import KvjaxError
from kvjax.method_api import lloyd_max_levels
from kvjax.methods.turboquant import LloydMax, UniformQuantizer
from kvjax.models import Config
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded
from tests.oracles.token_codes import hadamard


@functools.cache
def oracle_lloyd_max_levels(d: int, bits: int) -> list[float]:
    """The levels for N(0, 1/d) by Lloyd's iterations, each mean over 200 trapezoids of its cell."""
    sigma = d**-0.5
    width = 7 * sigma / 2**bits
    centroids = [-3.5 * sigma + width * (i + 0.5) for i in range(2**bits)]
    for _ in range(200):
        edges = [-10.5 * sigma, *((a + b) / 2 for a, b in zip(centroids, centroids[1:], strict=False)), 10.5 * sigma]
        updated = [cell_mean(a, b, sigma) for a, b in zip(edges, edges[1:], strict=False)]
        if max(abs(a - b) for a, b in zip(updated, centroids, strict=True)) < 1e-10:
            break
        centroids = updated
    return centroids


def cell_mean(a: float, b: float, sigma: float) -> float:
    """The mean of a normal variable between a and b."""
    x = a + (b - a) * np.arange(201) / 200
    p = np.exp(-0.5 * (x / sigma) ** 2)
    return float(np.trapezoid(x * p) / np.trapezoid(p))


def exact_cell_mean(a: float, b: float) -> float:
    """The same mean for N(0, 1), by the error function."""
    probabilities = [math.erf(t / math.sqrt(2)) / 2 for t in (a, b)]
    densities = [math.exp(-t * t / 2) / math.sqrt(2 * math.pi) for t in (a, b)]
    return (densities[0] - densities[1]) / (probabilities[1] - probabilities[0])


def fake_quantize_key(k: np.ndarray, bits: int, correct: bool = True) -> tuple[list[int], np.ndarray]:
    """Quantizes a key [d] -> (its codes, the decoded key)."""
    d, length = len(k), math.sqrt((k**2).sum())
    rotation, levels = hadamard(d), oracle_lloyd_max_levels(d, bits)
    direction = rotation @ k / length if length else np.zeros(d)
    middles = [(a + b) / 2 for a, b in zip(levels, levels[1:], strict=False)]
    codes = [sum(y >= m for m in middles) for y in direction]
    quantized = np.array([levels[c] for c in codes])
    if correct:
        quantized = quantized / math.sqrt((quantized**2).sum() + 1e-16)
    return codes, float(np.float16(length)) * (rotation @ quantized)


def fake_quantize_value(v: np.ndarray, bits: int) -> np.ndarray:
    """Quantizes and dequantizes a value [d]; its step and minimum are float16."""
    top = 2**bits - 1
    step = max((v.max() - v.min()) / top, 1e-8)
    codes = np.clip(((v - v.min()) / step + 0.5).astype(int), 0, top)
    return codes * float(np.float16(step)) + float(np.float16(v.min()))


@pytest.mark.parametrize(
    ("head_dim", "bits", "upper"),
    [(4, 2, [0.22629, 0.75478]), (128, 3, [0.02165, 0.06679, 0.11872, 0.19007])],
)
def test_the_levels_are_the_published_ones(head_dim, bits, upper):
    np.testing.assert_allclose(lloyd_max_levels(head_dim, bits), [-x for x in reversed(upper)] + upper, atol=6e-6)
    np.testing.assert_allclose(lloyd_max_levels(head_dim, bits), oracle_lloyd_max_levels(head_dim, bits), atol=1e-7)


@pytest.mark.parametrize("bits", [1, 3, 4])
def test_each_level_is_the_mean_of_a_normal_number_in_its_cell(bits):
    level = lloyd_max_levels(64, bits).astype(float) * 8
    edges = [-np.inf, *(level[1:] + level[:-1]) / 2, np.inf]
    expected = [exact_cell_mean(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    np.testing.assert_allclose(level, expected, rtol=2e-3)
    np.testing.assert_allclose(level, -level[::-1], atol=1e-6)


def test_the_example_by_hand():
    """A key of length root 12 in 2 bits: the logit of (1, 0, 0, 0) is near its exact 1.5, and is not uncorrected."""
    k, q = np.array([3.0, 1, 1, 1]), np.array([1.0, 0, 0, 0])
    codes, decoded = fake_quantize_key(k, 2)
    assert codes == [3, 2, 2, 2]
    np.testing.assert_allclose(q @ decoded / 2, 1.45985, rtol=1e-3)
    np.testing.assert_allclose(q @ fake_quantize_key(k, 2, correct=False)[1] / 2, 1.24157, rtol=1e-3)


def round_trip(quantizer: Quantizer, x: np.ndarray) -> np.ndarray:
    run = jax.jit(lambda x: quantizer.decode(quantizer.encode(x)))
    return np.asarray(run(jnp.asarray(x, jnp.float32)))


@pytest.mark.parametrize("bits", [3, 4])
def test_keys_and_values_are_their_oracles(bits):
    x = np.random.default_rng(bits).normal(size=(20, 32)) * 5
    actual = round_trip(LloydMax(bits), x @ hadamard(32)) @ hadamard(32)
    np.testing.assert_allclose(actual, [fake_quantize_key(vector, bits)[1] for vector in x], atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(actual, axis=1), np.linalg.norm(x, axis=1), rtol=1e-3)
    np.testing.assert_allclose(
        round_trip(UniformQuantizer(bits), x), [fake_quantize_value(vector, bits) for vector in x], atol=1e-5
    )


@pytest.mark.parametrize(
    ("k_bits", "v_bits", "correct", "v_levels"),
    [(4, 4, True, "uniform"), (3, 4, False, "uniform"), (4, 3, True, "normal")],
)
def test_a_batch_is_its_oracle_and_padding_may_hold_infinity(k_bits, v_bits, correct, v_levels):
    batch, method = layer.random_batch(), kvjax.methods.turboquant(k_bits, v_bits, correct, v_levels=v_levels)
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))

    def keys(x: np.ndarray, prompt: int) -> np.ndarray:
        return np.stack([fake_quantize_key(vector, k_bits, correct)[1] for vector in x])

    def values(x: np.ndarray, prompt: int) -> np.ndarray:
        if v_levels == "normal":
            return np.stack([fake_quantize_key(vector, v_bits, correct)[1] for vector in x])
        return np.stack([fake_quantize_value(vector, v_bits) for vector in x])

    np.testing.assert_allclose(out, attend_decoded(batch, keys, values), atol=2e-5)


@pytest.mark.parametrize("quantizer", [LloydMax(3), LloydMax(4, False), UniformQuantizer(3)])
def test_rows_of_zeros_of_one_number_and_of_huge_ones_stay_finite(quantizer):
    read = round_trip(quantizer, np.array([[0.0], [2.5], [1e6], [-1e6]]) * np.ones((4, 32)))
    assert np.isfinite(read).all() and not read[0].any()
    if isinstance(quantizer, UniformQuantizer):
        np.testing.assert_array_equal(read[1:, 0], [2.5, 65504, -65504])  # the largest that float16 has


@pytest.mark.parametrize(
    ("layers", "num_exact_layers", "exact"),
    [(8, 2, [0, 1, 6, 7]), (5, 2, [0, 1, 3, 4]), (4, 2, [0, 1, 2, 3]), (3, 0, []), (1, 2, [])],
)
def test_so_many_layers_at_each_end_are_exact(layers, num_exact_layers, exact):
    for text in ("turboquant", "turboquant + offload"):
        method = kvjax.parse(text.replace("turboquant", f"turboquant:ends={num_exact_layers}"))
        bound = [method.bind(LayerSpec(i, layers, 2, 2, 32, Rope(32))) for i in range(layers)]
        plain = Plain() if text == "turboquant" else Host(Plain())
        assert [i for i in range(layers) if bound[i].k == plain] == exact
        assert [i for i in range(layers) if bound[i].v == plain] == exact


def test_the_ends_of_a_model_take_the_bytes_of_the_full_cache():
    config = Config.llama(2, 64, layers=6, heads=4, kv_heads=2, head_dim=32, mlp_width=8)

    def device_bytes(method: str) -> int:
        return kvjax.planned_bytes(method, config, 16, dtype="bfloat16").held["device"] - 4  # the cache's own length

    full, coded, both = (device_bytes(m) for m in ("full", "turboquant:ends=0", "turboquant:ends=2"))
    assert coded < full / 3 and 3 * both == 2 * full + coded


def test_what_has_no_meaning_is_refused():
    for method, H, says in (
        (kvjax.methods.turboquant(3), 16, "32 at a time.*more bits"),
        (kvjax.methods.turboquant(), 24, "rotate"),
    ):
        with pytest.raises(KvjaxError, match=says):
            layer.bind(method).k.encode(jnp.ones((1, 1, 2, H)), jnp.zeros((1, 1, 2), jnp.int32))
