"""GGUF files: converted as the directories that they were made from, read as the `gguf` package reads them."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import kvjax
from checkpoints_convert.__main__ import main
from checkpoints_convert.check import check
from checkpoints_convert.conversion_plan import plan_conversion
from checkpoints_convert.convert import convert, open_source, read
from checkpoints_convert.describe import describe
from checkpoints_convert.gguf import config_json
from checkpoints_convert.gguf import header as gguf_header
from checkpoints_convert.gguf.gguf_source import GgufSource, read_weights
from kvjax.core.rope import yarn_scaling
from kvjax.errors import KvjaxError
from kvjax.models import Config, RopeScaling, checkpoint
from tests.checkpoints_convert.gguf.gguf_files import read_tensors, write
from tests.fixtures import FAMILIES, ROOT

SLIDES_BY_LAYER = ("qwen2_sliding", "qwen3_sliding")  # which the format cannot say
KNOWN = [name for name in FAMILIES if name not in SLIDES_BY_LAYER]
BLOCKS = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS"),
]


def assert_same_parameters(ours, theirs) -> None:
    ours, theirs = (flatten_dict(tree, sep="/") for tree in (ours, theirs))
    assert ours.keys() == theirs.keys()
    for path, x in theirs.items():
        np.testing.assert_array_equal(ours[path], x, err_msg=path)


@pytest.mark.parametrize("name", KNOWN)
def test_a_file_is_the_directory_that_it_was_made_from(name, tmp_path):
    config, parameters = read(write(ROOT / name, tmp_path / "model.gguf"))
    expected_config, expected = read(ROOT / name)
    assert config == dataclasses.replace(expected_config, eos_ids=config.eos_ids)
    assert set(config.eos_ids) <= set(expected_config.eos_ids)  # the format has one, and one for turns
    assert_same_parameters(parameters, expected)


def test_a_converted_file_is_checked_and_described(tmp_path, capsys):
    file = write(ROOT / "llama2", tmp_path / "tiny.gguf", "F16")
    assert main(["convert", str(file), str(tmp_path / "out"), "--dtype", "f16"]) == 0
    assert main(["check", str(file), str(tmp_path / "out"), "--tensors-only"]) == 0
    record = checkpoint.read_manifest(tmp_path / "out")
    assert record.source == "llama checkpoint tiny.gguf" and record.dtype == "float16"
    lines = describe(file)
    assert lines["format"] == "GGUF, 1 file" and lines["convertible"] == "yes" and lines["tokenizer"] == "none"
    assert lines["types"].startswith("F16") and "F32" in lines["types"]
    assert "equal the source" in capsys.readouterr().out


def test_a_file_is_written_in_codes(tmp_path):
    file, (config, params) = write(ROOT / "llama2", tmp_path / "tiny.gguf", "F16"), read(ROOT / "llama2")
    convert(file, tmp_path / "out", "f32", weights="int8")
    assert check(file, tmp_path / "out").weights == "int8"
    narrow = jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), params)
    expected, ours = kvjax.Model(config, narrow).with_weights("int8"), kvjax.load(tmp_path / "out")
    assert_same_parameters(ours.params["layer_0"]["mlp"], expected.params["layer_0"]["mlp"])


def test_check_tells_of_another_file(tmp_path):
    file = write(ROOT / "qwen2", tmp_path / "model.gguf")
    convert(file, tmp_path / "out")
    other = write(ROOT / "qwen2", tmp_path / "other.gguf", "Q8_0")
    with pytest.raises(KvjaxError, match="self_attn.o_proj.weight: differs"):
        check(other, tmp_path / "out", compare_logits=False)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_stand_for_what_the_package_says(kind, tmp_path):
    raw = gguf.GGMLQuantizationType[kind]
    per_block, size = gguf.GGML_QUANT_SIZES[raw]
    # Bytes up to 0x3b: no pair of them is an infinite float16, whichever bytes of a block are its scale.
    blocks = np.random.default_rng(5).integers(0, 0x3C, (3, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("some.weight", blocks, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor_info,) = gguf_header.read_header(tmp_path / "model.gguf").tensors.values()
    assert tensor_info.shape == (3, 2 * per_block) and tensor_info.kind == raw and tensor_info.bytes == blocks.nbytes
    (peer_tensor,) = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    np.testing.assert_array_equal(read_weights(tensor_info), gguf.dequantize(peer_tensor.data, raw))


def test_a_model_of_codes_is_converted_in_float32_and_read_as_the_package_reads_it(tmp_path):
    source = open_source(write(ROOT / "phi3_partial", tmp_path / "model.gguf", "Q8_0"))
    assert source.tensors["model.layers.0.self_attn.qkv_proj.weight"].stored == "Q8_0"
    peer = {x.name: gguf.dequantize(x.data, x.tensor_type) for x in gguf.GGUFReader(source.path).tensors}
    for name, x in source.tensors.items():
        expected = peer[source.names[name]].reshape(x.shape)
        np.testing.assert_array_equal(source.read(name), expected, err_msg=name)
    convert(source.path, tmp_path / "out")
    assert checkpoint.read_manifest(tmp_path / "out").dtype == "float32"


def split_in_two(file: Path) -> list[Path]:
    """Writes the file's tensors into two parts, as llama.cpp splits them."""
    reader = gguf.GGUFReader(file)
    parts = [file.with_name(f"big-0000{i}-of-00002.gguf") for i in (1, 2)]
    metadata = gguf_header.read_header(file).metadata
    for i, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, metadata["general.architecture"])
        for key, value in metadata.items() if i == 0 else []:
            if key != "general.architecture" and isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_parts_are_one_model_and_a_missing_one_is_named(tmp_path):
    whole = write(ROOT / "llama2", tmp_path / "whole.gguf")
    first, second = split_in_two(whole)
    assert_same_parameters(read(second)[1], read(whole)[1])
    alone = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(KvjaxError, match="is part 1 of 2, and its name .* call them .* this one NAME-00001-of-00002"):
        open_source(alone)
    with pytest.raises(KvjaxError, match="missing parts: big-00001-of-00002.gguf; copy them to"):
        open_source(second)


def write_changed(directory: Path, monkeypatch, name: str = "llama2", factors: Any = None, **changes: Any) -> Path:
    """Writes a fixture as a GGUF file whose reader finds further metadata, by `key__of__it`, and rope_freqs.weight."""
    read_header = gguf_header.read_header
    metadata = {key.replace("__", "."): value for key, value in changes.items()}

    def read_changed(file):
        header = read_header(file)
        kept = {key: x for key, x in (header.metadata | metadata).items() if x is not None}
        return header._replace(metadata=kept)

    monkeypatch.setattr(gguf_header, "read_header", read_changed)
    if factors is not None:
        monkeypatch.setattr(
            "tests.checkpoints_convert.gguf.gguf_files.llama3_factors", lambda config: np.array(factors, np.float32)
        )
    return write(ROOT / name, directory / "model.gguf")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"llama__expert_count": 8}, "positive integers under expert_count, expert_used_count"),
        ({"llama__expert_shared_count": 1}, "asks for what is not supported.*llama.expert_shared_count = 1"),
        ({"llama__attention__clamp_kqv": 8.0}, "llama.attention.clamp_kqv = 8.0"),
        ({"llama__attention__causal": False}, "llama.attention.causal = False"),
        ({"llama__attention__scale": 1.0}, "llama.attention.scale = 1.0"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale = 0.5"),
        ({"llama__final_logit_softcapping": 30.0}, "llama.final_logit_softcapping = 30.0"),
        ({"llama__rope__scaling__attn_factor": 1.19}, "llama.rope.scaling.attn_factor = 1.19"),
        ({"llama__rope__scaling__attn_factor": 0.0}, "llama.rope.scaling.attn_factor = 0.0"),
        ({"llama__rope__scaling__type": "dynamic"}, "'dynamic' is not supported"),
        ({"llama__rope__scaling__factor": -2.0}, "a positive number under 'llama.rope.scaling.factor', got -2.0"),
        ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count is 4, and the heads have 8 channels"),
        ({"llama__rope__dimension_sections": [2, 2, 0, 0]}, "llama.rope.dimension_sections"),
        ({"llama__attention__key_length": 16}, "heads of 16 numbers a key and 8 a value.*llama.attention.key_length"),
        ({"llama__attention__value_length": 4}, "heads of 8 numbers a key and 4 a value"),
        ({"llama__block_count": 0}, "one positive integer for all layers under 'llama.block_count', got 0"),
        ({"llama__block_count": 3}, "model.layers.2.input_layernorm.weight: missing"),
        ({"llama__attention__head_count_kv": [2, 1]}, "under 'llama.attention.head_count_kv', got \\[2, 1\\]"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "a positive number under .*epsilon', got nan"),
        ({"general__architecture": "mamba"}, "the architecture 'mamba' of this GGUF file is not supported"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_its_name(metadata, says, tmp_path, monkeypatch):
    with pytest.raises(KvjaxError, match=says):
        convert(write_changed(tmp_path, monkeypatch, **metadata), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("factors", [[1, 2, 3, 4], [0.5] * 4, [1, 8, 8, 8], [2.0, 1.0, 1.0, 1.0]])
def test_factors_of_another_scaling_are_refused(factors, tmp_path, monkeypatch):
    with pytest.raises(KvjaxError, match="4 factors that are not those of the Llama 3 RoPE scaling"):
        open_source(write_changed(tmp_path, monkeypatch, "llama3_scaled", factors))


LINEAR = RopeScaling("linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope__scaling__factor": 4.0}, LINEAR),
        ({"rope__scaling__factor": 4}, LINEAR),
        ({"rope__scale_linear": 4.0}, LINEAR),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 4.0}, LINEAR),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 0.0}, None),
        ({"rope__scaling__factor": 4.0, "rope__scaling__finetuned": False}, LINEAR),
        ({"rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16}, LINEAR),
        ({"rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 1.0}, LINEAR),
        ({"rope__scaling__type": "linear"}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 1.0}, None),
        ({"rope__scaling__type": "yarn"}, None),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, yarn_scaling(4.0, 128)),
        ({"rope__scaling__factor": 1.0}, None),
        ({"rope__scaling__factor": 0.0}, None),
    ],
)
def test_a_rope_factor_is_linear_unless_a_type_says_otherwise(changes, expected, tmp_path, monkeypatch):
    changes = {f"llama__{key}": value for key, value in changes.items()}
    config = plan_conversion(open_source(write_changed(tmp_path, monkeypatch, **changes))).config
    assert config.kind(0).attention.rope.scaling == expected


def test_rope_factors_of_one_scale_nothing_and_add_to_none(tmp_path, monkeypatch):
    source = open_source(
        write_changed(tmp_path, monkeypatch, "llama3_scaled", [1.0] * 4, llama__rope__scaling__factor=4.0)
    )
    assert plan_conversion(source).config.kind(0).attention.rope.scaling == LINEAR
    assert "rope_freqs.weight" not in source.tensors


@pytest.mark.parametrize(("factor", "expected"), [(1.0, None), (2.0, "longrope")])
def test_factors_for_long_texts_are_obeyed_unless_they_are_one(factor, expected, tmp_path):
    source = GgufSource(write(ROOT / "phi3", tmp_path / "model.gguf"))
    shapes = {name: stored.shape for name, stored in source.stored.items()}
    factors = {f"rope_factors_{length}.weight": np.full(4, factor, np.float32) for length in ("long", "short")}
    scaling = config_json.make_config(source.metadata, shapes, factors)["rope_scaling"]
    assert (scaling and scaling["rope_type"]) == expected
    assert expected is None or scaling["long_factor"] == scaling["short_factor"] == [2.0] * 4


def test_rope_that_is_scaled_twice_is_refused(tmp_path, monkeypatch):
    file = write_changed(tmp_path, monkeypatch, "llama3_scaled", llama__rope__scaling__factor=4.0)
    with pytest.raises(KvjaxError, match=r"scales RoPE twice, by llama.rope.scaling.factor = 4.0 and .*'rope_freqs"):
        open_source(file)


def test_missing_keys_have_the_defaults_of_llama_cpp(tmp_path, monkeypatch):
    whole = plan_conversion(open_source(write(ROOT / "llama2", tmp_path / "whole.gguf"))).config
    optional = ("rope__freq_base", "rope__dimension_count", "attention__key_length", "attention__value_length")
    file = write_changed(tmp_path, monkeypatch, **{f"llama__{key}": None for key in optional})
    expected = Config.llama(**{**whole.llama_arguments(), "rope_theta": 10_000.0})
    assert plan_conversion(open_source(file)).config == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"attention__causal": True},
        {"attention__clamp_kqv": 0.0, "attention__max_alibi_bias": 0.0, "attention__scale": 0.0},
        {"attention__scale": float(np.float32(8**-0.5))},
        {"attention__scale": float(np.float32(8**-0.5)), "attention__key_length": None},
        {"logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0, "expert_weights_scale": 1.0},
        {"logit_scale": 0.0, "final_logit_softcapping": 0.0, "attn_logit_softcapping": 0.0},
        {"rope__scaling__attn_factor": 1.0, "rope__scaling__yarn_ext_factor": 0.0},
        {"rope__scaling__yarn_beta_fast": 32.0, "rope__scaling__original_context_length": 4096},
        {"rope__dimension_sections": [0, 0, 0, 0]},
        {"expert_count": 0, "expert_used_count": 0, "nextn_predict_layers": 0},
        {"attention__sliding_window": 0, "attention__sliding_window_pattern": 1},
        {"attention__head_count": [4, 4], "attention__head_count_kv": [4, 4], "feed_forward_length": [24, 24]},
        {"embedding_length_out": 32, "attention__key_length_swa": 8, "rope__dimension_count_swa": 8},
        {"rope__scaling__alpha": 0.0},
        {"use_parallel_residual": False, "pooling_type": 0, "attention__layer_norm_epsilon": 1e-5},
    ],
)
def test_what_asks_for_nothing_is_read(changes, tmp_path, monkeypatch):
    whole = plan_conversion(open_source(write(ROOT / "llama2", tmp_path / "whole.gguf"))).config
    file = write_changed(tmp_path, monkeypatch, **{f"llama__{key}": value for key, value in changes.items()})
    assert plan_conversion(open_source(file)).config == whole


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_scales_of_one_are_left_out_and_others_are_named(scale, tmp_path, monkeypatch):
    def read_with_scale(directory):
        return tensors | {"model.norm.scale": np.array([scale], np.float32)}

    tensors = read_tensors(ROOT / "llama2")
    monkeypatch.setattr("tests.checkpoints_convert.gguf.gguf_files.read_tensors", read_with_scale)
    source = open_source(write(ROOT / "llama2", tmp_path / "model.gguf"))
    if scale == 1.0:
        assert len(plan_conversion(source).bindings) == 21
    else:
        with pytest.raises(KvjaxError, match="output_norm.scale: no such tensor"):
            plan_conversion(source)


def test_a_tensor_in_two_parts_names_both(tmp_path, monkeypatch):
    first, second = split_in_two(write(ROOT / "llama2", tmp_path / "whole.gguf"))
    read_header = gguf_header.read_header
    others = read_header(first).tensors
    name = next(iter(others))

    def read_changed(file):
        header = read_header(file)
        return header if file == first else header._replace(tensors=header.tensors | {name: others[name]})

    monkeypatch.setattr(gguf_header, "read_header", read_changed)
    with pytest.raises(KvjaxError, match=rf"{name}' stands in {first.name} and in {second.name}.*into an empty folder"):
        open_source(first)


def test_parts_in_another_order_or_of_another_model_are_named(tmp_path):
    first, second = split_in_two(write(ROOT / "llama2", tmp_path / "whole.gguf"))
    third = first.rename(tmp_path / "kept.gguf")
    second.rename(first)
    third.rename(second)
    with pytest.raises(KvjaxError, match="big-00001-of-00002.gguf is part 2 by its metadata and 1 by its name"):
        open_source(first)


@pytest.mark.parametrize("num_bytes", [0, 3, 23, 24, 100, 500, 1200, -1])
def test_a_file_that_is_cut_short_is_named(num_bytes, tmp_path):
    file = write(ROOT / "llama2", tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(KvjaxError, match="model.gguf.*(copy it again|give one that does)"):
        GgufSource(file)


def test_lengths_that_a_hostile_file_claims_are_not_believed(tmp_path):
    name, huge = b"a", 2**60
    head = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", len(name)) + name
    hostile = {
        "values": head + struct.pack("<QQ", 0, huge),
        "tensors": head + struct.pack("<QQ", huge, 0),
        "text": head + struct.pack("<QQ", 0, 1) + struct.pack("<Q", huge),
        "array": head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 0, huge),
        "texts": head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, huge),
        "nested": head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 9, huge),
        "shape": head + struct.pack("<QQ", 1, 0) + key + struct.pack("<I3QIQ", 3, huge, huge, huge, 0, 0),
        "dimensions": head + struct.pack("<QQ", 1, 0) + key + struct.pack("<I", 2**31),
        "kind": head + struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 77),
        "big-endian": b"GGUF" + struct.pack(">I", 3),
        "version": b"GGUF" + struct.pack("<I", 1),
    }
    for what, data in hostile.items():
        (tmp_path / f"{what}.gguf").write_bytes(data + bytes(16))
        with pytest.raises(KvjaxError, match=f"{what}.gguf"):
            gguf_header.read_header(tmp_path / f"{what}.gguf")


def test_a_random_byte_changed_gives_a_named_error_or_a_model(tmp_path):
    file = write(ROOT / "llama_mqa", tmp_path / "model.gguf")
    whole, header = file.read_bytes(), 1500
    rng = np.random.default_rng(11)
    for at in rng.integers(0, header, 150):
        file.write_bytes(whole[:at] + bytes([rng.integers(256)]) + whole[at + 1 :])
        with contextlib.suppress(KvjaxError):
            read(file)


def test_a_directory_with_a_gguf_file_says_to_give_the_file(tmp_path):
    write(ROOT / "llama2", tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(KvjaxError, match="give the GGUF file itself"):
        open_source(tmp_path)
    with pytest.raises(KvjaxError, match="there is no file"):
        open_source(tmp_path / "absent.gguf")
