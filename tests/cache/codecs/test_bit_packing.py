"""The group quantizer equals KIVI's to the last bit, in every dtype, jitted or not; words hold the codes in order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.cache.codecs.bit_packing import dequantize, pack, quantize, unpack
from tests.oracles import kivi

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
QUANTIZERS = [(1, "improved"), (1, "original"), (2, "improved"), (4, "improved"), (8, "improved")]
G = 32  # values of a group

each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
each_quantizer = pytest.mark.parametrize(("bits", "one_bit"), QUANTIZERS, ids=[f"{b}-{o}" for b, o in QUANTIZERS])


@functools.cache
def compile_quantizer(bits: int, one_bit: str):
    """Compiles x -> (codes, scale, lo, dequantized x) as one program, in which a compiler could round less often."""

    def run(x):
        stored = quantize(x, bits, one_bit)
        return *stored, dequantize(*stored)

    return jax.jit(run)


def check_quantizer(x: np.ndarray, bits: int, one_bit: str) -> None:
    """Asserts that every group of x [n G] equals the oracle exactly, eager and jitted."""
    expected = [kivi.quantize(group, bits, one_bit) for group in x]
    stored = quantize(jnp.asarray(x), bits, one_bit)
    check_groups(x, expected, *stored, dequantize(*stored))
    check_groups(x, expected, *compile_quantizer(bits, one_bit)(jnp.asarray(x)))


def check_groups(x: np.ndarray, expected: list, codes, scale, lo, dequantized) -> None:
    assert codes.dtype == jnp.uint32 and codes.shape == x.shape
    assert scale.dtype == lo.dtype == dequantized.dtype == x.dtype and dequantized.shape == x.shape
    assert scale.shape == lo.shape == (*x.shape[:-1], 1)
    np.testing.assert_array_equal(scale, np.stack([[group[1]] for group in expected]))
    np.testing.assert_array_equal(lo, np.stack([[group[2]] for group in expected]))
    np.testing.assert_array_equal(codes, np.stack([group[0] for group in expected]))
    np.testing.assert_array_equal(dequantized, np.stack([kivi.dequantize(*group) for group in expected]))


def random_groups(kind: str, dtype) -> np.ndarray:
    """Groups [24 G] of one kind of numbers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, G))
    if kind == "far from zero":
        x = x + rng.normal(size=(24, 1)) * 100
    if kind == "halves":  # quotients that end in .5, and one-bit values on the middle
        x = rng.integers(0, 7, x.shape) / 2
        x[:, 0], x[:, 1] = 0, 3
    if kind == "outliers":
        x[:, 3] = rng.choice([-2e4, 1.5e4], 24)
    if kind == "small":
        x = x * 1e-3
    return x.astype(dtype)


@each_quantizer
@each_dtype
@pytest.mark.parametrize("kind", ["normal", "far from zero", "halves", "outliers", "small"])
def test_it_is_kivis_quantizer_bit_by_bit(kind, dtype, bits, one_bit):
    check_quantizer(random_groups(kind, dtype), bits, one_bit)


@each_dtype
@pytest.mark.parametrize("offset", [0, -4])
def test_halves_round_to_even(dtype, offset):
    x = np.array([[0, 0.5, 1, 1.5, 2, 2.5, 3, 3]], dtype) + dtype(offset)
    codes, _, _, dequantized = compile_quantizer(2, "improved")(x)
    np.testing.assert_array_equal(codes, [[0, 0, 1, 2, 2, 2, 3, 3]])
    np.testing.assert_array_equal(dequantized, np.array([[0, 0, 1, 2, 2, 2, 3, 3]]) + offset)


@each_dtype
def test_one_bit_improved_has_the_quarter_points_and_puts_the_middle_above(dtype):
    x = jnp.asarray([[-1, -0.01, 0, 0.01, 1, 0.5, -0.5, -1]], jnp.dtype(dtype))
    codes, scale, _, dequantized = compile_quantizer(1, "improved")(x)
    np.testing.assert_array_equal(codes, [[0, 0, 1, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(dequantized, np.where(np.asarray(codes), 0.5, -0.5))
    assert jax.jit(lambda x: quantize(x, 1)[1])(x) == scale, "improved is the default"


@each_dtype
def test_one_bit_original_has_the_extremes(dtype):
    x = jnp.asarray([[-1, 3, 2, 0, 0.5, 1.5, -1, 3]], jnp.dtype(dtype))
    codes, _, _, dequantized = compile_quantizer(1, "original")(x)
    np.testing.assert_array_equal(codes, [[0, 1, 1, 0, 0, 1, 0, 1]])
    np.testing.assert_array_equal(dequantized, np.where(np.asarray(codes), 3, -1))
    codes = compile_quantizer(1, "original")(jnp.asarray([[0, 1, 0.5, 0, 0, 0, 0, 0]], jnp.dtype(dtype)))[0]
    np.testing.assert_array_equal(codes, [[0, 1, 0, 0, 0, 0, 0, 0]], "half a step is code 0")


@each_quantizer
@each_dtype
def test_a_constant_group_comes_back_exactly(dtype, bits, one_bit):
    values = [0.0, -0.0, 0.1, -1 / 3, 1 / 7, 5.7, -6e4, 1e-3]
    x = np.repeat(np.array(values * 3, dtype)[:, None], G, 1)
    check_quantizer(x, bits, one_bit)
    codes, _, _, dequantized = compile_quantizer(bits, one_bit)(x)
    np.testing.assert_array_equal(codes, 0)
    np.testing.assert_array_equal(dequantized, x)


@each_quantizer
@each_dtype
def test_negative_zero_is_zero(dtype, bits, one_bit):
    x = np.tile(np.array([[0.0, -0.0]], dtype), (24, G // 2))
    x[1:, 5], x[2, 6] = 3, -3
    check_quantizer(x, bits, one_bit)


@each_quantizer
@each_dtype
def test_an_outlier_costs_its_own_group_only(dtype, bits, one_bit):
    x = random_groups("normal", dtype)
    without = compile_quantizer(bits, one_bit)(jnp.asarray(x))[-1]
    x[0, 0] = 2e4
    np.testing.assert_array_equal(compile_quantizer(bits, one_bit)(jnp.asarray(x))[-1][1:], without[1:])


@pytest.mark.parametrize("bits", [2, 4, 8])
@each_dtype
def test_no_value_moves_by_more_than_half_a_step(dtype, bits):
    x = random_groups("normal", dtype)
    _, scale, _, dequantized = compile_quantizer(bits, "improved")(x)
    distances = np.abs(np.asarray(dequantized, np.float64) - x.astype(np.float64))
    rounding = 8 * float(ml_dtypes.finfo(dtype).eps) * np.abs(x.astype(np.float64)).max()
    assert (distances <= np.asarray(scale, np.float64) / 2 + rounding).all()
    assert distances.max() > np.asarray(scale, np.float64).min() / 4, "it does quantize"


def test_groups_may_have_any_leading_axes():
    x = random_groups("normal", np.float32)
    flat, deep = compile_quantizer(2, "improved")(x), compile_quantizer(2, "improved")(x.reshape(2, 3, 4, G))
    for a, b in zip(flat, deep, strict=True):
        np.testing.assert_array_equal(a, b.reshape(a.shape))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unpack_inverts_pack(bits, axis):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (32, 64, 96)).astype(np.uint32)
    words = jax.jit(lambda c: pack(c, bits, axis))(codes)
    shape = list(codes.shape)
    shape[axis] = shape[axis] * bits // 32
    assert words.dtype == jnp.uint32 and words.shape == tuple(shape)
    np.testing.assert_array_equal(jax.jit(lambda w: unpack(w, bits, axis))(words), codes)
    lines, packed = (np.moveaxis(np.asarray(x), axis, -1) for x in (codes, words))
    for at in [(0, 0), (3, 5), (-1, -1)]:
        assert packed[at].tolist() == kivi.pack(lines[at].tolist(), bits)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unpack_inverts_pack_of_three_bits(axis):
    codes = np.random.default_rng(3).integers(0, 8, (32, 64, 96)).astype(np.uint32)
    words = pack(codes, 3, axis)
    assert words.size * 32 == codes.size * 3
    np.testing.assert_array_equal(unpack(words, 3, axis), codes)


@pytest.mark.parametrize(
    ("bits", "codes", "words"),
    [
        (3, [0, 1, 2, 3, 4, 5, 6, 7] * 4, [0xE4E4E4E4, 0xE4E4E4E4, 0xF0F0F0F0]),
        (1, [1] + [0] * 30 + [1] + [0, 1] * 16, [0x80000001, 0xAAAAAAAA]),
        (2, [3, 0, 1, 2] + [0] * 11 + [2], [0x80000093]),
        (4, [1, 2, 3, 4, 5, 6, 7, 15, 0, 9, 0, 0, 0, 0, 0, 0], [0xF7654321, 0x90]),
        (8, [1, 2, 3, 255, 0, 128, 0, 0], [0xFF030201, 0x8000]),
    ],
)
def test_words_written_by_hand(bits, codes, words):
    packed = jax.jit(lambda c: pack(c, bits, 1))(np.array([codes], np.uint32))
    np.testing.assert_array_equal(packed, np.array([words], np.uint32))
    np.testing.assert_array_equal(jax.jit(lambda w: unpack(w, bits, 1))(packed), [codes])


def test_a_code_never_spills_into_its_neighbors():
    """One bit improved: a group's maximum is code 1, where the formula taken literally gives 2."""
    x = random_groups("normal", np.float32)
    for bits, one_bit in QUANTIZERS:
        assert int(np.max(compile_quantizer(bits, one_bit)(x)[0])) == 2**bits - 1
