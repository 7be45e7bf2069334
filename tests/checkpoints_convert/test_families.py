"""The tables, against plain NumPy indexing of the stored weights."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

import kvjax
from checkpoints_convert.check import check
from checkpoints_convert.conversion_plan import plan_conversion
from checkpoints_convert.convert import convert
from checkpoints_convert.families import FAMILIES as MODEL_TYPES
from checkpoints_convert.families import PREFIXES, find_prefixes, is_buffer
from checkpoints_convert.source import Directory
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.models.checkpoint import parameter_shapes
from tests.fixtures import FAMILIES, LOUD, ROOT, load_family


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


@pytest.mark.parametrize("directory", [*FAMILIES, *(f"loud/{name}" for name in LOUD)])
def test_every_parameter_has_one_source_and_split_is_inverted_by_join(directory):
    source = Directory(ROOT / directory)
    plan = plan_conversion(source)
    parameter_names = []
    for binding in plan.bindings:
        tensors = [source.read(name) for name in binding.sources]
        parameters = binding.split(tensors)
        parameter_names += parameters
        assert len(binding.join(parameters)) == len(tensors)
        for joined, tensor in zip(binding.join(parameters), tensors, strict=True):
            np.testing.assert_array_equal(joined, tensor)
            assert joined.dtype == tensor.dtype
    assert sorted(parameter_names) == sorted(parameter_shapes(plan.config))


def test_families_share_one_table():
    first = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3")
    assert {MODEL_TYPES[kind].tables for kind in first} == {MODEL_TYPES["llama"].tables}
    phi3, llama = ({t for rule in MODEL_TYPES[kind].tables[0] for t in rule.targets} for kind in ("phi3", "llama"))
    assert phi3 == llama


def load_loud(name: str) -> dict[str, np.ndarray]:
    return {k: x.astype(np.float32) for k, x in load_file(ROOT / "loud" / name / "model.safetensors").items()}


def test_experts_are_stacked():
    config, params, _ = load_family("mixtral")
    weights, ours = load_loud("mixtral"), params["layer_1"]["mlp"]
    prefix = "model.layers.1.block_sparse_moe"
    np.testing.assert_array_equal(ours["router"]["kernel"], weights[f"{prefix}.gate.weight"].T)
    for e in range(config.kind(1).mlp.experts.count):
        for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            np.testing.assert_array_equal(ours[name]["kernel"][e], weights[f"{prefix}.experts.{e}.{theirs}.weight"].T)


def test_joined_experts_are_split():
    config, params, _ = load_family("qwen3_moe_joined")
    (layer,) = (i for i in range(config.layers) if config.kind(i).mlp.experts is not None)
    weights, ours = load_loud("qwen3_moe_joined"), params[f"layer_{layer}"]["mlp"]
    joined = weights[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
    width = joined.shape[1] // 2
    np.testing.assert_array_equal(ours["gate"]["kernel"], joined[:, :width].swapaxes(1, 2))
    np.testing.assert_array_equal(ours["up"]["kernel"], joined[:, width:].swapaxes(1, 2))
    down = weights[f"model.layers.{layer}.mlp.experts.down_proj"]
    np.testing.assert_array_equal(ours["down"]["kernel"], down.swapaxes(1, 2))


def test_halves_of_gpt_oss_are_interleaved():
    _, params, _ = load_family("gpt_oss")
    weights, ours = load_loud("gpt_oss"), params["layer_2"]["mlp"]
    joined, bias = (weights[f"model.layers.2.mlp.experts.gate_up_proj{end}"] for end in ("", "_bias"))
    for name, first in (("gate", 0), ("up", 1)):
        np.testing.assert_array_equal(ours[name]["kernel"], joined[..., first::2])
        np.testing.assert_array_equal(ours[name]["bias"], bias[..., first::2])
    np.testing.assert_array_equal(ours["down"]["kernel"], weights["model.layers.2.mlp.experts.down_proj"])
    sinks = weights["model.layers.2.self_attn.sinks"]
    np.testing.assert_array_equal(params["layer_2"]["attention"]["sinks"].reshape(-1), sinks)


def test_a_layer_of_gemma_4_has_its_own_rows_of_the_second_embedding():
    config, params, _ = load_family("gemma4_shared")
    weights, prefix = load_loud("gemma4_shared"), "model.language_model"
    J = config.per_layer_embedding.width
    for i in range(config.layers):
        rows = slice(i * J, (i + 1) * J)
        table, projection = (
            weights[f"{prefix}.{name}.weight"] for name in ("embed_tokens_per_layer", "per_layer_model_projection")
        )
        np.testing.assert_array_equal(params["per_layer_table"][:, i], table[:, rows])
        np.testing.assert_array_equal(params["per_layer_map"][:, i], projection[rows].T)
    assert "k" not in params["layer_3"]["attention"] and "v" in params["layer_2"]["attention"]


def test_experts_of_gemma_4_stand_beside_an_mlp_and_keys_serve_as_values():
    config, params, _ = load_family("gemma4_moe")
    weights, ours = load_loud("gemma4_moe"), params["layer_1"]["mlp"]
    F, joined = config.kind(1).mlp.width, weights["model.layers.1.experts.gate_up_proj"]
    np.testing.assert_array_equal(ours["gate"]["kernel"], joined[:, :F].swapaxes(1, 2))
    np.testing.assert_array_equal(ours["up"]["kernel"], joined[:, F:].swapaxes(1, 2))
    np.testing.assert_array_equal(ours["shared"]["up"]["kernel"], weights["model.layers.1.mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(ours["expert_factors"], weights["model.layers.1.router.per_expert_scale"])
    norm = weights["model.layers.1.post_feedforward_layernorm_2.weight"]
    np.testing.assert_array_equal(ours["experts_post_norm"]["scale"], norm)
    assert [("v" in params[f"layer_{i}"]["attention"]) for i in (0, 1)] == [True, False]


def test_projections_of_a_layer_that_reads_keys_and_values_are_left_out(hf):
    """Files of models with shared layers may have them; transformers passes over them."""
    name, x = "model__language_model__layers__{}__self_attn__k_proj__weight", np.ones((16, 16), np.float32)
    editable, number = (
        hf("loud/gemma4_shared"),
        plan_conversion(Directory(ROOT / "loud" / "gemma4_shared")).num_left_out,
    )
    directory = editable.tensors(**{name.format(3): x})
    assert plan_conversion(Directory(directory)).num_left_out == number + 1
    with pytest.raises(KvjaxError, match="layers.5.self_attn.k_proj.weight: no such tensor"):
        plan_conversion(Directory(editable.tensors(**{name.format(5): x})))


@pytest.mark.parametrize(("name", "source"), [("deepseek_v2", "q_b_proj"), ("deepseek_v2_lite", "q_proj")])
def test_channels_with_position_come_first_and_in_halves(name, source):
    config, params, _ = load_family(name)
    attention = config.kind(1).attention
    P, U, R, N = attention.rope.dim, attention.latent.unrotated, attention.latent.rank, attention.heads
    weights, ours = load_loud(name), params["layer_1"]["attention"]
    prefix = "model.layers.1.self_attn"
    heads = weights[f"{prefix}.{source}.weight"].reshape(N, U + P, -1)
    down = weights[f"{prefix}.kv_a_proj_with_mqa.weight"]
    for pair in range(P // 2):
        for half in (0, 1):
            channel = 2 * pair + half
            np.testing.assert_array_equal(ours["q"]["kernel"][:, :, half * P // 2 + pair], heads[:, U + channel].T)
            np.testing.assert_array_equal(ours["kv_down"]["kernel"][:, half * P // 2 + pair], down[R + channel])
    np.testing.assert_array_equal(ours["q"]["kernel"][:, :, P:], heads[:, :U].transpose(2, 0, 1))
    np.testing.assert_array_equal(ours["kv_down"]["kernel"][:, P:], down[:R].T)
    up = weights[f"{prefix}.kv_b_proj.weight"].reshape(N, U + attention.latent.value, R)
    np.testing.assert_array_equal(ours["key_up"], up[:, :U])
    np.testing.assert_array_equal(ours["value_up"], up[:, U:])


def test_biases_by_which_experts_are_chosen_stay_in_float32(tmp_path):
    weights = load_loud("deepseek_v3")
    convert(ROOT / "loud" / "deepseek_v3", tmp_path / "model")
    assert checkpoint.read_manifest(tmp_path / "model").dtype == "bfloat16"
    assert check(ROOT / "loud" / "deepseek_v3", tmp_path / "model", compare_logits=False).tensors == len(weights)
    model = kvjax.load(tmp_path / "model", dtype="bfloat16")
    bias = model.params["layer_1"]["mlp"]["choice_bias"]
    np.testing.assert_array_equal(bias, weights["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert (model.dtype, bias.dtype) == ("bfloat16", "float32")
    assert np.any(bias != bias.astype("bfloat16").astype("float32"))
    checkpoint.save(tmp_path / "again", model.config, model.params)
    _, params = checkpoint.restore(tmp_path / "again")
    np.testing.assert_array_equal(params["layer_1"]["mlp"]["choice_bias"], bias)
    assert params["embedding"].dtype == "bfloat16"


def test_what_a_recurrence_has_in_float32_leaves_the_model_in_bfloat16(hf):
    editable = hf("loud/qwen3_5")
    stored = load_loud("qwen3_5")
    wide = {name: x for name, x in stored.items() if name.endswith(("linear_attn.norm.weight", ".A_log", ".dt_bias"))}
    assert len(wide) == 3 * sum(name.endswith(".A_log") for name in stored)
    directory = editable.tensors(**{name.replace(".", "__"): x.astype(np.float32) for name, x in wide.items()})
    assert plan_conversion(Directory(directory)).dtype == "bfloat16"
    (name,) = (name for name in stored if name.endswith("layers.0.linear_attn.out_proj.weight"))
    directory = editable.tensors(**{name.replace(".", "__"): stored[name].astype(np.float32)})
    assert plan_conversion(Directory(directory)).dtype == "float32"


@pytest.mark.parametrize(("later", "layer", "is_refused"), [(1, 3, False), (1, 4, True), (0, 3, True), (2, 4, False)])
def test_layers_that_predict_later_tokens_are_left_out(hf, later, layer, is_refused):
    editable = hf("loud/glm4_moe")
    editable.config(num_nextn_predict_layers=later)
    directory = editable.tensors(**{f"model__layers__{layer}__eh_proj__weight": np.ones((2, 2), np.float32)})
    if is_refused:
        with pytest.raises(KvjaxError, match=f"layers.{layer}.eh_proj.weight: no such tensor"):
            plan_conversion(Directory(directory))
    else:
        assert plan_conversion(Directory(directory)).num_left_out == 1


@pytest.mark.parametrize(
    ("name", "shape", "ignored"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (4,), True),
        ("model.rotary_emb.inv_freq", (4,), True),
        ("rotary_emb.inv_freq", (4,), True),
        ("model.rotary_emb_local.original_inv_freq", (4,), True),
        ("model.rotary_emb.sliding_attention_inv_freq", (4,), True),
        ("layers.0.self_attn.rotary_emb.cos_cached", (1, 1, 8, 4), True),
        ("model.layers.0.self_attn.rotary_emb.sin_cached", (8, 4), True),
        ("model.embeddings.position_ids", (1, 8), True),
        ("model.layers.0.self_attn.masked_bias", (), True),
        ("model.layers.0.attn.masked_bias", (1,), True),
        ("layers.0.attn.bias", (1, 1, 8, 8), True),
        ("model.layers.0.self_attn.bias", (8, 8), True),
        ("model.layers.0.attention.bias", (1, 1, 8, 8), True),
        ("model.causal_mask", (8, 8), True),
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), False),
        ("model.layers.0.self_attn.q_proj.bias", (8,), False),
        ("model.layers.0.self_attn.bias", (8,), False),
        ("model.layers.0.attn.bias", (8, 4), False),
        ("model.layers.0.attn.bias", (4, 8, 8), False),
        ("model.layers.0.self_attn.masked_bias", (8,), False),
        ("model.layers.0.attn.unmasked_bias", (), False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq_scale", (4,), False),
        ("model.my_rotary_emb.inv_freq", (4,), False),
    ],
)
def test_ignored_buffers(name, shape, ignored):
    assert is_buffer(name, shape) == ignored


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod.", "base_model.model."])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_are_those_of_the_layers(wrapper, prefix):
    names = [f"{wrapper}{prefix}layers.{i}.mlp.up_proj.weight" for i in range(3)]
    others = ["vision_tower.encoder.layers.0.mlp.weight"] * 4 + ["strangers.layers.0.weight", "layers", "sublayers.1.w"]
    assert find_prefixes(names + others) == (wrapper + prefix, wrapper + PREFIXES[prefix])
    assert find_prefixes(others) == ("model.", "lm_head.")
