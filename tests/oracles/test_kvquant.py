"""KVQuant against its oracle: levels, outliers of channels and tokens, chunks, the exact first token, given levels.

KVQuant in NumPy, float64 (arXiv 2401.18079, section 3), with the authors' constants and online ranges.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.calibration import table_file
from kvjax.errors import KvjaxError
from kvjax.methods.kvquant import (
    ChannelQuantileOutliers,
    DenseAndSparse,
    LevelTable,
    NonUniformCodec,
    TokenQuantileOutliers,
    fit_levels,
    normal_float_levels,
    normalize_levels,
)
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded
from tests.oracles.online import rope

NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""The levels of NF4, as published (Dettmers et al. 2023, arXiv 2305.14314, appendix E)."""


def fake_quantize(x: np.ndarray, levels: np.ndarray, fraction: float) -> np.ndarray:
    """Rounds numbers [n] to the nearest level, except those at or beyond two quantiles, which stay exact."""
    is_outlier = np.zeros(len(x), bool)
    if fraction:
        is_outlier = (x >= np.quantile(x, 1 - fraction / 2)) | (x <= np.quantile(x, fraction / 2))
    out = x.copy()
    if not is_outlier.all():
        least, most = x[~is_outlier].min(), x[~is_outlier].max()
        half, middle = (most - least) / 2, (most + least) / 2
        for i in np.flatnonzero(~is_outlier):
            position = (x[i] - middle) / half if half else 0.0
            out[i] = levels[np.abs(levels - position).argmin()] * half + middle
    return out


def reconstruct(
    x: np.ndarray, prompt: int, axis: str, levels: np.ndarray, fraction: float, chunk_tokens: int, num_exact: int
) -> np.ndarray:
    """One head's stored tokens [n H] after the last was written: the prompt, full chunks, and an exact remainder."""
    full = max(len(x) - 1 - prompt, 0) // chunk_tokens
    bounds = [0, *(prompt + chunk_tokens * i for i in range(full + 1))]
    out = x.copy()
    for start, end in zip(bounds, bounds[1:], strict=False):
        block = out[start:end].T if axis == "channel" else out[start:end]
        for vector in block:
            vector[:] = fake_quantize(vector, levels, fraction) if end > start else vector
    out[:num_exact] = x[:num_exact]
    return out


def test_the_levels_of_four_bits_are_nf4():
    np.testing.assert_allclose(normal_float_levels(4), NF4, atol=1e-6)
    for bits in (2, 3, 8):
        levels = normal_float_levels(bits)
        assert len(levels) == 2**bits and (np.diff(levels) > 0).all() and 0 in levels
        assert levels[0] == -1 and levels[-1] == 1


def test_the_example_by_hand():
    """Both ends of 0, 1, 2, 3, 4, 100 are exact; the others lie at -1, -1/3, 1/3 and 1 of 2.5 -+ 1.5."""
    x = np.array([0.0, 1, 2, 3, 4, 100])
    np.testing.assert_allclose(fake_quantize(x, np.array([-1.0, 0, 0.5, 1]), 0.01), [0, 1, 2.5, 3.25, 4, 100])


def test_a_batch_is_its_oracle_and_padding_may_hold_infinity():
    batch, method, levels = layer.random_batch(), kvjax.parse("kvquant:every=4"), np.array(NF4)
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))

    def keys(x: np.ndarray, prompt: int) -> np.ndarray:
        at = np.arange(len(x))
        return rope(reconstruct(rope(x, -at), prompt, "channel", levels, 0.01, 4, 1), at)

    def values(x: np.ndarray, prompt: int) -> np.ndarray:
        return reconstruct(x, prompt, "token", levels, 0.01, 4, 1)

    np.testing.assert_allclose(out, attend_decoded(batch, keys, values), atol=2e-5)


@pytest.mark.parametrize(
    ("axis", "outliers", "share"), [("channel", ChannelQuantileOutliers, 0.5), ("token", TokenQuantileOutliers, 0.0)]
)
def test_what_is_held_is_the_oracles(axis, outliers, share):
    """Prompts of 13, 2 and 0 tokens and nine more of each, in 3 bits; padding may hold any finite number."""
    codec, lengths, S, H = DenseAndSparse(NonUniformCodec(3, 4, axis), outliers(share)), np.array([13, 2, 0]), 22, 32
    x = np.random.default_rng(0).normal(size=(3, 2, S, H))
    x[0, 0, 3], x[0, 1, :, 5], x[1, 1] = 1e30, 0.0, 7.0
    x = x.astype(np.float32)
    slot = np.arange(S)[None]
    pos = jnp.asarray(np.where(slot < lengths[:, None], slot, -1), jnp.int32)[:, None]
    noisy = jnp.where(pos[..., None] >= 0, x, jnp.inf)

    def step(stored, t):
        at = jnp.asarray(lengths, jnp.int32)[:, None] + t
        return codec.append(stored, jnp.take_along_axis(jnp.asarray(x), at[:, None, :, None], 2), at), None

    def run(noisy):
        last = jax.lax.scan(step, codec.encode(noisy, pos), jnp.arange(9, dtype=jnp.int32))[0]
        gathered = jnp.broadcast_to(jnp.asarray([8, 0, 3], jnp.int32), (3, 2, 3))
        return codec.decode(last), codec.gather(last, gathered)

    decoded, gathered = map(np.asarray, jax.jit(run)(noisy))
    np.testing.assert_array_equal(gathered, decoded[:, :, [8, 0, 3]])
    levels = normal_float_levels(3).astype(float)
    for b, n in enumerate(map(int, lengths)):
        for h in range(2):
            expected = reconstruct(x[b, h, : n + 9].astype(float), n, axis, levels, share, 4, 0)
            np.testing.assert_allclose(decoded[b, h, : n + 9], expected, rtol=1e-5, atol=1e-6)


def test_levels_are_fitted_by_weight_and_normed():
    """Numbers without weight move no level; Q-Norm restores mean and deviation."""
    x, weight = np.array([-1.0, -0.8, 0.0, 0.1, 0.2, 1.0]), np.array([1.0, 3, 0, 1, 1, 2])
    levels = fit_levels(x, weight, 1)
    np.testing.assert_allclose(levels, [-0.85, 2.3 / 4])
    normalized = normalize_levels(x, levels)[[0, 0, 0, 1, 1, 1] if x[2] < levels.mean() else [0, 0, 1, 1, 1, 1]]
    np.testing.assert_allclose([normalized.mean(), normalized.std()], [x.mean(), x.std()])


def test_a_table_gives_each_layers_levels(tmp_path):
    spec, near = layer.spec(), np.array([-1.0, -0.2, 0.4, 1])
    table = {"keys": np.stack([near, near * 2]).astype(np.float32), "values": np.zeros((2, 4), np.float32)}
    path = str(table_file.write(tmp_path / "levels", "levels", spec, [table]))
    codec = NonUniformCodec(2, 4, "token", LevelTable.table_file(path), "keys").at(spec)
    x = jnp.asarray([[0.0, 3, 5, 8, 10] + [10] * 27])[None, None]
    read = codec.decode(codec.encode(x, jnp.zeros((1, 1, 1), jnp.int32)))[0, 0, 0, :5]
    np.testing.assert_allclose(read, [-5, 3, 3, 9, 15], rtol=1e-6)  # 5 + 5 * 2 * (-1, -0.2, -0.2, 0.4, 1)
    with pytest.raises(KvjaxError, match=r"`0.keys` of .* has shape \(2, 4\), expected \(2, 8\)"):
        layer.bind(f"kvquant:bits=3,table={path}")
