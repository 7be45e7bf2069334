"""Norms and rotary embeddings against their formulas."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.attention import Rule
from kvjax.core.rope import Rope, rotate
from kvjax.errors import KvjaxError
from kvjax.models import Config, RopeScaling
from kvjax.models.kinds import AttentionKind, Experts, Latent, LayerKind, MlpKind
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


OLD_CONFIG = """{
  "vocab_size": 8,
  "width": 8,
  "layers": 2,
  "heads": 2,
  "kv_heads": 1,
  "head_dim": 16,
  "mlp_width": 8,
  "max_positions": 4096,
  "norm_eps": 1e-05,
  "rope_theta": 10000.0,
  "rope_fraction": 0.5,
  "rope_scaling": {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_positions": 8192
  },
  "windows": [
    null,
    4
  ],
  "tie_embeddings": false,
  "qkv_bias": true,
  "out_bias": false,
  "mlp_bias": false,
  "qk_norm": true,
  "eos_ids": [
    1
  ],
  "bos_id": null
}
"""


def test_files_from_before_there_were_kinds_are_read_and_stay_as_they_are():
    """Saved contexts and records hold digests of this text."""
    config = Config.from_json(OLD_CONFIG)
    assert [kind.attention.rule.window for kind in config.kinds] == [None, 4] and config.pattern == (0, 1)
    assert config.kind(1).attention.rope == Rope(8, 10_000.0, RopeScaling("llama3", 8.0))
    assert config.kind(0).attention.qk_norm == "head" and config.kind(0).attention.qkv_bias
    assert config.to_json() == OLD_CONFIG
    assert eval(repr(config)) == config and repr(config).startswith("Config.llama(vocab_size=8, width=8, layers=2, ")


def kinds(**changes) -> Config:
    """Two kinds that no flat call can make."""
    attention = AttentionKind(4, 2, 8, None, Rule(None, 30.0), value_dim=6, scale=0.1, qk_norm="all", sinks=True)
    latent = AttentionKind(4, 1, 20, Rope(8), value_dim=12, latent=Latent(12, 6, 5, 10))
    mlp = MlpKind(12, "gelu_tanh", experts=Experts(4, 2, False, 2.0, shared_width=7, groups=2))
    both = LayerKind(attention, mlp, "both", residual=0.5), LayerKind(latent, MlpKind(9), "after")
    fields = {"vocab_size": 8, "width": 8, "kinds": both, "pattern": (0, 1, 0), "final_cap": 15.0, "embed_scale": 2.0}
    return Config(**{**fields, **changes})


def test_a_config_of_kinds_survives_its_file():
    config = kinds(eos_ids=(1,), logit_scale=0.25)
    assert Config.from_json(config.to_json()) == config and eval(repr(config)) == config
    assert config.llama_arguments() is None and [config.kind(i) for i in range(3)] == [*config.kinds, config.kinds[0]]
    assert config.with_layers([1, 1]).kinds == config.kinds[1:]
    assert config.ropes == (Rope(8),)


ATTENTION = {"heads": 4, "kv_heads": 2, "head_dim": 8, "rope": Rope(8)}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: llama(heads=3, kv_heads=2), "heads .3. must be a multiple of kv_heads"),
        (lambda: llama(windows=(4,)), "windows has 1 entries for 2 layers"),
        (lambda: llama(layers=0), "layers must be an integer from 1 to"),
        (lambda: RopeScaling("dynamic", 2.0), "'dynamic' is not supported"),
        (lambda: Config(8, 8, 2, 4, 2, 8, 16), r"kinds must be a tuple of LayerKind, got 2; Config.llama\(vocab_size"),
        (lambda: kinds(pattern=(0, 2)), r"pattern must name one of the 2 kinds for each layer, .*got \(0, 2\)"),
        (lambda: kinds(pattern=(0, 0)), "kind 1 is in no layer; leave it out"),
        (lambda: kinds(kinds=(kinds().kinds[0],) * 2, pattern=(0, 1)), "two of the kinds are equal"),
        (lambda: kinds(final_cap=0.0), "final_cap must be above 0, got 0.0"),
        (lambda: AttentionKind(**ATTENTION | {"rope": Rope(5)}), "turns 5 channels: their number must be even"),
        (lambda: AttentionKind(**ATTENTION | {"rope": Rope(10)}), "turns 10 channels: .* at most all 8 of a head"),
        (lambda: AttentionKind(**ATTENTION, scale=-1.0), "AttentionKind: scale must be above 0, got -1.0"),
        (lambda: AttentionKind(**ATTENTION, qk_norm="layer"), r"qk_norm must be one of .*, got 'layer'"),
        (lambda: AttentionKind(**ATTENTION, rule=Rule(0)), "Rule: window must lie in \\[1, 2147483647\\], got 0"),
        (lambda: AttentionKind(**ATTENTION, rule=None), "AttentionKind: rule must be a Rule, got None"),
        (lambda: AttentionKind(**ATTENTION, latent=Latent(12, 6, 5)), "kv_heads = 2 for 1, head_dim = 8 for 20"),
        (lambda: Experts(4, 5), "top_k is 5, and a token chooses from 4 experts; lower top_k"),
        (lambda: Experts(6, 1, groups=4), "6 experts cannot be chosen from 1 of 4 equal groups"),
        (lambda: MlpKind(8, "relu"), "MlpKind: activation must be one of"),
        (lambda: LayerKind(AttentionKind(**ATTENTION), MlpKind(8), "pre"), "LayerKind: norms must be one of"),
        (lambda: Config.from_json("{}"), "convert the checkpoint again"),
        (lambda: Config.from_json("nonsense"), "the model configuration is not valid JSON"),
    ],
)
def test_a_config_that_cannot_be_is_refused(make, says):
    with pytest.raises(KvjaxError, match=says):
        make()
