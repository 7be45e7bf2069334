"""Norms and rotary embeddings against their formulas."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.rope import Rope, rotate
from kvjax.errors import KvjaxError
from kvjax.models import Config, RopeScaling
from kvjax.models.layers import RMSNorm

ROPE = Rope(16)


def test_rotation_turns_each_pair_by_position_times_frequency():
    x = np.random.default_rng(0).normal(size=(1, 3, 16))
    pos = np.array([[0, 5, 900]])
    cos, sin = ROPE.angles(jnp.asarray(pos))
    rotated = rotate(jnp.asarray(x, jnp.float32), cos, sin)
    z = x[..., :8] + 1j * x[..., 8:]
    turned = z * np.exp(1j * pos[..., None] * 10_000.0 ** (-np.arange(8) / 8))
    np.testing.assert_allclose(rotated, np.concatenate([turned.real, turned.imag], -1), atol=1e-4)
    np.testing.assert_allclose(rotate(rotated, cos, -sin), x, atol=1e-5)


def test_a_fraction_leaves_the_other_channels_alone():
    config = Config.llama(8, 8, 2, heads=2, kv_heads=1, head_dim=16, mlp_width=8, rope_fraction=0.5)
    rope, x = config.kind(1).attention.rope, jnp.ones((1, 1, 16))
    rotated = rotate(x, *rope.angles(jnp.array([[7]])))
    assert np.array_equal(rotated[..., 8:], x[..., 8:]) and not np.allclose(rotated[..., :8], 1)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    scaled = np.asarray(dataclasses.replace(ROPE, scaling=scaling).frequencies())
    plain = 10_000.0 ** (-np.arange(8) / 8)
    wave = 2 * np.pi / plain
    for f, p, w in zip(scaled, plain, wave, strict=True):
        if w < 64 / 4:
            expected = p
        elif w > 64:
            expected = p / 8
        else:
            s = (64 / w - 1) / 3
            expected = (1 - s) * p / 8 + s * p
        np.testing.assert_allclose(f, expected, rtol=1e-5)


def test_norms_are_float32_inside():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64)) * 300, jnp.bfloat16)
    norm = RMSNorm((64,), 1e-5, dtype=jnp.bfloat16)
    normalized = norm.apply({"params": {"scale": jnp.ones(64, jnp.bfloat16)}}, x)
    exact = np.asarray(x, np.float64) / np.sqrt((np.asarray(x, np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    assert normalized.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(normalized, np.float64), exact, rtol=2**-8)


def llama(**changes) -> Config:
    sizes = {"vocab_size": 8, "width": 8, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp_width": 8}
    return Config.llama(**{**sizes, **changes})


def test_a_config_survives_its_file():
    config = llama(windows=(None, 4), rope_scaling=RopeScaling("linear", 2.0), eos_ids=(1, 2))
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: llama(heads=3, kv_heads=2), "heads .3. must be a multiple of kv_heads"),
        (lambda: llama(windows=(4,)), "windows has 1 entries for 2 layers"),
        (lambda: llama(layers=0), "layers must be an integer from 1 to"),
        (lambda: RopeScaling("dynamic", 2.0), "'dynamic' is not supported"),
        (lambda: Config.from_json("{}"), "convert the checkpoint again"),
        (lambda: Config.from_json("nonsense"), "the model configuration is not valid JSON"),
    ],
)
def test_a_config_that_cannot_be_is_refused(make, says):
    with pytest.raises(KvjaxError, match=says):
        make()
