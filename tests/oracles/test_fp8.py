"""FP8 codes against the list of all numbers of their formats.

FP8 in NumPy, float64 (arXiv 2209.05433; scales as in vLLM): numbers are rounded by a list of a format's numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.codecs.quantizers import Fp8
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded


def representable_numbers(exponent_bits: int, mantissa_bits: int, largest: float) -> np.ndarray:
    """The non-negative numbers of a format with these bits, ascending up to `largest`; code i has number i."""
    bias = 2 ** (exponent_bits - 1) - 1
    subnormal = [m / 2**mantissa_bits * 2.0 ** (1 - bias) for m in range(2**mantissa_bits)]
    normal = [
        (1 + m / 2**mantissa_bits) * 2.0 ** (e - bias)
        for e in range(1, 2**exponent_bits)
        for m in range(2**mantissa_bits)
    ]
    return np.array([x for x in subnormal + normal if x <= largest])


FORMATS = {"e4m3": representable_numbers(4, 3, 448.0), "e5m2": representable_numbers(5, 2, 57344.0)}


def round_to_format(x: float, format_name: str) -> float:
    """The format's number nearest to x; a tie goes to the even code."""
    numbers = FORMATS[format_name]
    distances = np.abs(numbers - abs(x))
    best = min(np.flatnonzero(distances == distances.min()), key=lambda i: i % 2)
    return float(np.copysign(numbers[best], x))


def fake_quantize(x: np.ndarray, format_name: str = "e4m3") -> np.ndarray:
    """Rounds a vector [H] to the format, scaled so that its largest number is the format's largest."""
    scale = max(np.abs(x).max() / FORMATS[format_name][-1], 1e-6)
    return np.array([round_to_format(y / scale, format_name) for y in x]) * scale


def round_trip(quantizer: Fp8, x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda x: quantizer.decode(quantizer.encode(x)))(jnp.asarray(x, jnp.float32)))


def test_the_example_by_hand():
    """7 becomes 448, so the scale is 1/64: 0.1 is 6.4 there, and the format counts in halves between 4 and 8."""
    x = np.array([-7.0, 0.1, 0.0, 3.5])
    np.testing.assert_array_equal(round_trip(Fp8(), x), [-7.0, 6.5 / 64, 0.0, 3.5])
    np.testing.assert_array_equal(fake_quantize(x), [-7.0, 6.5 / 64, 0.0, 3.5])
    np.testing.assert_array_equal(
        round_trip(Fp8(scaled=False), np.array([3.3, 1e6, -1e6, 1.0])), [3.25, 448, -448, 1.0]
    )


def test_the_oracles_formats_have_as_many_numbers_as_their_codes_allow():
    assert len(FORMATS["e4m3"]) == 127 and FORMATS["e4m3"][1] == 2.0**-9
    assert len(FORMATS["e5m2"]) == 124 and FORMATS["e5m2"][1] == 2.0**-16


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_each_number_takes_the_nearest_of_its_format_ties_the_even_code(kind):
    listed = FORMATS[kind]
    ties = (listed[1:] + listed[:-1]) / 2
    x = np.concatenate([listed, -listed, ties, np.nextafter(ties.astype(np.float32), np.float32(0))]).astype(np.float32)
    np.testing.assert_array_equal(round_trip(Fp8(kind, scaled=False), x), [round_to_format(y, kind) for y in x])


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_a_batch_is_its_oracle_and_padding_may_hold_infinity(kind):
    batch, method = layer.random_batch(), kvjax.methods.fp8(kind)
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))

    def reconstruct(x: np.ndarray, prompt: int) -> np.ndarray:
        return np.stack([fake_quantize(vector, kind) for vector in x])

    np.testing.assert_allclose(out, attend_decoded(batch, reconstruct, reconstruct), atol=1e-5)


@pytest.mark.parametrize("number", [0.0, 2.5, -1e30])
def test_rows_of_one_number_come_back(number):
    np.testing.assert_allclose(round_trip(Fp8(), np.full(8, number)), np.full(8, number), rtol=1e-6)
