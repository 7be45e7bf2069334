"""GEAR against its oracle, and the properties of codes with outliers and a low-rank residual.

GEAR in NumPy, float64, from its paper (arXiv 2403.05527, section 4): the tokens of one head, [n H].
"""

from __future__ import annotations

import functools
from math import floor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs.chunk_quant import Channelwise, Tokenwise
from kvjax.cache.codecs.outliers import ChannelOutliers, TokenOutliers
from kvjax.cache.codecs.plain import Host
from kvjax.methods.gear import LowRankResidual
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded


def outlier_indices(vector: np.ndarray, fraction: float) -> list[int]:
    """The indices of the largest and the smallest numbers of a vector; ties go to the lower index."""
    num_each = floor(fraction / 2 * len(vector) + 1e-9)
    largest = sorted(range(len(vector)), key=lambda i: (-vector[i], i))[:num_each]
    smallest = sorted((i for i in range(len(vector)) if i not in largest), key=lambda i: (vector[i], i))[:num_each]
    return largest + smallest


def round_to_levels(vector: np.ndarray, bits: int) -> np.ndarray:
    """Rounds a vector to 2^bits levels from its minimum to its maximum."""
    lo, step = vector.min(), (vector.max() - vector.min()) / (2**bits - 1)
    return np.round((vector - lo) / step) * step + lo if step > 0 else vector


def compress_chunk(x: np.ndarray, axis: str, bits: int, rank: int, fraction: float) -> np.ndarray:
    """Compresses a chunk of tokens [n H] and restores it; its vectors are channels (keys) or tokens (values)."""
    vectors = (x.T if axis == "channel" else x).astype(float)
    coded, exact = np.empty_like(vectors), np.zeros(vectors.shape, bool)
    for i, vector in enumerate(vectors):
        outliers = outlier_indices(vector, fraction)
        exact[i, outliers] = True
        without = np.where(exact[i], vector.mean(), vector)
        coded[i] = round_to_levels(without, bits)
    if axis == "channel":
        coded, exact = coded.T, exact.T
    error = np.where(exact, 0.0, x - coded)
    left, size, right = np.linalg.svd(error, full_matrices=False)
    low_rank = (left[:, :rank] * size[:rank]) @ right[:rank]
    return np.where(exact, x, coded + low_rank)


def reconstruct(
    x, prompt: int, axis: str, bits: int, ranks: tuple[int, int], fraction: float, chunk_tokens: int
) -> np.ndarray:
    """The tokens [n H] as the last one reads them: the prompt is one chunk, `chunk_tokens` decoded tokens another."""
    tokens = x.astype(float).copy()
    tokens[:prompt] = compress_chunk(x[:prompt], axis, bits, ranks[0], fraction)
    for first in range(prompt, len(x) - chunk_tokens, chunk_tokens):
        tokens[first : first + chunk_tokens] = compress_chunk(
            x[first : first + chunk_tokens], axis, bits, ranks[1], fraction
        )
    return tokens


@pytest.mark.parametrize(("share", "every"), [(0.25, 3), (0.7, 4)])
def test_it_is_its_oracle_where_padding_holds_infinity(share, every):
    """A fraction of 0.25 leaves chunks of three tokens without outliers in channels; 0.7 finds two in four."""
    text = f"gear:bits=2,rank=2,later=1,share={share},every={every}"
    batch, noisy = layer.random_batch(), layer.random_batch(padding=np.inf)
    out = layer.decode(text, batch, state=layer.prefill(layer.bind(text), noisy, padding=np.inf))

    def make_reconstruct(axis):
        return lambda x, n: reconstruct(x, n, axis, 2, (2, 1), share, every)

    np.testing.assert_allclose(
        out, attend_decoded(batch, make_reconstruct("channel"), make_reconstruct("token")), atol=2e-5
    )


def make_codec(
    axis: str, bits: int = 2, every: int = 3, share: float = 0.5, rank: int = 2, later: int = 1
) -> LowRankResidual:
    if axis == "channel":
        return LowRankResidual(Channelwise(bits, every), ChannelOutliers(share), rank, later)
    return LowRankResidual(Tokenwise(bits, every), TokenOutliers(share), rank, later)


def random_tokens(S: int = 12, H: int = 6) -> tuple[np.ndarray, jax.Array]:
    """Sequences of six and of four tokens, padded with infinity, and their positions."""
    pos = np.where(np.arange(S)[None] < np.array([[6], [4]]), np.arange(S)[None], -1)
    x = np.random.default_rng(0).normal(size=(2, 2, S, H)).astype(np.float32)
    return np.where(pos[:, None, :, None] < 0, np.inf, x), jnp.asarray(pos, jnp.int32)[:, None]


@functools.cache
def round_trip(codec: LowRankResidual) -> np.ndarray:
    """Encodes and decodes a prompt."""
    x, pos = random_tokens()
    run = jax.jit(lambda x: codec.decode(codec.encode(x, pos)))
    return np.asarray(run(jnp.asarray(x)))


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_outliers_come_back_bit_for_bit(axis):
    x, decoded, exact = random_tokens()[0], round_trip(make_codec(axis)), 0
    for b, n in enumerate((6, 4)):
        for h in range(2):
            vectors, values = (y[b, h, :n].T if axis == "channel" else y[b, h, :n] for y in (x, decoded))
            for vector, actual in zip(vectors, values, strict=True):
                out = outlier_indices(vector.astype(np.float64), 0.5)
                np.testing.assert_array_equal(actual[out], vector[out])
                exact += len(out)
    assert exact >= 40


def squared_error(codec: LowRankResidual) -> float:
    """The squared error of a prompt after encoding."""
    x, pos = random_tokens()
    return float(np.square(round_trip(codec) - x, where=np.asarray(pos)[..., None] >= 0, out=np.zeros_like(x)).sum())


def test_the_error_falls_with_the_rank_and_is_none_where_all_are_directions_or_outliers():
    errors = [squared_error(make_codec("channel", share=0.0, rank=rank)) for rank in (1, 6)]
    assert errors[0] > 0.1 and errors[1] < 1e-9
    assert squared_error(make_codec("token", share=1.0)) == 0


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_rows_on_the_host_are_those_of_all_that_is_decoded(axis):
    """Sequences of six and of four tokens get four more each: a chunk of three, and one token over."""
    codec, pos = Host(make_codec(axis, share=0.7)), random_tokens()[1]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 2, 12, 6)), jnp.float32)
    n = (pos >= 0).sum(2, dtype=jnp.int32)

    @jax.jit
    def run(x, idx):
        def step(stored, t):
            new = jnp.take_along_axis(x, (n + t)[:, :, None, None], 2)
            return codec.append(stored, new, n + t), None

        stored = jax.lax.scan(step, codec.encode(x, pos), jnp.arange(4, dtype=jnp.int32))[0]
        return codec.decode(stored), codec.gather(stored, idx)

    idx = jnp.asarray([[[9, 0, 4], [7, 7, 2]], [[7, 1, 0], [3, 5, 6]]], jnp.int32)
    decoded, gathered = run(x, idx)
    np.testing.assert_array_equal(gathered, jnp.take_along_axis(decoded, idx[..., None], 2))
    for b, count in enumerate((6, 4)):
        for h in range(2):
            known = np.asarray(x[b, h, : count + 4], np.float64)
            expected = reconstruct(known, count, axis, 2, (2, 1), 0.7, 3)
            np.testing.assert_allclose(decoded[b, h, : count + 4], expected, atol=1e-5)


def test_by_hand_an_outlier_widens_no_scale():
    """The ends of 0, 1, 2 and 100 are exact; the mean, 25.75, replaces them in the codes, and L has the error."""
    x, pos = jnp.asarray([[[[0.0, 1.0, 2.0, 100.0]]]]), jnp.zeros((1, 1, 1), jnp.int32)
    codec = make_codec("token")

    @jax.jit
    def run(x):
        return *TokenOutliers(0.5).find(x, pos >= 0), codec.decode(codec.encode(x, pos))

    out, others, decoded = run(x)
    assert out[0, 0, 0].tolist() == [True, False, False, True]
    np.testing.assert_allclose(others[0, 0, 0], [25.75, 1.0, 2.0, 25.75])
    np.testing.assert_allclose(decoded[0, 0, 0], [0, 1, 2, 100], atol=1e-5)
    assert ChannelOutliers(0.02).num_outliers(2048) == 40 and ChannelOutliers(0.02).num_outliers(20) == 0
