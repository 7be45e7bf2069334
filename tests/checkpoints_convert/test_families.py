"""The tables, against plain NumPy indexing of the stored weights."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints_convert.conversion_plan import plan_conversion
from checkpoints_convert.families import FAMILIES as MODEL_TYPES
from checkpoints_convert.families import IGNORED
from checkpoints_convert.source import Directory
from kvjax.models.checkpoint import parameter_shapes
from tests.fixtures import FAMILIES, ROOT, load_family


def load_tensors(name: str) -> dict[str, np.ndarray]:
    files = sorted((ROOT / name).glob("*.safetensors"))
    return {k: x.astype(np.float32) for f in files for k, x in load_file(f).items()}


@pytest.mark.parametrize("name", ["llama3", "llama_mqa", "llama2"])
def test_heads_are_split_as_the_glossary_says(name):
    """Query head n = k * G + g owns rows n * H .. (n + 1) * H of q_proj, and those columns of o_proj."""
    config, params, _ = load_family(name)
    attention = config.kind(1).attention
    H, G = attention.head_dim, attention.groups
    weights, ours = load_tensors(name), params["layer_1"]["attention"]
    for k in range(attention.kv_heads):
        rows = slice(k * H, (k + 1) * H)
        np.testing.assert_array_equal(
            ours["k"]["kernel"][:, k], weights["model.layers.1.self_attn.k_proj.weight"][rows].T
        )
        np.testing.assert_array_equal(
            ours["v"]["kernel"][:, k], weights["model.layers.1.self_attn.v_proj.weight"][rows].T
        )
        for g in range(G):
            n = k * G + g
            rows = slice(n * H, (n + 1) * H)
            q, o = (weights[f"model.layers.1.self_attn.{m}_proj.weight"] for m in "qo")
            np.testing.assert_array_equal(ours["q"]["kernel"][:, k, g], q[rows].T)
            np.testing.assert_array_equal(ours["o"]["kernel"][k, g], o[:, rows].T)


def test_fused_projections_are_split():
    config, params, _ = load_family("phi3")
    a, F = config.kind(0).attention, config.kind(0).mlp.width
    N, K, H = a.heads, a.kv_heads, a.head_dim
    weights, ours = load_tensors("phi3"), params["layer_0"]
    qkv, gate_up = (
        weights["model.layers.0.self_attn.qkv_proj.weight"],
        weights["model.layers.0.mlp.gate_up_proj.weight"],
    )

    def flat(name):
        return np.asarray(ours["attention"][name]["kernel"]).reshape(config.width, -1).T

    np.testing.assert_array_equal(flat("q"), qkv[: N * H])
    np.testing.assert_array_equal(flat("k"), qkv[N * H : N * H + K * H])
    np.testing.assert_array_equal(flat("v"), qkv[N * H + K * H :])
    np.testing.assert_array_equal(ours["mlp"]["gate"]["kernel"].T, gate_up[:F])
    np.testing.assert_array_equal(ours["mlp"]["up"]["kernel"].T, gate_up[F:])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_one_source_and_split_is_inverted_by_join(name):
    source = Directory(ROOT / name)
    plan = plan_conversion(source)
    parameter_names = []
    for binding in plan.bindings:
        tensor = source.read(binding.source)
        parameters = dict(binding.split(tensor))
        parameter_names += parameters
        np.testing.assert_array_equal(binding.join(parameters), tensor)
    assert sorted(parameter_names) == sorted(parameter_shapes(plan.config))


def test_families_share_one_table():
    assert {f.rules for k, f in MODEL_TYPES.items() if k != "phi3"} == {MODEL_TYPES["llama"].rules}
    phi3, llama = ({t for rule in MODEL_TYPES[kind].rules for t in rule.targets} for kind in ("phi3", "llama"))
    assert phi3 == llama


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("model.rotary_emb.inv_freq", True),
        ("model.embeddings.position_ids", True),
        ("model.layers.0.self_attn.q_proj.weight", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq_scale", False),
    ],
)
def test_ignored_buffers(name, ignored):
    assert bool(IGNORED.search(name)) == ignored
