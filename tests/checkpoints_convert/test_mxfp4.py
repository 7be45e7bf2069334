"""gpt-oss with experts in MXFP4: read as the bfloat16 numbers that the codes stand for."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from checkpoints_convert.check import check
from checkpoints_convert.convert import convert, read
from checkpoints_convert.describe import describe
from checkpoints_convert.mxfp4 import dequantize
from checkpoints_convert.source import Directory
from kvjax.errors import KvjaxError

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(code: int) -> float:
    """The number of a code of four bits: a sign, two bits of exponent and one of mantissa."""
    return (-1.0 if code & 8 else 1.0) * CODES[code & 7]


def test_each_code_and_scale_is_the_number_of_the_specification():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 3, 4, 16), dtype=np.uint8)  # 2 experts, 3 rows of 4 groups
    blocks[0, 0, 0] = np.arange(16) * 17
    scales = rng.integers(0, 250, (2, 3, 4), dtype=np.uint8)
    numbers = dequantize(blocks, scales)
    assert numbers.shape == (2, 128, 3) and numbers.dtype == ml_dtypes.bfloat16
    for expert, row, group, byte in np.ndindex(blocks.shape):
        code, scale = int(blocks[expert, row, group, byte]), 2.0 ** (int(scales[expert, row, group]) - 127)
        for half, number in enumerate((code & 15, code >> 4)):
            assert numbers[expert, 32 * group + 2 * byte + half, row] == decode(number) * scale


SIZES = {"E": 3, "D": 32, "F": 64}


def write_gpt_oss(directory, quantized: bool) -> None:
    """Writes a layer whose experts are MXFP4, or the bfloat16 numbers that these stand for."""
    rng, (E, D, F) = np.random.default_rng(1), SIZES.values()
    raw = {"model_type": "gpt_oss", "vocab_size": 11, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 1}
    raw |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": E}
    raw |= {"num_experts_per_tok": 2, "attention_bias": False, "sliding_window": 4}
    shapes = {"model.embed_tokens.weight": (11, D), "lm_head.weight": (11, D), "model.norm.weight": (D,)}
    layer = {"self_attn.q_proj.weight": (16, D), "self_attn.k_proj.weight": (8, D), "self_attn.v_proj.weight": (8, D)}
    layer |= {"self_attn.o_proj.weight": (D, 16), "self_attn.sinks": (2,), "input_layernorm.weight": (D,)}
    layer |= {"post_attention_layernorm.weight": (D,), "mlp.router.weight": (E, D), "mlp.router.bias": (E,)}
    layer |= {"mlp.experts.gate_up_proj_bias": (E, 2 * F), "mlp.experts.down_proj_bias": (E, D)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    tensors = {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    for name, rows, columns in (("gate_up_proj", 2 * F, D), ("down_proj", D, F)):
        blocks = rng.integers(0, 256, (E, rows, columns // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 130, (E, rows, columns // 32), dtype=np.uint8)
        prefix = f"model.layers.0.mlp.experts.{name}"
        if quantized:
            tensors |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
        else:
            tensors[prefix] = dequantize(blocks, scales)
    if quantized:
        raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors")


def test_a_quantized_checkpoint_is_that_of_its_numbers(tmp_path):
    write_gpt_oss(tmp_path / "codes", quantized=True)
    write_gpt_oss(tmp_path / "numbers", quantized=False)
    (config, ours), (expected_config, expected) = (read(tmp_path / name) for name in ("codes", "numbers"))
    assert config == expected_config
    for name in ("gate", "up", "down"):
        kernel = ours["layer_0"]["mlp"][name]["kernel"]
        np.testing.assert_array_equal(kernel, expected["layer_0"]["mlp"][name]["kernel"])
    lines = describe(tmp_path / "codes")
    assert lines["convertible"] == "yes" and "MXFP4 (2)" in lines["types"]
    assert lines["parameters"] == describe(tmp_path / "numbers")["parameters"]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_its_numbers_become_codes_of_kvjax(tmp_path, weights):
    for name in ("codes", "numbers"):
        write_gpt_oss(tmp_path / name, quantized=name == "codes")
        convert(tmp_path / name, tmp_path / f"{name} out", weights=weights)
    ours, expected = (kvjax.load(tmp_path / f"{name} out") for name in ("codes", "numbers"))
    assert ours.weights == weights and ours.fingerprint == expected.fingerprint
    assert check(tmp_path / "codes", tmp_path / "codes out").weights == weights


def test_codes_without_their_scales_are_named(tmp_path):
    write_gpt_oss(tmp_path / "codes", quantized=True)
    file = tmp_path / "codes" / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if "down_proj_scales" not in name}, file)
    with pytest.raises(KvjaxError, match="down_proj: missing\n.*down_proj_blocks: no such tensor in this family"):
        read(tmp_path / "codes")


def test_a_scale_that_is_no_number_is_named(tmp_path):
    write_gpt_oss(tmp_path / "codes", quantized=True)
    file = tmp_path / "codes" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 1] = 255
    save_file(tensors, file)
    with pytest.raises(KvjaxError, match="down_proj: .* weights are not finite, first at"):
        read(tmp_path / "codes")


def test_other_families_are_not_stored_so(tmp_path):
    write_gpt_oss(tmp_path / "codes", quantized=True)
    file = tmp_path / "codes" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mixtral"}))
    assert "model.layers.0.mlp.experts.down_proj" not in Directory(tmp_path / "codes").tensors
    with pytest.raises(
        KvjaxError, match="quantization_config .*mxfp4.* is not supported; save the weights dequantized"
    ):
        read(tmp_path / "codes")
