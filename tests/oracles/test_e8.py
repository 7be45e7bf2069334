"""E8 and D4 against the package kakeyalattice, and against the nearest of all lattice points around a block."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.errors import KvjaxError
from kvjax.methods.e8 import D4Lattice, E8Lattice, nearest_point
from tests import fixtures
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded
from tests.oracles.test_kvarn import sylvester

PACKAGE = dict(np.load(Path(fixtures.__file__).with_name("e8.npz")))
CORNERS = np.array(list(itertools.product((0, 1), repeat=8)))


def nearest_by_trial(y: np.ndarray) -> tuple[np.ndarray, float]:
    """The nearest of the points of E8 whose coordinates are next to those of y [8], and its squared distance."""
    whole = np.concatenate([np.floor(y) + CORNERS, np.floor(y - 0.5) + CORNERS])
    points = whole + np.repeat([0.0, 0.5], len(CORNERS))[:, None]
    distances = np.where(whole.sum(1) % 2 == 0, np.square(y - points).sum(1), np.inf)
    return points[distances.argmin()], distances.min()


def test_points_are_those_of_the_package_and_the_nearest():
    """Between points at one distance the package and this library may choose otherwise."""
    blocks, points = PACKAGE["blocks"], PACKAGE["points"]
    whole, half = jax.jit(nearest_point)(jnp.asarray(blocks))
    found = np.asarray(whole) + np.asarray(half) * 0.5
    assert (np.asarray(whole).sum(1) % 2 == 0).all()
    distances = (np.square(blocks - x).sum(1) for x in (found, points))
    np.testing.assert_allclose(*distances, atol=1e-5)
    assert (found == points).all(1).mean() > 0.85 and (found[:200] == points[:200]).all()
    for block, point in zip(blocks[:20], found[:20], strict=True):
        np.testing.assert_array_equal(point, nearest_by_trial(block.astype(np.float64))[0])


def nearest_d4_by_trial(y: np.ndarray) -> tuple[np.ndarray, float]:
    """The nearest whole numbers with an even sum that are next to those of y [4], and their squared distance."""
    points = np.floor(y) + CORNERS[::16, :4]
    distances = np.where(points.sum(1) % 2 == 0, np.square(y - points).sum(1), np.inf)
    return points[distances.argmin()], distances.min()


def round_trip(bits: int, x: np.ndarray, lattice: type = E8Lattice) -> np.ndarray:
    quantizer = lattice(bits)
    return np.asarray(jax.jit(lambda x: quantizer.decode(quantizer.encode(x)))(jnp.asarray(x, jnp.float32)))


@pytest.mark.parametrize("bits", [3, 4])
def test_vectors_are_those_of_the_package(bits):
    """But for scales, which are rounded once here, and for vectors of which it clips a point."""
    vectors, rotation, restored = PACKAGE["vectors"], sylvester(32), PACKAGE[f"restored_{bits}"]
    found = round_trip(bits, vectors @ rotation) @ rotation
    size = np.abs(vectors @ rotation).max(1, keepdims=True)
    points = np.round(restored @ rotation / size * (2 ** (bits - 1) - 1) * 2).reshape(24, 4, 8)  # in halves
    is_point = (points % 2 == points[..., :1] % 2).all(-1) & (points.sum(-1) % 4 == 0)
    is_whole = is_point.all(1)
    assert is_whole.sum() >= 15
    np.testing.assert_allclose(found[is_whole] / size[is_whole], restored[is_whole] / size[is_whole], atol=2e-3)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_restore_the_nearest_points(bits):
    """Ties, vectors of zeros and of one number are among them, and no point leaves the range."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal((60, 32)), rng.integers(-3, 4, (60, 32)), np.zeros((1, 32))])
    x = np.concatenate([x, np.full((1, 32), -2.5), 1e4 * np.eye(32)])
    top = 2 ** (bits - 1) - 1
    scale = np.float16(np.minimum(np.maximum(np.abs(x).max(1, keepdims=True) / top, 1e-6), 65504))
    y = np.clip(x / scale.astype(np.float64), -top, top)
    found = round_trip(bits, x) / scale
    blocks, points = y.reshape(-1, 8), found.reshape(-1, 8)
    halves = points % 1
    assert np.isin(halves, (0.0, 0.5)).all() and (halves == halves[:, :1]).all()
    assert (np.floor(points).sum(1) % 2 == 0).all()
    for block, point in zip(blocks[::7], points[::7], strict=True):
        np.testing.assert_allclose(np.square(block - point).sum(), nearest_by_trial(block)[1], atol=1e-3)


@pytest.mark.parametrize(("bits", "top"), [(3, 4), (4, 9)])
def test_vectors_in_d4_are_those_of_the_package(bits, top):
    """But for blocks of which two points are nearest."""
    vectors, rotation = PACKAGE["vectors"], sylvester(32)
    size = np.abs(vectors @ rotation).max(1, keepdims=True)
    found = round_trip(bits, vectors @ rotation, D4Lattice) / size * top
    theirs = PACKAGE[f"d4_restored_{bits}"] @ rotation / size * top
    assert (np.abs(found - theirs) < 0.02).mean() > 0.98


@pytest.mark.parametrize(("bits", "top"), [(2, 1), (3, 4), (4, 9), (8, 151)])
def test_codes_restore_the_nearest_points_of_d4(bits, top):
    """Ties, zeros and the corners of the range are among them."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal((60, 32)), rng.integers(-3, 4, (60, 32)), np.zeros((1, 32))])
    x = np.concatenate([x, np.full((1, 32), -2.5), 1e4 * np.eye(32), rng.choice([-1.0, 1.0], (9, 32))])
    scale = np.float16(np.maximum(np.abs(x).max(1, keepdims=True) / top, 1e-6))
    y = np.clip(x / scale.astype(np.float64), -top, top)
    found = round_trip(bits, x, D4Lattice) / scale
    blocks, points = y.reshape(-1, 4), found.reshape(-1, 4)
    np.testing.assert_allclose(points, np.round(points), atol=2e-4)
    assert (np.round(points).sum(1) % 2 == 0).all() and np.abs(points).max() <= top * 1.001
    for block, point in zip(blocks[::7], points[::7], strict=True):
        np.testing.assert_allclose(np.square(block - point).sum(), nearest_d4_by_trial(block)[1], atol=1e-3)


def test_d4_loses_less_than_e8_in_three_and_four_bits_and_more_in_two_and_eight():
    x = np.random.default_rng(0).standard_normal((500, 128))
    losses = [[np.square(round_trip(bits, x, q) - x).mean() for q in (D4Lattice, E8Lattice)] for bits in (2, 3, 4, 8)]
    np.testing.assert_allclose([d4 / e8 for d4, e8 in losses], [1.30, 0.85, 0.91, 1.07], atol=0.01)


@pytest.mark.parametrize("quantizer", [E8Lattice(3), D4Lattice(3)])
def test_an_array_of_no_vectors_is_encoded_and_decoded(quantizer):
    coded = quantizer.encode(jnp.zeros((2, 1, 0, 32)))
    assert coded.codes.shape[:3] == coded.scale.shape[:3] == quantizer.decode(coded).shape[:3] == (2, 1, 0)


def test_heads_that_are_no_whole_blocks_are_refused():
    with pytest.raises(KvjaxError, match="blocks of 4 channels, and heads have 6; use `int4`"):
        D4Lattice(8).check(6)
    with pytest.raises(KvjaxError, match="blocks of 8 channels, and heads have 12; use `int4`"):
        E8Lattice(8).check(12)


@pytest.mark.parametrize(
    ("lattice", "width", "nearest", "tops"),
    [("e8", 8, nearest_by_trial, (7, 3)), ("d4", 4, nearest_d4_by_trial, (9, 4))],
)
def test_a_batch_is_its_oracle_and_padding_may_hold_infinity(lattice, width, nearest, tops):
    batch, method = layer.random_batch(), kvjax.methods.e8(4, 3, sinks=1, lattice=lattice)
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))

    def reconstruct(top: int):
        def restore(x: np.ndarray, prompt: int) -> np.ndarray:
            rotated = x @ sylvester(layer.H)
            scale = np.float64(np.float16(np.abs(rotated).max(1, keepdims=True) / top))
            blocks = np.clip(rotated / scale, -top, top).reshape(-1, width)
            points = np.stack([nearest(block)[0] for block in blocks]).reshape(x.shape)
            return np.concatenate([x[:1], (points * scale @ sylvester(layer.H))[1:]])

        return restore

    expected = attend_decoded(batch, reconstruct(tops[0]), reconstruct(tops[1]))
    np.testing.assert_allclose(out, expected, atol=1e-4)
