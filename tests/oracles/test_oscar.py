"""OSCAR: its rotations against the authors' own, and its codes against an oracle in NumPy, head by head."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.calibration import table_file
from kvjax.cache.codecs import bit_packing
from kvjax.calibrate import calibrate
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.engine.plan import specs
from kvjax.errors import KvjaxError
from kvjax.methods.oscar import ClippedGroups, Rotations, make_rotation
from tests import fixtures
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded

AUTHORS = dict(np.load(Path(fixtures.__file__).with_name("oscar.npz")))


@pytest.mark.parametrize("name", ["keys", "values"])
def test_rotations_are_those_of_the_authors(name):
    """Two eigenvectors may differ in their sign, by which the rotation's rows in their basis do."""
    n, heads, H = AUTHORS["q"].shape
    q, k, v = (jnp.asarray(AUTHORS[x].swapaxes(0, 1))[None] for x in "qkv")
    padding = [(0, 0), (0, 0), (0, 3), (0, 0)]
    pos = jnp.pad(jnp.arange(n, dtype=jnp.int32), (0, 3), constant_values=-1)[None]
    k, v = (jnp.pad(x, padding, constant_values=7.0) for x in (k, v))
    q = jnp.pad(q, padding, constant_values=7.0).reshape(1, 2, heads // 2, n + 3, H)
    kind = Rotations()
    counted = kind.count(KVBlock(k, v, pos[:, None]), Observation(q, pos), layer.spec())
    counted = {key: np.asarray(x[0], np.float64) for key, x in counted.items()}
    covariance = (counted[name] / counted["tokens"]).mean(0)
    vectors, variances = AUTHORS[f"{name}_vectors"], AUTHORS[f"{name}_variances"]
    np.testing.assert_allclose(covariance, vectors * variances @ vectors.T, atol=1e-4 * variances.max())
    rotation = kind.arrays(counted, layer.spec())[name][0]
    in_their_basis = np.abs(vectors.T @ rotation)
    np.testing.assert_allclose(in_their_basis, np.abs(vectors.T @ AUTHORS[f"{name}_rotation"]), atol=2e-2)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(H), atol=1e-5)


@pytest.mark.parametrize("levels", ["uniform", "lloyd_max"])
def test_codes_are_those_of_the_authors(levels):
    """But for numbers halfway between two even steps, which are rounded up there and to the even one here."""
    codec, x = ClippedGroups(2, 64, "token", 64, clip=0.96, levels=levels), AUTHORS["rotated"]
    restore = jax.jit(lambda x: codec.restore_groups(*codec.quantize(x), bit_packing.dequantize))
    found, size = np.asarray(restore(jnp.asarray(x)[None, None]))[0, 0], np.abs(x).max(1, keepdims=True)
    assert (np.abs(found - AUTHORS[f"restored_{levels}"]) / size < 1e-5).mean() > 0.99


def test_the_order_of_channels_by_hand():
    """Of variances 1, 2, 3, 4 along the axes, Hadamard's columns stand as those of the 4th, 2nd, 3rd and 1st."""
    columns = make_rotation(np.diag([1.0, 2.0, 3.0, 4.0])) * 2
    hadamard = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    np.testing.assert_allclose(np.abs(hadamard.T @ columns), 4 * np.eye(4)[:, [3, 1, 2, 0]], atol=1e-5)


def quantize_and_restore(y: np.ndarray, clip: float, group: int, levels: str) -> np.ndarray:
    """Clips a rotated vector [H] by its channel of a rank, and rounds its groups to four levels."""
    if clip:
        limit = np.sort(np.abs(y))[min(int(clip * len(y)), len(y) - 1)]
        y = np.clip(y, -limit, limit)
    groups = y.reshape(-1, group)
    if levels == "lloyd_max":
        mean, deviation = groups.mean(1, keepdims=True), groups.std(1, keepdims=True)
        codes = np.searchsorted([-0.98107, 0, 0.98107], (groups - mean) / deviation)
        return (mean + (codes - 1.5) * 2 / 3 * 1.50956 * 1.16 * deviation).reshape(-1)
    low, step = groups.min(1, keepdims=True), np.ptp(groups, axis=1, keepdims=True) / 3
    return (np.round((groups - low) / step) * step + low).reshape(-1)


@pytest.mark.parametrize("levels", ["uniform", "lloyd_max"])
def test_a_batch_is_its_oracle_and_padding_may_hold_infinity(levels):
    batch = layer.random_batch()
    method = kvjax.parse(f"oscar:group=4,sinks=1,recent=4,k_clip=0.9,v_clip=0,levels={levels}")
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))
    tables = Rotations.table_file("shipped").layer_arrays(
        layer.spec(), keys=(1, layer.H, layer.H), values=(1, layer.H, layer.H)
    )

    def reconstruct(name: str, clip: float):
        rotation = tables[name][0].astype(np.float64)

        def restore(x: np.ndarray, prompt: int) -> np.ndarray:
            stored = x.copy()
            # A token leaves the four recent ones at the start of a step, so the newest makes them five.
            for i in range(1, max(prompt - 4, len(x) - 5)):
                stored[i] = quantize_and_restore(x[i] @ rotation, clip, 4, levels) @ rotation.T
            return stored

        return restore

    expected = attend_decoded(batch, reconstruct("keys", 0.9), reconstruct("values", 0.0))
    # Float32 rounds some numbers at a tie to the other of four levels.
    assert np.quantile(np.abs(out - expected), 0.97) < 1e-4
    assert np.abs(attend_decoded(batch, lambda x, _: x, lambda x, _: x) - expected).mean() > 0.01


def test_a_table_is_made_by_calibrate_and_refused_by_other_models(tmp_path):
    model = kvjax.testing.toy_model(layers=1, head_dim=8)
    path = calibrate(model, "rotations:heads=1", tmp_path / "own", [list(range(20)), list(range(7, 19))])
    spec = specs(model.config)[0]
    arrays = Rotations.table_file(str(path)).layer_arrays(spec, keys=(spec.num_kv_heads, 8, 8))
    np.testing.assert_allclose(
        arrays["keys"] @ arrays["keys"].swapaxes(1, 2), np.eye(8)[None] * np.ones((spec.num_kv_heads, 1, 1)), atol=1e-5
    )
    with pytest.raises(KvjaxError, match="head_dim=8, and this one has head_dim=32"):
        layer.bind(f"oscar:table={path}")
    wide = [{name: np.ones((3, layer.H, layer.H), np.float32) for name in ("keys", "values")}]
    bad = table_file.write(tmp_path / "bad", "rotations", layer.spec(), wide)
    with pytest.raises(KvjaxError, match="for 3 groups of heads, which do not divide the layer's 2"):
        layer.bind(f"oscar:table={bad}")
    with pytest.raises(KvjaxError, match="powers of two, and heads have 6 channels; use `kivi`"):
        make_rotation(np.eye(6))
