"""Models that are planned for: their counts are the published ones, and config.json files of any family are read."""

from __future__ import annotations

import json

import pytest

from checkpoints_convert import package_models
from kvjax.cache.accounting import full_bytes
from kvjax.errors import KvjaxError
from kvjax.planning.hardware import CATALOGUE, find_hardware
from kvjax.planning.models import CONFIGURATIONS, QUANTIZED, find_model, read_config_json

PUBLISHED = {  # numbers of the safetensors files on the hub; gemma's without its vision tower
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2": 134_515_008,
    "qwen2.5-coder-0.5b": 494_032_768,
    "qwen2.5-coder-1.5b": 1_543_714_304,
    "gemma3-270m": 268_098_176,
    "gpt-oss-20b": 20_914_757_184,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_written_down_configuration_has_the_published_number_of_parameters(name):
    assert find_model(name).parameters == PUBLISHED[name]


def test_the_models_that_packages_bring_are_known_by_their_names():
    assert set(package_models.MODELS) <= set(CONFIGURATIONS)
    assert find_model("testbed").parameters < 2_000_000


def test_experts_and_windows_are_counted():
    model = find_model("openai/gpt-oss-20b")
    assert round(model.active_parameters / 1e9, 1) == 3.6  # as the model card says
    windows = [model.config.kind(i).attention.rule.window for i in range(2)]
    assert windows == [128, None]
    gemma = find_model("gemma-3-27b")
    assert round(gemma.parameters / 1e9) == 27
    windows = [gemma.config.kind(i).attention.rule.window for i in range(62)]
    assert windows.count(None) == 10


def test_each_configuration_and_each_device_says_where_its_figures_are_from():
    assert all(x.source and x.name == name for name, x in CONFIGURATIONS.items())
    assert all(len(x.source) > 20 and x.name == name for name, x in CATALOGUE.items())


def test_a_config_json_of_a_family_without_a_converter_is_read():
    raw = {"model_type": "some_new_family", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    model = read_config_json(raw | {"num_attention_heads": 4, "intermediate_size": 48}, "new", "config.json")
    assert (model.config.layers, model.config.kind(0).attention.kv_heads) == (2, 4)
    assert any("no converter" in note and "some_new_family" in note for note in model.notes)


def test_a_config_json_with_quantized_experts_is_read(tmp_path):
    raw = {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for path in (tmp_path, tmp_path / "config.json"):
        model = find_model(str(path))
        assert model.parameters == PUBLISHED["gpt-oss-20b"]
        assert model.config.pattern == CONFIGURATIONS["gpt-oss-20b"].config.pattern
        assert any("quantized" in note for note in model.notes) and any("window" in note for note in model.notes)


def test_deepseek_v3_is_planned_with_576_numbers_a_token_and_layer():
    raw = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}
    planned = read_config_json(raw, "v3", "config.json")
    assert planned.parameters == 671_026_404_352 + 14_848 and planned.has_exact_weights
    assert full_bytes(planned.config, [1024], "bfloat16") == 61 * (1024 * (2 * (512 + 64) + 4) + 4) + 4
    assert planned.notes == (QUANTIZED,)


def test_what_cannot_be_planned_for_is_refused_by_name(tmp_path):
    with pytest.raises(KvjaxError, match=r"no model 'llama-3.1-8'; did you mean 'llama-3.1-8b'"):
        find_model("llama-3.1-8")
    with pytest.raises(KvjaxError, match="kv_lora_rank"):
        read_config_json({"model_type": "deepseek_v32", "kv_lora_rank": 512}, "deepseek", "config.json")
    with pytest.raises(KvjaxError, match="config.json has no num_hidden_layers"):
        read_config_json({"hidden_size": 64, "num_attention_heads": 4}, "x", "config.json")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\xff")
    with pytest.raises(KvjaxError, match=r"model.gguf is a GGUF file, .*checkpoints_convert convert .*model.gguf DST"):
        find_model(str(tmp_path / "model.gguf"))
    words = "unknown hardware 'h100x8'; did you mean 'h100'.*a100-40.*v7x.*plan --hardware h100 --mesh .*--budget 2GB"
    with pytest.raises(KvjaxError, match=words):
        find_hardware("h100x8")


def test_hardware_is_found_as_people_write_it():
    assert find_hardware("RTX 4090") is CATALOGUE["rtx-4090"]
