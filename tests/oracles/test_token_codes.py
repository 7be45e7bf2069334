"""Codes per token against their oracle: alone, packed, rotated, on the host, and under other methods."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs import bit_packing, blockwise
from kvjax.cache.codecs.per_token import PerTokenCodec, hadamard
from kvjax.cache.codecs.plain import Host, Plain
from kvjax.cache.codecs.quantizers import Absmax, MinMax, Quantizer
from kvjax.core import attention, memory
from kvjax.errors import KvjaxError
from tests.oracles import token_codes as oracle


@dataclasses.dataclass(frozen=True)
class Exact(Quantizer):
    """Loses nothing, so that only the rotation is left."""

    def encode(self, x):
        return x[..., :4], x[..., 4:]

    def decode(self, codes):
        return jnp.concatenate(codes, -1)


CODECS = (
    PerTokenCodec(MinMax(4)),
    PerTokenCodec(MinMax(4), "hadamard"),
    PerTokenCodec(MinMax(2), "hadamard"),
    PerTokenCodec(Absmax()),
)


def random_vectors(S: int = 9, H: int = 16, dtype=jnp.float32, seed: int = 0):
    """Vectors [2 2 S H], positions and queries [2 2 2 1 H]; the second sequence has four tokens, then infinity."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 2, S, H)) * rng.uniform(0.1, 30, size=(2, 2, S, 1))
    pos = np.where(np.arange(S)[None] < np.array([[S], [4]]), np.arange(S), -1)
    x = np.where(pos[:, None, :, None] < 0, np.inf, x)
    q = jnp.asarray(rng.normal(size=(2, 2, 2, 1, H)), dtype)
    return jnp.asarray(x, dtype), jnp.asarray(pos, jnp.int32)[:, None], q


def mask_padding(x, pos):
    return np.asarray(x)[np.broadcast_to(np.asarray(pos) >= 0, x.shape[:3])]


def test_the_example_by_hand():
    vector = jnp.array([-1.0, 0.0, 0.5, 2.0] * 2)
    codes = MinMax(4).encode(vector)
    assert bit_packing.unpack(codes.codes, 4, -1).tolist() == [0, 5, 8, 15] * 2
    assert int(codes.scale[0]) & 15 == 5
    np.testing.assert_allclose(MinMax(4).decode(codes), [-1.0, 0.0, 0.6, 2.0] * 2, rtol=2**-18)


def test_what_lies_outside_a_clipped_range_takes_the_nearest_code():
    """Half of -1..2 is -0.5..1, in steps of 0.1."""
    clipped = MinMax(4, 0.5)
    read = clipped.decode(clipped.encode(jnp.array([-1.0, 0.0, 0.5, 2.0] * 2)))
    np.testing.assert_allclose(read, [-0.5, 0.0, 0.5, 1.0] * 2, rtol=2**-18)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
def test_codes_are_those_of_the_formula(bits, shift):
    x = np.asarray(np.random.default_rng(bits).normal(size=(40, 32)) + shift, np.float32)
    coded = MinMax(bits).encode(jnp.asarray(x))
    codes, scales = np.asarray(bit_packing.unpack(coded.codes, bits, -1)), np.asarray(coded.scale)
    for vector, actual, word in zip(x.astype(np.float64), codes, scales[:, 0], strict=True):
        expected, zero, scale = oracle.quantize_min_max(vector, bits)
        assert word & (2**bits - 1) == zero
        near_tie = np.abs((vector / scale) % 1 - 0.5) < 1e-3
        assert ((actual == expected) | near_tie).all() and np.abs(actual.astype(int) - expected).max() <= 1
        stored = (word & ~np.uint32(2**bits - 1)).view(np.float32)
        assert abs(stored / scale - 1) <= 2.0 ** (bits - 23) + 1e-6
    read = MinMax(bits).decode(coded)
    np.testing.assert_allclose(
        read[-1], oracle.dequantize_min_max(codes[-1].tolist(), zero, scale), rtol=1e-3, atol=1e-6
    )


def test_eight_bits_on_either_side_of_zero():
    x = np.asarray(np.random.default_rng(0).normal(size=(20, 8)), np.float32)
    actual = np.asarray(Absmax().decode(Absmax().encode(jnp.asarray(x))))
    for vector, read in zip(x.astype(np.float64), actual, strict=True):
        np.testing.assert_allclose(read, oracle.fake_quantize_absmax(vector), atol=1e-6)


@pytest.mark.parametrize("quantizer", [MinMax(1), MinMax(4), Absmax()])
@pytest.mark.parametrize("vector", [0.0, 2.5, -7.0])
def test_rows_of_one_number(quantizer, vector):
    x = jnp.full((32,), vector)
    np.testing.assert_allclose(quantizer.decode(quantizer.encode(x)), x, rtol=1e-5)


@pytest.mark.parametrize("H", [1, 2, 8, 64])
def test_hadamards_matrix(H):
    np.testing.assert_allclose(hadamard(H), oracle.hadamard(H), atol=1e-7)
    np.testing.assert_allclose(hadamard(H) @ hadamard(H), np.eye(H), atol=1e-6)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_read_is_what_the_codes_say(codec):
    x, pos, q = random_vectors()
    stored = codec.encode(x, pos)
    decoded = codec.decode(stored)
    assert np.isfinite(decoded).all() and decoded.dtype == x.dtype
    turn = oracle.hadamard(16) if codec.rotate else np.eye(16)
    for vector, actual in zip(mask_padding(x, pos).astype(np.float64), mask_padding(decoded, pos), strict=True):
        if isinstance(codec.quantizer, Absmax):
            expected = oracle.fake_quantize_absmax(vector)
        else:
            expected = turn @ oracle.dequantize_min_max(*oracle.quantize_min_max(turn @ vector, codec.quantizer.bits))
        step = np.ptp(vector) / (2 ** getattr(codec.quantizer, "bits", 8) - 1)
        assert np.abs(actual - expected).max() <= 2 * step  # a tie may fall the other way, by one step
        assert np.median(np.abs(actual - expected)) <= 1e-3 * np.abs(vector).max()
    p = jnp.where(pos[:, :, None, None] >= 0, attention.scores(q, decoded), 0.0)
    np.testing.assert_allclose(codec.scores(q, stored), attention.scores(q, decoded), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(codec.mix(p, stored), attention.mix(p, decoded), rtol=1e-4, atol=5e-3)
    idx = jnp.array([[[3, 0, 3]]]).repeat(2, 0).repeat(2, 1)
    np.testing.assert_array_equal(codec.gather(stored, idx), decoded[:, :, jnp.array([3, 0, 3])])


@pytest.mark.parametrize("S", [6, 8])
def test_reading_piece_by_piece_changes_nothing(S, monkeypatch):
    codec = PerTokenCodec(MinMax(4), "hadamard")
    x, pos, q = random_vectors(S)
    stored = codec.encode(x, pos)
    p = jnp.where(pos[:, :, None, None] >= 0, attention.scores(q, x), 0.0)
    untiled = codec.scores(q, stored), codec.mix(p, stored)
    monkeypatch.setattr(blockwise, "MAX_TILE_SLOTS", 3)
    monkeypatch.setattr(blockwise, "MAX_TILE_NUMBERS", 2 * 3 * 16)
    assert blockwise.tile_size(4, S, 16) == (2, 3)
    np.testing.assert_allclose(codec.scores(q, stored), untiled[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(codec.mix(p, stored), untiled[1], rtol=1e-5, atol=1e-4)


def test_a_gpu_decodes_all_slots_at_once_where_a_cpu_takes_tiles(monkeypatch):
    assert blockwise.tile_size(8, 32_768, 64) == (8, 2048)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert blockwise.tile_size(8, 32_768, 64) == (8, 32_768)
    assert blockwise.tile_size(64, 32_768, 128) == (16, 32_768)  # no more than fits the workspace


def test_a_rotation_alone_loses_nothing():
    x, pos, q = random_vectors()
    rotated_codec, plain = PerTokenCodec(Exact(), "hadamard"), Plain()
    a, b = rotated_codec.encode(x, pos), plain.encode(jnp.where(pos[..., None] < 0, 0.0, x), pos)
    assert not np.allclose(memory.unpack(a.parts[0]), x[..., :4])  # they are stored rotated
    p = jax.nn.softmax(jnp.where(pos[:, :, None, None] >= 0, plain.scores(q, b), -jnp.inf))
    for actual, expected in (
        (rotated_codec.decode(a), plain.decode(b)),
        (rotated_codec.scores(q, a), plain.scores(q, b)),
        (rotated_codec.mix(p, a), plain.mix(p, b)),
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", CODECS[1::2])
@pytest.mark.parametrize("place", [lambda c: c, Host])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_is_coded_once_wherever_it_goes(codec, place, dtype):
    codec = place(codec)
    x, pos, _ = random_vectors(dtype=dtype)
    x = jnp.where(pos[..., None] < 0, jnp.zeros((), dtype), x)
    decoded = codec.decode(codec.encode(x, pos))
    empty = codec.encode(jnp.zeros_like(x), jnp.full_like(pos, -1))
    slots = jnp.array([[5, 1], [0, 7]], jnp.int32)  # another slot in each head
    appended = jax.jit(codec.append)(empty, x[:, :, 2:3], slots)
    assert jax.tree.map(memory.memory_kind, appended) == jax.tree.map(memory.memory_kind, empty)
    actual = jax.jit(codec.gather)(appended, slots[:, :, None])
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(decoded[:, :, 2:3], np.float32))
    assert actual.dtype == dtype
    rest = jnp.asarray(codec.decode(appended)).at[jnp.arange(2)[:, None], jnp.arange(2)[None], slots].set(0)
    assert not np.asarray(rest, np.float32).any()


def test_head_sizes_that_fill_no_words_or_have_no_matrix_are_refused():
    for codec, H, remedy in ((CODECS[0], 12, "more bits"), (CODECS[3], 6, "kivi"), (CODECS[1], 24, "rotate=false")):
        with pytest.raises(KvjaxError, match=remedy):
            codec.encode(jnp.zeros((1, 1, 2, H)), jnp.zeros((1, 1, 2), jnp.int32))
    with pytest.raises(KvjaxError, match="bits"):
        MinMax(5)
    with pytest.raises(KvjaxError, match="clip"):
        MinMax(4, 1.5)
    with pytest.raises(KvjaxError, match="rotate"):
        PerTokenCodec(rotate="random")
