"""Methods that store coordinates along given directions: MatryoshkaKV, CSKV, merged heads."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.bases import Bases
from kvjax.cache.codecs.low_rank import CalibratedLowRank, PromptLowRank
from kvjax.errors import KvjaxError
from kvjax.methods.cskv import ExactWindow
from tests.contract import layer
from tests.oracles import lowrank as oracle

K, H = layer.K, layer.H


@functools.cache
def random_table(kind: str, groups: int, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Random orthonormal bases with means that are not zero."""
    rng, channels = np.random.default_rng(3), K * H // groups
    means = {f"{name}_mean": rng.normal(size=(groups, channels)).astype(np.float32) for name in names}
    return {name: oracle.random_bases(rng, groups, channels) for name in names} | means


@pytest.fixture
def table(tmp_path):
    """Returns a function that writes a table of a kind -> (its path, its arrays)."""

    def write(kind: str, groups: int, *names: str) -> tuple[str, dict[str, np.ndarray]]:
        arrays = random_table(kind, groups, names)
        return str(table_file.write(tmp_path / kind, kind, layer.spec(), [arrays])), arrays

    return write


def decode(method: str) -> np.ndarray:
    """Runs all steps after prompts that are padded with infinity."""
    batch = layer.random_batch()
    return layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))


def test_by_hand(tmp_path):
    """(3, 0) less the mean (1, 0) has the coordinate sqrt 2 along (1, 1) / sqrt 2, which decodes to (2, 1)."""
    spec = dataclasses.replace(layer.spec(head_dim=2), num_kv_heads=1, num_groups=1)
    arrays = {"values": np.full((1, 2, 1), 0.5**0.5, np.float32), "values_mean": np.array([[1, 0]], np.float32)}
    path = table_file.write(tmp_path / "table", "bases", spec, [arrays])
    codec = CalibratedLowRank(table=Bases.table_file(str(path)), share=0.5).at(spec)
    x, pos = jnp.array([3.0, 0.0]).reshape(1, 1, 1, 2), jnp.zeros((1, 1, 1), jnp.int32)
    stored = codec.encode(x, pos)
    np.testing.assert_allclose(stored.coordinates.data.ravel(), [2**0.5], rtol=1e-6)
    np.testing.assert_allclose(codec.decode(stored).ravel(), [2, 1], rtol=1e-6)
    np.testing.assert_allclose(codec.mix(jnp.full((1, 1, 1, 1, 1), 2.0), stored).ravel(), [4, 2], rtol=1e-6)


def test_matryoshka_is_the_oracle_on_ragged_rows(table):
    path, arrays = table("bases", K, "keys", "values")

    def reconstruct(name: str, rank: int, x: np.ndarray) -> np.ndarray:
        vectors = zip(x, arrays[name], arrays[f"{name}_mean"], strict=True)
        return np.stack([oracle.project(head, basis[:, :rank], mean) for head, basis, mean in vectors])

    expected = oracle.attend_decoded(
        layer.random_batch(), functools.partial(reconstruct, "keys", 8), functools.partial(reconstruct, "values", 16)
    )
    np.testing.assert_allclose(decode(f"matryoshka:keys=0.25,values=0.5,table={path}"), expected, atol=5e-6)


def project_jointly(arrays: dict[str, np.ndarray], name: str, rank: int, x: np.ndarray) -> np.ndarray:
    """Projects [K n H] of all heads together on the first `rank` directions; keys without their rotation."""
    pos = np.arange(x.shape[1])
    vectors = oracle.concat_heads(oracle.rotate(x, pos, -1) if name == "bare_keys" else x)
    restored = oracle.split_heads(oracle.project(vectors, arrays[name][0][:, :rank], arrays[f"{name}_mean"][0]), K)
    return oracle.rotate(restored, pos) if name == "bare_keys" else restored


def test_cskv_is_the_oracle_on_ragged_rows(table):
    """A prompt of one token is shorter than the window, in which the step's own token lies."""
    path, arrays = table("joint_bases", 1, "bare_keys", "values")

    def reconstruct(name: str, rank: int, x: np.ndarray) -> np.ndarray:
        return np.concatenate([project_jointly(arrays, name, rank, x)[:, :-3], x[:, -3:]], 1)

    keys, values = functools.partial(reconstruct, "bare_keys", 32), functools.partial(reconstruct, "values", 16)
    method = f"cskv:keys=0.5,values=0.25,window=3,table={path}"
    np.testing.assert_allclose(decode(method), oracle.attend_decoded(layer.random_batch(), keys, values), atol=1e-5)


def test_merged_heads_are_the_oracle_on_ragged_rows(table):
    path, arrays = table("merged_bases", 1, "bare_keys", "values")
    keys, values = (functools.partial(project_jointly, arrays, name, H) for name in ("bare_keys", "values"))
    expected = oracle.attend_decoded(layer.random_batch(), keys, values)
    np.testing.assert_allclose(decode(f"merged_heads:heads=2,table={path}"), expected, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 0])
def test_groups_of_heads_have_their_coordinates_in_common(heads):
    """Four heads, by themselves, in pairs and all together: the best rank that the prompt allows, by NumPy's SVD."""
    spec = dataclasses.replace(layer.spec(head_dim=4), num_kv_heads=4)
    size = heads or 4
    x = np.random.default_rng(0).normal(size=(2, 4, 9, 4)).astype(np.float32)
    codec, pos = (
        PromptLowRank(heads, rank=2 * size).at(spec),
        jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 1, 9)),
    )
    expected = np.zeros_like(x)
    for b in range(2):
        for first in range(0, 4, size):
            u, s, vh = np.linalg.svd(oracle.concat_heads(x[b, first : first + size]), full_matrices=False)
            s[2 * size :] = 0
            expected[b, first : first + size] = oracle.split_heads(u * s @ vh, size)
    rng = np.random.default_rng(1)
    idx = rng.integers(0, 9, (2, 4, 3)).astype(np.int32)
    q, p = (rng.normal(size=(2, 4, 2, 1, n)).astype(np.float32) for n in (4, 9))

    def read(x, q, p, idx):
        reconstruct = codec.encode(x, pos)
        return (
            reconstruct.coordinates.data,
            codec.decode(reconstruct),
            codec.gather(reconstruct, idx),
            codec.scores(q, reconstruct),
            codec.mix(p, reconstruct),
        )

    coordinates, decoded, gathered, scores, mix = jax.jit(read)(x, q, p, idx)
    assert coordinates.shape == (2, 4, 9, 2)
    np.testing.assert_allclose(decoded, expected, atol=2e-5)
    np.testing.assert_allclose(gathered, np.take_along_axis(expected, idx[..., None], 2), atol=2e-5)
    np.testing.assert_allclose(scores, np.einsum("bkgth,bksh->bkgts", q, expected) / 2, atol=5e-5)
    np.testing.assert_allclose(mix, np.einsum("bkgts,bksh->bkgth", p, expected), atol=5e-5)


def test_the_newest_tokens_are_exact_wherever_they_are_read():
    """Scores, mixes and single tokens agree with decoded ones, and a token loses its exact copy when it is old."""
    codec = ExactWindow(PromptLowRank(rank=2).at(layer.spec()), 3)
    x = np.random.default_rng(0).normal(size=(1, K, 8, H)).astype(np.float32)
    pos = jnp.where(jnp.arange(8) < 5, jnp.arange(8), -1).astype(jnp.int32)[None, None]

    def step(reconstruct, q, p, idx, new, at):
        read = codec.decode(reconstruct), codec.inner.decode(reconstruct.inner), codec.gather(reconstruct, idx)
        return *read, codec.scores(q, reconstruct), codec.mix(p, reconstruct), codec.append(reconstruct, new, at)

    step = jax.jit(step)
    stored = jax.jit(codec.encode)(np.where(np.arange(8)[:, None] < 5, x, np.float32(np.inf)), pos)
    for n in (5, 6, 7):
        idx = np.tile(np.array([n - 1, 0, n - 4], np.int32), (1, K, 1))
        q, p = x[:, :, None, :1], np.tile(np.where(np.arange(8) < n, 0.5, 0).astype(np.float32), (1, K, 1, 1, 1))
        new, at = x[:, :, n : n + 1], np.array([[n]], np.int32)
        vectors, inner, gathered, scores, mix, stored = map(_to_numpy, step(stored, q, p, idx, new, at))
        np.testing.assert_array_equal(vectors[:, :, n - 3 : n], x[:, :, n - 3 : n])
        np.testing.assert_array_equal(vectors[:, :, : n - 3], inner[:, :, : n - 3])
        np.testing.assert_array_equal(gathered, vectors[:, :, idx[0, 0]])
        expected = np.einsum("bkgth,bksh->bkgts", q, vectors)[..., :n] * H**-0.5
        np.testing.assert_allclose(scores[..., :n], expected, atol=2e-6)
        np.testing.assert_allclose(mix, 0.5 * vectors[:, :, None, None, :n].sum(4), atol=2e-6)


def _to_numpy(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, jax.Array) else x


def test_a_table_of_another_model_says_how_to_make_one():
    with pytest.raises(KvjaxError, match="ships no table of bases for .*head_dim=64; make one, as with `kvjax calib"):
        layer.bind("matryoshka", head_dim=64)


def test_a_table_of_few_directions_says_so(tmp_path):
    arrays = {"keys": np.zeros((K, H, 4)), "keys_mean": np.zeros((K, H))}
    path = table_file.write(tmp_path / "few", "bases", layer.spec(), [arrays])
    with pytest.raises(KvjaxError, match="has 4 directions of keys, and 12 are to be held: 0.4 of 32 channels; lower"):
        layer.bind(f"matryoshka:table={path}")


def test_the_shipped_model_finds_its_own_tables():
    config = kvjax.load("testbed").config
    full = kvjax.planned_bytes("full", config, 512, dtype="bfloat16").held["device"]
    for method in ("matryoshka", "cskv", "merged_heads"):
        assert kvjax.planned_bytes(method, config, 512, dtype="bfloat16").held["device"] < full
