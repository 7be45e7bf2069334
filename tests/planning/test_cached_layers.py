"""What a plan counts of a config.json is what the model's cache in transformers holds, or the config is refused."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax import cli
from kvjax.errors import KvjaxError
from kvjax.planning.models import PlannedModel, find_model, read_config_json
from kvjax.planning.plan import plan

FILE = Path(__file__).parents[1] / "fixtures" / "cached_layers.json"
MODELS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()[1:]]
"""Decoders of transformers with their default sizes, and what their caches hold; see make_cached_layers.py."""
REFUSED = {
    "kv_lora_rank": "axk1 axk2 bailing_hybrid deepseek_v32 dots3_note_text glm_moe_dsa hy_v4 "
    "kimi_linear minicpm3 sarvam_mla youtu",
    "is_encoder_decoder": "bigbird_pegasus",
    "prompt_types": "cpmant",
    "q_lora_rank": "deepseek_v4",
    "n_input_layers": "dory",
    "H_cycles": "hrm_text",
    "n_layers_per_attn_res_block": "inkling2_loop_text inkling2_text",
    "state_size": "falcon_mamba mamba mamba2",
    "index_n_heads": "minimax_m3_vl_text",
    "model_type": "git",
}
"""Key -> models that hold something else than keys and values, or hold them by rules that a plan does not know."""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
REASONS = {name: key for key, names in REFUSED.items() for name in names.split()}


def held(model: PlannedModel) -> collections.Counter[tuple[int, int, int, int | None]]:
    """Layers with a cache of their own by (key/value heads, width of keys, width of values, window)."""
    c = model.config
    kinds = (c.kind(i).attention for i in range(c.layers))
    return collections.Counter((a.kv_heads, a.head_dim, a.value_dim, a.rule.window) for a in kinds if a.stored_numbers)


@pytest.mark.parametrize("model", MODELS, ids=[model["name"] for model in MODELS])
def test_layers_hold_what_the_caches_of_transformers_hold(model):
    name, tokens = model["name"], model["tokens"]
    if name in REASONS:
        with pytest.raises(KvjaxError, match=f"config.json has {REASONS[name]} "):
            read_config_json(model["config"], name, "config.json")
        return
    expected: collections.Counter = collections.Counter()
    for kv_heads, num_tokens, width, value_width, layers in model["held"]:
        if name in LATENT:  # the latent vector and the rotated channels, which kvjax holds in one array
            kv_heads, width, value_width = 1, width + value_width, width
        if num_tokens < tokens:  # its cache holds one token less than the window, which the next token completes
            num_tokens += 1
        expected[kv_heads, width, value_width, None if num_tokens >= tokens else num_tokens] += layers
    planned = read_config_json(model["config"], name, "config.json")
    counted: collections.Counter = collections.Counter()
    for (kv_heads, width, value_width, window), layers in held(planned).items():
        local = name == "gpt_neo"  # transformers holds all tokens of its local layers, and masks them
        is_short = window is not None and window < tokens and not local
        counted[kv_heads, width, value_width, window if is_short else None] += layers
    assert counted == expected
    # Weights of families without a converter are an estimate, and say so.
    assert planned.has_exact_weights or any("estimate" in note for note in planned.notes)
    assert 0.55 < planned.parameters / model["parameters"] < 1.35


SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "max_position_embeddings": 32_768,
}
CHUNKS = {"attention_chunk_size": 512, "no_rope_layers": [], "num_key_value_heads": 2}
MAMBA = {"mamba_d_state": 16, "num_key_value_heads": 2}
BLOCKS = [
    {"attention": {"n_heads_in_group": 4, "no_op": False, "window_length": None}},
    {"attention": {"n_heads_in_group": None, "no_op": True}},
    {"attention": {"n_heads_in_group": 8, "window_length": 64}},
    {"attention": {"replace_with_linear": True}},
] * 2
ALL = {(8, 32, 32, None): 8}
ALTERNATING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("falcon", {}, {(1, 32, 32, None): 8}),
        ("falcon", {"multi_query": True, "num_kv_heads": 8}, {(1, 32, 32, None): 8}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}, {(4, 32, 32, None): 8}),
        ("falcon", {"multi_query": False, "num_kv_heads": 4}, {(8, 32, 32, None): 8}),
        ("gpt_bigcode", {}, {(1, 32, 32, None): 8}),
        ("gpt_bigcode", {"multi_query": False}, {(8, 32, 32, None): 8}),
        ("chatglm", {"multi_query_attention": True, "multi_query_group_num": 2}, {(2, 32, 32, None): 8}),
        ("mpt", {"attn_config": {"kv_n_heads": 2, "attn_type": "grouped_query_attention"}}, {(2, 32, 32, None): 8}),
        ("openelm", {"num_kv_heads": [1] * 5 + [4] * 3}, {(1, 32, 32, None): 5, (4, 32, 32, None): 3}),
        ("deci", {"num_key_value_heads_per_layer": [4] * 4 + [1] * 4}, {(4, 32, 32, None): 4, (1, 32, 32, None): 4}),
        ("nemotron-nas", {"block_configs": BLOCKS}, {(2, 32, 32, None): 2, (1, 32, 32, 64): 2}),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*-M-E", "num_key_value_heads": 2}, {(2, 32, 32, None): 1}),
        ("jamba", {"attn_layer_period": 4, "attn_layer_offset": 1, **MAMBA}, {(2, 32, 32, None): 2}),
        ("bamba", {"attn_layer_indices": [2, 5], **MAMBA}, {(2, 32, 32, None): 2}),
        ("lfm2", {"full_attn_idxs": [1, 3, 5], "conv_L_cache": 3, "num_key_value_heads": 4}, {(4, 32, 32, None): 3}),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 4, "num_key_value_heads": 4}, {(4, 32, 32, None): 4}),
        ("minimax_text_01", {"attn_type_list": [0, 0, 0, 1] * 2, "num_key_value_heads": 2}, {(2, 32, 32, None): 2}),
        (
            "new",
            {"full_attention_interval": 4, "head_dim": 64, "num_key_value_heads": 2, "linear_num_key_heads": 4},
            {(2, 64, 64, None): 2},
        ),
        (
            "recurrent_gemma",
            {"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 128, "lru_width": 256},
            {(8, 32, 32, 128): 2},
        ),
        (
            "llama4_text",
            {"attention_chunk_size": 512, "no_rope_layers": [], "num_key_value_heads": 2},
            {(2, 32, 32, 512): 6, (2, 32, 32, None): 2},
        ),
        (
            "gemma3n_text",
            {"layer_types": ALTERNATING, "sliding_window": 64, "num_kv_shared_layers": 4, "num_key_value_heads": 2},
            {(2, 32, 32, 64): 3, (2, 32, 32, None): 1},
        ),
        (
            "gemma4_unified_text",
            {"layer_types": ALTERNATING, "sliding_window": 64, "head_dim": 32, "global_head_dim": 64}
            | {"num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            {(4, 32, 32, 64): 6, (1, 64, 64, None): 2},
        ),
        (
            "exaone4",
            {"sliding_window": 64, "sliding_window_pattern": "LLLG"},
            {(8, 32, 32, 64): 6, (8, 32, 32, None): 2},
        ),
        ("cohere2", {"sliding_window": 64, "sliding_window_pattern": 4}, {(8, 32, 32, 64): 6, (8, 32, 32, None): 2}),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": "LLLG"}, {(8, 32, 32, None): 8}),
        (
            "qwen2_moe",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 6},
            {(8, 32, 32, None): 6, (8, 32, 32, 64): 2},
        ),
        ("new", {"sliding_window": 64}, {(8, 32, 32, 64): 8}),
        ("new", {"sliding_window": 64, "use_sliding_window": False}, {(8, 32, 32, None): 8}),
        ("new", {"per_layer_config": {"01": {"head_dim": 64}}}, {(8, 32, 32, None): 7, (8, 64, 64, None): 1}),
        ("new", {"head_dim": 48, "v_head_dim": 16, "num_key_value_heads": 2}, {(2, 48, 16, None): 8}),
        ("olmo", {"n_kv_heads": 2, "block_group_size": 1, "block_type": "sequential"}, {(2, 32, 32, None): 8}),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [2] * 8, "moe_intermediate_size": [64] * 8}, ALL),
        # Keys of published files, whose names speak of layers and heads and that change no cache.
        ("bloom", {"offset_alibi": 100, "skip_bias_add_qkv": False, "masked_softmax_fusion": True}, ALL),
        ("telechat", {"flash_attn": True, "training_seqlen": 8192}, ALL),
        ("phi4mm", {"full_attn_mod": 1, "embd_layer": {"embedding_cls": "image_audio"}}, ALL),
        (
            "phi3small",
            {"blocksparse_block_size": 64, "blocksparse_num_local_blocks": 16, "dense_attention_every_n_layers": 2},
            ALL,
        ),
        ("bailing_moe", {"norm_head": True}, ALL),
        ("mpt", {"attn_config": {"fused_qkv": True, "flash_attention": True}}, ALL),
        ("ernie4_5", {"use_sparse_flash_attn": True, "num_key_value_heads": 8, "head_dim": 32}, ALL),
        ("qwen2_5_omni_text", {"seconds_per_chunk": 2, "global_view_pos": "head"}, ALL),
        (
            "cohere2",
            {"sliding_window": 64, "sliding_window_pattern": 4, "layer_switch": 4},
            {(8, 32, 32, 64): 6, (8, 32, 32, None): 2},
        ),
    ],
)
def test_each_way_of_saying_what_attends_is_read(model_type, keys, expected):
    for raw in (SIZES | keys, {"text_config": SIZES | keys | {"model_type": model_type}, "vision_config": {"x": 1}}):
        assert held(read_config_json({"model_type": model_type, **raw}, model_type, "config.json")) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kv_cache_sharing": "cla"}, "config.json has kv_cache_sharing 'cla': it may change what the cache holds"),
        ({"cla_share_factor": 2}, "config.json has cla_share_factor 2"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "hold a state in place of keys and values"),
        ({"mamba_d_state": 16}, "config.json has mamba_d_state 16: some of its layers hold a state"),
        ({"layer_types": ["full_attention"] * 7}, "it names 7 layers, and the model has 8"),
        ({"layer_types": ["full_attention", "gated_delta"] * 4}, "'gated_delta' is no layer that kvjax knows"),
        ({"layer_types": ["mamba"] * 8}, "no layer that holds keys and values"),
        ({"layer_types": ALTERNATING}, "has no sliding_window"),
        ({"layer_types": 5}, "config.json has layer_types 5: it cannot be read"),
        (
            {"layers_block_type": ["mamba", "attention"] * 4, "attn_layer_period": 4, "mamba_d_state": 16},
            "attn_layer_period 4: it differs from layers_block_type",
        ),
        ({"num_key_value_heads": 3}, "8 heads and 3 key/value heads in layer 0"),
        ({"num_key_value_heads": "4"}, "num_key_value_heads .*must be an integer"),
        ({"num_key_value_heads": [1, 2]}, "it has 2 entries, and there is a layer 2"),
        ({"per_layer_config": {"1": {"kv_rank": 2}}}, "does not know kv_rank for single layers"),
        ({"block_configs": [1] * 8}, "block_configs .*must describe each of 8 layers"),
        ({"is_encoder_decoder": True}, "a decoder alone can be planned for"),
        (
            {"model_type": "bamba", "mamba_d_state": 16},
            "no num_key_value_heads, which model_type 'bamba'",
        ),
        ({"model_type": "bert"}, "attend to later ones"),
    ],
)
def test_a_key_that_may_change_what_is_held_and_is_not_understood_is_refused_by_name(keys, message):
    with pytest.raises(KvjaxError, match=message):
        read_config_json({"model_type": "new", **SIZES, **keys}, "new", "config.json")


def test_a_decoder_of_a_known_family_inside_of_another_has_its_defaults():
    text = {"model_type": "mistral", "num_hidden_layers": 2, "vocab_size": 32_064, "sliding_window": None}
    model = read_config_json({"model_type": "llava_next", "text_config": text}, "llava", "config.json")
    assert held(model) == {(8, 128, 128, None): 2} and "decoder alone" in model.notes[0]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported$"),
        ({"architectures": ["Qwen2ForRewardModel"]}, "architecture 'Qwen2ForRewardModel'"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_what_a_converter_refuses_and_changes_no_shape_is_planned_for_and_said(keys, reason):
    raw = {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2}
    for config in (raw | keys, {"model_type": "new_vl", "text_config": raw | keys}):
        model = read_config_json(config, "qwen2", "config.json")
        assert held(model) == {(2, 32, 32, None): 8}
        assert any(re.search(f"converts no checkpoint of it.*{reason}", note) for note in model.notes)
        assert ("quantization_config" in keys) == any("file holds them quantized" in note for note in model.notes)
    with pytest.raises(KvjaxError, match="num_hidden_layers must be a positive integer"):
        read_config_json(raw | keys | {"num_hidden_layers": 0}, "qwen2", "config.json")


def test_latent_attention_that_is_switched_off_holds_keys_and_values():
    off = {"use_mla": False, "kv_lora_rank": None, "qk_nope_head_dim": 0, "v_head_dim": 0, "lm_head": True}
    raw = {"model_type": "deepseek_v2", **SIZES, **off}
    for config in (raw, {"model_type": "new_vl", "language_config": raw}):
        assert held(read_config_json(config, "ocr", "config.json")) == ALL


@pytest.mark.parametrize(
    ("model_type", "keys", "experts", "dense"),
    [
        ("jamba", {"attn_layer_period": 4, "expert_layer_period": 2, "expert_layer_offset": 1, **MAMBA}, 4, 4),
        ("llama4_text", {"interleave_moe_layer_step": 4, "intermediate_size_mlp": 512} | CHUNKS, 2, 6),
        ("llama4_text", CHUNKS, 8, 0),
        ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 4, "num_key_value_heads": 4}, 8, 0),
    ],
)
def test_estimated_weights_have_the_experts_of_each_layer_and_a_token_reads_few_of_them(
    model_type, keys, experts, dense
):
    """Also in layers that hold no keys, which most layers with experts of hybrids are."""
    few, many = (
        read_config_json(
            {"model_type": model_type, **SIZES, **keys, "num_experts": count, "num_experts_per_tok": 2},
            "",
            "config.json",
        )
        for count in (4, 20)
    )
    one_mlp, routers = 3 * 256 * 512, 16 * 256 * 8
    assert experts * 16 * one_mlp <= many.parameters - few.parameters <= experts * 16 * one_mlp + routers
    assert 0 <= many.active_parameters - few.active_parameters <= routers
    # The rest are attention, recurrent layers, norms and embeddings: at most six squares of the width for each layer.
    assert 0 < few.parameters - (experts * 4 + dense) * one_mlp < 8 * 6 * 256**2 + 2 * 100 * 256 + routers


LFM2_1_2B = {  # as published on the hub, without what concerns training
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12_288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128_000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "tie_embedding": True,
    "vocab_size": 65_536,
}


def test_a_hybrid_holds_the_keys_of_its_six_layers_that_attend(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LFM2_1_2B))
    assert cli.main(["plan", str(tmp_path), "--method", "full", "--context", "32k", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    notes = "\n".join(document["notes"])
    assert document["plans"][0]["device_bytes"]["cache"] == pytest.approx(2 * 6 * 8 * 64 * 32_768 * 2, rel=0.01)
    assert "16 layers" in notes and "10 of 16 layers hold no keys and values" in notes
    assert "Caches are counted exactly" in notes and "weights are an estimate" in notes
    assert document["model"]["parameters"] == pytest.approx(1.17e9, rel=0.01)


def test_weights_are_those_of_the_safetensors_beside_a_config(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(SIZES | {"model_type": "new", "layer_types": ["conv", "attention"] * 4})
    )
    save_file({"a": np.zeros((1000, 500), np.float16), "b": np.zeros(24, np.float32)}, tmp_path / "model.safetensors")
    model = find_model(str(tmp_path))
    (p,) = plan(model, ["full"], [64], hardware="l4")
    assert model.parameters == 500_024 and model.has_exact_weights and p.device_bytes is not None
    assert p.device_bytes.weights == 2 * 500_024
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    assert not find_model(str(tmp_path)).has_exact_weights
