"""GGUF files of each family that the format carries: converted as the directories that they were made from."""

from __future__ import annotations

import dataclasses
import re
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from checkpoints_convert.check import check
from checkpoints_convert.conversion_plan import plan_conversion
from checkpoints_convert.convert import convert, open_source, read
from checkpoints_convert.describe import describe
from checkpoints_convert.gguf.architectures import ARCHITECTURES, File
from checkpoints_convert.gguf.stacks import STACKS
from kvjax.core.rope import longrope_scaling, yarn_scaling
from kvjax.errors import KvjaxError
from kvjax.models.quantized_params import LOG_RATE
from tests.checkpoints_convert.conftest import Editable
from tests.checkpoints_convert.gguf.family_files import ARCHITECTURES as WRITTEN
from tests.checkpoints_convert.gguf.family_files import split_experts, write_family
from tests.fixtures import ROOT

# What a fixture's config.json says and the format cannot, with what llama.cpp's code has in its place.
CHANGES = {
    "deepseek_v2": {"attention_bias": False, "mlp_bias": False},
    "deepseek_v2_lite": {},
    "deepseek_v3": {"attention_bias": False},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3": {"query_pre_attn_scalar": 8},
    "glm4_moe": {},
    "gpt_oss": {"swiglu_alpha": None, "swiglu_limit": None},
    "granite": {},
    "llama_yarn": {},
    "ministral3": {},
    "mixtral": {},
    "olmo2": {},
    "olmo3": {},
    "phi3_longrope": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_next": {"mlp_only_layers": [], "attention_bias": False},
    "qwen3_moe": {"num_hidden_layers": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "seed_oss": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None, "use_sliding_window": False, "layer_types": None},
}


@pytest.fixture
def directory(hf, request) -> Path:
    """A fixture of a family with a config.json that a GGUF file can express."""
    name = request.param
    editable = hf(f"loud/{name}")
    changes = dict(CHANGES[name])
    if name in ("deepseek_v2", "deepseek_v3"):
        changes["rope_parameters"] = None
        changes["rope_theta"] = 100.0
        changes["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        changes["rope_scaling"] |= {"mscale": 0.6, "mscale_all_dim": 0.6}
    layers = changes.get("num_hidden_layers", 9)
    kept = {}
    for tensor, x in load_file(editable.file).items():
        layer = re.match(r"model\.layers\.(\d+)\.", tensor)
        has_no_biases = name.startswith("deepseek_v") or name == "qwen3_next"
        if (layer and int(layer[1]) >= layers) or (has_no_biases and tensor.endswith(".bias")):
            continue
        kept[tensor] = x
        if name == "smollm3" and layer and layer[1] == "0":  # the fourth layer, which has no RoPE
            kept[tensor.replace("layers.0.", "layers.3.")] = x
        if name == "qwen3_next" and ".0.mlp." in tensor:  # the second layer, which has no experts
            kept[tensor.replace(".0.mlp.", ".1.mlp.")] = x
    if name == "qwen3_next":
        kept = {tensor: x for tensor, x in kept.items() if not re.search(r"\.1\.mlp\.\w+_proj", tensor)}
    save_file(kept, editable.file)
    return editable.config(**changes) if changes else editable.directory  # null keys mean something in some families


def assert_same(ours, theirs) -> None:
    ours, theirs = (flatten_dict(tree, sep="/") for tree in (ours, theirs))
    assert ours.keys() == theirs.keys()
    for path, x in theirs.items():
        if path.endswith(LOG_RATE):  # which a file has without the logarithm
            np.testing.assert_allclose(ours.pop(path), x, rtol=1e-6, atol=1e-6, err_msg=path)
            continue
        np.testing.assert_array_equal(ours[path], x, err_msg=path)


def test_every_architecture_is_written_here_or_in_the_tests_of_the_llama_family():
    assert set(WRITTEN.values()) | {"qwen3", "qwen3vl", "qwen3vlmoe"} == set(ARCHITECTURES)


@pytest.mark.parametrize("directory", CHANGES, indirect=True)
def test_a_file_is_the_directory_that_it_was_made_from(directory, tmp_path):
    config, parameters = read(write_family(directory, tmp_path / "model.gguf"))
    expected_config, expected = read(directory)
    assert config == dataclasses.replace(expected_config, eos_ids=config.eos_ids)
    assert_same(parameters, expected)


SECTIONS = [2, 1, 1, 0]


def test_a_file_of_qwen3_vl_is_that_of_qwen3(hf, tmp_path):
    moe = hf("loud/qwen3_moe").config(**CHANGES["qwen3_moe"])
    layers = {t: x for t, x in load_file(moe / "model.safetensors").items() if not t.startswith("model.layers.1")}
    save_file({t: x for t, x in layers.items() if not t.startswith("model.layers.2")}, moe / "model.safetensors")
    for directory, name in ((ROOT / "qwen3", "qwen3"), (moe, "qwen3moe")):
        files = []
        for own, keys in ((name, {}), (name.replace("qwen3", "qwen3vl"), {"rope__dimension_sections": SECTIONS})):
            file = tmp_path / f"{own}.gguf"
            keys |= {} if not keys else {"n_deepstack_layers": 2}
            files.append(read(write_family(directory, file, architecture=own, **keys)))
        (config, parameters), (of_images, its_parameters) = files
        assert config == of_images
        assert_same(its_parameters, parameters)


@pytest.mark.parametrize("directory", ["qwen3_next"], indirect=True)
def test_files_of_qwen3_next_say_one_thing_in_several_ways(directory, tmp_path):
    tensors = load_file(directory / "model.safetensors")

    def change(own):
        for i in (0, 2):  # as in the oldest files, which do not divide this projection
            del own[f"blk.{i}.attn_qkv.weight"], own[f"blk.{i}.attn_gate.weight"]
            joined = tensors[f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"]
            own[f"blk.{i}.ssm_in.weight"] = joined.astype(np.float32)
            own[f"blk.{i}.ffn_gate_inp_shexp.weight"] = own[f"blk.{i}.ffn_gate_inp_shexp.weight"][0]
        # A block that predicts later tokens.
        return own | {f"blk.3.{name}.weight": np.ones(16, np.float32) for name in ("attn_norm", "nextn.enorm")}

    keys = {"full_attention_interval": None, "attention__recurrent_layers": [True, False, True, False]}
    keys |= {"block_count": 4, "nextn_predict_layers": 1}
    config, parameters = read(write_family(directory, tmp_path / "a.gguf", change=change, **keys))
    expected_config, expected = read(directory)
    assert config == dataclasses.replace(expected_config, eos_ids=config.eos_ids)
    assert_same(parameters, expected)
    # Without dense layers a file need not say how wide they would be.
    file = write_family(directory, tmp_path / "b.gguf", feed_forward_length=None)
    assert plan_conversion(open_source(file)).config == config


def test_a_rate_of_decay_that_has_no_logarithm_is_refused(hf, tmp_path):
    def change(own):
        return own | {"blk.1.ssm_a": -own["blk.1.ssm_a"]}

    with pytest.raises(KvjaxError, match="tensors ssm_a of this GGUF file must be negative"):
        read(write_family(hf("loud/qwen3_5").directory, tmp_path / "model.gguf", change=change))


WIDE = {"hidden_size": 32, "intermediate_size": 32}


def widen(directory: Path) -> Path:
    """Pads a fixture to a width of 32, that of a block of codes."""
    tensors = {}
    for name, x in load_file(directory / "model.safetensors").items():
        pads = [(0, 32 - n if n in (16, 24) else 0) for n in x.shape]
        tensors[name] = np.pad(x.astype(np.float32), pads)
    save_file(tensors, directory / "model.safetensors")
    return Editable(directory).config(**WIDE)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("directory", ["mixtral"], indirect=True)
def test_a_tensor_for_each_expert_is_read_as_a_stack_of_them(directory, kind, tmp_path):
    Editable(widen(directory)).config(num_key_value_heads=4)
    stacked = write_family(directory, tmp_path / "stacked.gguf", kind)
    single = write_family(directory, tmp_path / "single.gguf", kind, split_experts)
    assert "blk.1.ffn_down.4.weight" in open_source(single).stored
    config, parameters = read(single)
    assert config == read(stacked)[0]
    assert_same(parameters, read(stacked)[1])
    convert(single, tmp_path / "out")
    assert check(single, tmp_path / "out", compare_logits=False).tensors == len(open_source(single).stored)
    assert describe(single)["convertible"] == "yes"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.pop("blk.1.ffn_up.3.weight"), r"1 problems .*\n.*layers\.1\..*experts\.3\.w3\.weight: missing"),
        (
            lambda x: x.update({"blk.0.ffn_gate.5.weight": x["blk.0.ffn_gate.0.weight"]}),
            r"1 problems .*\n.*layers\.0\..*experts\.5\.w1\.weight: no such tensor",
        ),
        (
            lambda x: x.update({"blk.0.ffn_side.0.weight": x["blk.0.ffn_gate.0.weight"]}),
            r"1 problems .*\n.*blk\.0\.ffn_side\.0\.weight: no such tensor",
        ),
        (
            lambda x: x.update({"blk.0.ffn_down.2.weight": x["blk.0.ffn_down.2.weight"][:-1]}),
            r"1 problems .*\n.*layers\.0\..*experts\.2\.w2\.weight: shape",
        ),
        (
            lambda x: x.update({"blk.0.ffn_up_exps.weight": np.zeros((5, 24, 16), np.float32)}),
            r"1 problems .*\n.*blk\.0\.ffn_up_exps\.weight: no such tensor",
        ),
    ],
    ids=["missing", "extra", "unknown", "misshapen", "both"],
)
@pytest.mark.parametrize("directory", ["mixtral"], indirect=True)
def test_an_expert_that_is_missing_or_one_too_many_is_named(directory, tmp_path, change, says):
    def changed(tensors):
        split = split_experts(tensors)
        change(split)
        return split

    with pytest.raises(KvjaxError, match=f"(?s){says}"):
        read(write_family(directory, tmp_path / "model.gguf", change=changed))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_shape_of_joined_experts_takes_no_memory(family):
    stack = STACKS[family][0]
    tracemalloc.start()
    shape = stack.shape((128, 768, 2048), (128, 768, 2048))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shape == {"mixtral": (128, 1536, 2048), "gpt_oss": (128, 2048, 1536)}[family]
    assert peak_bytes < 1_000_000
    assert stack.shape((128, 768, 2048), (128, 768, 1024)) == ()


@pytest.mark.parametrize(("directory", "kind"), [("mixtral", "MXFP4"), ("gemma3", "Q8_0")], indirect=["directory"])
def test_codes_are_read_as_the_package_reads_them(directory, kind, tmp_path):
    source = open_source(write_family(widen(directory), tmp_path / "model.gguf", kind))
    peer = {x.name: gguf.dequantize(x.data, x.tensor_type) for x in gguf.GGUFReader(source.path).tensors}
    assert sum(tensor.stored == kind for tensor in source.tensors.values()) > 10
    if kind == "Q8_0":
        name = "model.layers.1.mlp.up_proj.weight"
        np.testing.assert_array_equal(source.read(name), peer["blk.1.ffn_up.weight"])
    else:
        name = "model.layers.1.mlp.experts.gate_up_proj"
        halves = [peer[f"blk.1.ffn_{half}_exps.weight"] for half in ("gate", "up")]
        np.testing.assert_array_equal(source.read(name), np.concatenate(halves, 1))
        assert source.tensors[name].bytes == 2 * 5 * 32 * 17


def write(hf, name: str, file: Path, **changes) -> Path:
    return write_family(hf(f"loud/{name}").config(**CHANGES.get(name, {})), file, **changes)


def config_of(file: Path):
    return plan_conversion(open_source(file)).config


def test_missing_keys_have_the_defaults_of_llama_cpp(hf, tmp_path):
    gone = {"attention__sliding_window_pattern": None, "rope__freq_base_swa": None}
    config = config_of(write(hf, "gemma3", tmp_path / "gemma3.gguf", **gone))
    assert config.pattern == (0, 0, 0)  # the first full one of Gemma 3 would be the sixth
    rope = config.kind(0).attention.rope
    assert rope is not None and rope.theta == 10_000.0 and rope.scaling is None
    gone |= {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention__sliding_window": None}
    config = config_of(write(hf, "gemma2", tmp_path / "gemma2.gguf", **gone))
    assert (config.final_cap, config.kind(0).attention.rule.soft_cap) == (30.0, 50.0)
    assert [config.kind(i).attention.rule.window for i in range(3)] == [4096, None, 4096]
    config = config_of(write(hf, "gpt_oss", tmp_path / "gpt.gguf", attention__sliding_window_pattern=None))
    assert [config.kind(i).attention.rule.window for i in range(3)] == [8, None, 8]
    gone = {"attention__sliding_window_pattern": None, "rope__freq_base_swa": None}
    config = config_of(write(hf, "olmo3", tmp_path / "olmo3.gguf", **gone))
    assert [config.kind(i).attention.rule.window for i in range(4)] == [8, 8, 8, None]
    assert [rope.theta for rope in config.ropes] == [100.0, 100.0]
    config = config_of(write(hf, "granite", tmp_path / "granite.gguf", attention__scale=None, residual_scale=None))
    assert config.kind(0).attention.scale == pytest.approx(8**-0.5) and config.kind(0).residual == 1.0


def test_a_pattern_may_be_a_number_and_gemma_3_may_have_no_window(hf, tmp_path):
    file = write(hf, "gemma3", tmp_path / "a.gguf", attention__sliding_window_pattern=2)
    assert [config_of(file).kind(i).attention.rule.window for i in range(3)] == [8, None, 8]
    changes = {"attention__sliding_window_pattern": None, "attention__sliding_window": None}
    config = config_of(write(hf, "gemma3", tmp_path / "b.gguf", **changes))
    assert len(config.kinds) == 1 and config.kind(0).attention.rule.window is None
    assert config.kind(0).attention.rope == config.ropes[0] and config.ropes[0].theta == 1000.0


def test_the_largest_models_of_gemma_have_another_scale():
    read_own = ARCHITECTURES["gemma3"].read
    sizes = {"num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}
    raw = sizes | {"sliding_window": 1024}
    assert read_own(File({}, raw))[0]["query_pre_attn_scalar"] == 168
    assert read_own(File({}, raw | {"num_hidden_layers": 48}))[0]["query_pre_attn_scalar"] == 128


def test_yarn_and_longrope_have_the_parameters_of_the_file(hf, tmp_path):
    scaling = config_of(write(hf, "llama_yarn", tmp_path / "a.gguf")).ropes[0].scaling
    assert scaling == yarn_scaling(4.0, 16, beta_fast=2.0, beta_slow=0.25)
    changes = {"rope__scaling__attn_factor": 2.0, "rope__scaling__original_context_length": None}
    scaling = config_of(write(hf, "llama_yarn", tmp_path / "b.gguf", **changes)).ropes[0].scaling
    assert scaling is not None and scaling.original_max_positions == 128
    assert scaling.attention_factor == pytest.approx(2 * (0.1 * np.log(4) + 1))
    changes = {"rope__scaling__attn_factor": 1.5}
    scaling = config_of(write(hf, "phi3_longrope", tmp_path / "c.gguf", **changes)).ropes[0].scaling
    assert scaling == longrope_scaling((1.0, 1.5), (2.0, 0.6), 32.0, 4, True, 1.5)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("olmo3", {"rope__freq_base_swa": 5.0}, "rope.freq_base_swa is 5.0: another RoPE in layers with a window"),
        (
            "ministral3",
            {"rope__scaling__type": "none"},
            "temperature_scale is 1.5 in a file whose RoPE is not",
        ),
        ("ministral3", {"attention__temperature_length": 8}, "mistral3.attention.temperature_length = 8"),
        ("granite", {"rope__scaling__finetuned": False}, "a model without RoPE, which is not supported"),
        ("granite", {"logit_scale": None}, "must have the number 'granite.logit_scale'"),
        ("granite", {"expert_count": 8}, "granite.expert_count = 8"),
        ("deepseek_v2_lite", {"expert_gating_func": 3}, "expert_gating_func is 3.*DeepSeek-V2 or V3"),
        ("glm4_moe", {"expert_gating_func": 1}, "expert_gating_func is 1.*use a model of GLM-4.5"),
        ("glm4_moe", {"rope__dimension_sections": [2, 1, 1]}, "glm4moe.rope.dimension_sections"),
        ("deepseek_v2_lite", {"expert_weights_norm": True}, "expert_weights_norm is true"),
        ("deepseek_v2_lite", {"attention__kv_lora_rank": None}, "does not say kv_lora_rank in positive integers"),
        ("qwen3_5", {"ssm__state_size": None}, "must have positive integers under ssm.conv_kernel, ssm.state_size"),
        ("qwen3_5", {"ssm__inner_size": 62}, "ssm.inner_size 62, ssm.time_step_rank 6 and .* must be multiples"),
        ("qwen3_5", {"attention__recurrent_layers": [True]}, "recurrent_layers .* true or false for each layer"),
        ("qwen3_5", {"full_attention_interval": 0}, "full_attention_interval is 0 .* must be a positive integer"),
        ("qwen3_5_moe", {"expert_count": None}, "positive integers under expert_count, expert_used_count"),
        ("mixtral", {"expert_used_count": None}, "positive integers under expert_count, expert_used_count"),
        ("gpt_oss", {"rope__freq_base_swa": 5.0}, "rope.freq_base_swa is 5.0: another RoPE in layers with a window"),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, "must be an integer, or true or false for each"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping = 50.0"),
        ("llama_yarn", {"rope__scaling__yarn_attn_factor": 1.4}, "programs disagree about what it means"),
        ("llama_yarn", {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5: only that of 1"),
        ("llama_yarn", {"rope__scaling__yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier = 0.1"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_its_name(name, changes, says, hf, tmp_path):
    with pytest.raises(KvjaxError, match=says):
        config_of(write(hf, name, tmp_path / "model.gguf", **changes))


def test_one_list_of_longrope_alone_is_refused(hf, tmp_path):
    editable = hf("loud/phi3_longrope")
    raw = editable.directory / "config.json"
    raw.write_text(raw.read_text().replace("short_factor", "other_factor"))
    with pytest.raises(KvjaxError, match="has no tensor 'rope_factors_short.weight'"):
        open_source(write_family(editable.directory, tmp_path / "model.gguf"))
