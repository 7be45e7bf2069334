"""GGUF files: converted as the directories that they were made from, read as the `gguf` package reads them."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from checkpoints_convert.__main__ import main
from checkpoints_convert.check import check
from checkpoints_convert.convert import convert, open_source, read
from checkpoints_convert.describe import describe
from checkpoints_convert.gguf import header as gguf_header
from checkpoints_convert.gguf.gguf_source import GgufSource, read_weights
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from tests.checkpoints_convert.gguf.gguf_files import write
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


def test_a_model_of_codes_is_converted_in_float32_and_read_alike_by_both_readers(tmp_path):
    source = open_source(write(ROOT / "phi3_partial", tmp_path / "model.gguf", "Q8_0"))
    assert source.tensors["model.layers.0.self_attn.qkv_proj.weight"].stored == "Q8_0"
    peer = source.independent_read()
    for name in source.tensors:
        np.testing.assert_array_equal(source.read(name), peer(name), err_msg=name)
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
    with pytest.raises(KvjaxError, match="one of 2 parts, which hold 21 tensors, and 11 are here"):
        open_source(alone)
    with pytest.raises(KvjaxError, match="missing parts: big-00001-of-00002.gguf; copy them to"):
        open_source(second)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"llama__expert_count": 8}, "asks for what is not supported.*llama.expert_count = 8"),
        ({"llama__attention__clamp_kqv": 8.0}, "llama.attention.clamp_kqv = 8.0"),
        ({"llama__rope__scaling__type": "yarn"}, "RoPE scaling 'yarn' is not supported"),
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
    changes = {key.replace("__", "."): value for key, value in metadata.items()}
    read_header = gguf_header.read_header

    def read_changed(file):
        header = read_header(file)
        return header._replace(metadata=header.metadata | changes)

    monkeypatch.setattr(gguf_header, "read_header", read_changed)
    with pytest.raises(KvjaxError, match=says):
        convert(write(ROOT / "llama2", tmp_path / "model.gguf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_factors_of_another_scaling_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tests.checkpoints_convert.gguf.gguf_files.llama3_factors", lambda config: np.ones(4, np.float32)
    )
    with pytest.raises(KvjaxError, match="4 factors that are not those of the Llama 3 RoPE scaling"):
        open_source(write(ROOT / "llama3_scaled", tmp_path / "model.gguf"))


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
