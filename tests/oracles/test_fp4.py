"""MXFP4 and NVFP4 against lists of the numbers of their formats, in NumPy and float64.

The formats: OCP Microscaling Formats 1.0; roundings as in SGLang's and vLLM's public code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.codecs.quantizers import Fp4
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded
from tests.oracles.test_fp8 import round_to_format
from tests.oracles.test_ggml import rotate

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def round_to_e2m1(x: float, ties: str) -> float:
    distances = [abs(abs(x) - n) for n in NUMBERS]
    nearest = [i for i, d in enumerate(distances) if d == min(distances)]
    best = max(nearest) if ties == "away" else min(nearest, key=lambda i: i % 2)
    return float(np.copysign(NUMBERS[best], x))


def fake_quantize(x: np.ndarray, block: int, scale: str, unit: float = 1.0) -> np.ndarray:
    """Quantizes a vector [H] and restores it."""
    restored = []
    for numbers in x.reshape(-1, block):
        largest = np.abs(numbers).max() / 6
        if scale == "e8m0":
            step = 2.0 ** np.ceil(np.log2(largest)) if largest else 0.0
        else:
            step = round_to_format(largest / unit, "e4m3") * unit
        ties = "away" if scale == "e8m0" else "even"
        restored += [round_to_e2m1(y / step, ties) * step if step else 0.0 for y in numbers]
    return np.array(restored)


def round_trip(quantizer: Fp4, x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda x: quantizer.decode(quantizer.encode(x)))(jnp.asarray(x, jnp.float32)))


def test_the_examples_by_hand():
    """7 needs a power of two of 2, where 6 are 12; as a fraction of 6 it is 1.125 in e4m3, where 7 is 6.22 steps."""
    x = np.array([7.0, -2.5, 0.5, 0.1] * 4)
    assert round_trip(Fp4(16), x)[:4].tolist() == [8.0, -3.0, 1.0, 0.0]  # 2.5 / 2 and 0.5 / 2 are ties
    assert round_trip(Fp4(16, "e4m3", "even"), x)[:4].tolist() == [6.75, -2.25, 0.5625, 0.0]


@pytest.mark.parametrize("ties", ["away", "even"])
def test_each_number_takes_the_nearest_and_ties_go_as_asked(ties):
    middles = (np.array(NUMBERS[1:]) + NUMBERS[:-1]) / 2
    below = np.nextafter(middles.astype(np.float32), np.float32(0))
    x = np.concatenate([NUMBERS, middles, below, -middles, -below, [-6.0] * 5])[:40]
    found = round_trip(Fp4(40, ties=ties), x)
    assert found.tolist() == [round_to_e2m1(y, ties) for y in x]


@pytest.mark.parametrize(
    ("quantizer", "arguments"),
    [
        (Fp4(), (32, "e8m0")),
        (Fp4(16, "e4m3", "even"), (16, "e4m3")),
        (Fp4(16, "e4m3", "even", 0.01), (16, "e4m3", 0.01)),
    ],
    ids=str,
)
def test_vectors_are_the_oracles(quantizer, arguments):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((60, 64)) * 10.0 ** rng.integers(-2, 3, (60, 1))).astype(np.float32)
    x[-1] = 0
    found, expected = round_trip(quantizer, x), np.stack([fake_quantize(row, *arguments) for row in x])
    # A quotient that rounds in float32 to a tie may take the other code.
    close = np.isclose(found, expected, rtol=1e-5)
    assert close.mean() > 0.999 and np.isfinite(found).all()


def test_numbers_beyond_the_format_take_its_largest():
    assert np.abs(round_trip(Fp4(16, "e4m3", "even"), np.full(16, 1e30))).max() == 2688
    assert round_trip(Fp4(16), np.full(16, 1e30)).max() == pytest.approx(1e30, rel=0.25)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (kvjax.methods.mxfp4(), (32, "e8m0")),
        (kvjax.methods.nvfp4(), (16, "e4m3")),
    ],
    ids=["mxfp4", "nvfp4"],
)
def test_a_batch_is_its_oracle_and_padding_may_hold_infinity(method, arguments):
    batch = layer.random_batch()
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))

    def reconstruct(x: np.ndarray, prompt: int) -> np.ndarray:
        return np.stack([fake_quantize(vector.astype(np.float32), *arguments) for vector in x])

    np.testing.assert_allclose(out, attend_decoded(batch, reconstruct, reconstruct), atol=1e-4)


@pytest.mark.parametrize(("name", "block"), [("mxfp4", 32), ("nvfp4", 16)])
def test_blocks_are_rotated_by_themselves(name, block):
    x = np.random.default_rng(0).standard_normal((30, 64)).astype(np.float32)
    codec = kvjax.parse(f"{name}:rotate=true").k
    assert codec is not None
    pos = jnp.arange(30)[None, None]
    found = np.asarray(jax.jit(lambda x: codec.decode(codec.encode(x, pos)))(x[None, None]))[0, 0]
    rotated = rotate(x, block).astype(np.float32)
    expected = rotate(
        np.stack([fake_quantize(v, block, "e8m0" if name == "mxfp4" else "e4m3") for v in rotated]), block
    )
    # The rotation's sums round differently, so that a number at a tie may take the other code.
    assert np.quantile(np.abs(found - expected), 0.95) < 1e-5 and np.abs(expected - x).mean() > 0.01
