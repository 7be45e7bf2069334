"""Reading: damaged, missing and unsafe files are refused by name, with the remedy, before anything is written."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_convert.conversion_plan import plan_conversion
from checkpoints_convert.source import INDEX, Directory
from kvjax.errors import KvjaxError
from tests.fixtures import ROOT

Q = "model.layers.0.self_attn.q_proj.weight"


def read_error(directory) -> str:
    with pytest.raises(KvjaxError) as e:
        plan_conversion(Directory(directory))
    return str(e.value)


def test_sharded_and_stored_types():
    source = Directory(ROOT / "llama3")
    assert len({t.file for t in source.tensors.values()}) == 2
    assert source.read(Q).dtype == ml_dtypes.bfloat16
    assert plan_conversion(source).dtype == ml_dtypes.bfloat16
    assert plan_conversion(Directory(ROOT / "llama2")).dtype == np.float16
    assert plan_conversion(Directory(ROOT / "qwen3")).dtype == np.float32


def test_mixed_types_become_float32(hf):
    mistral = hf("mistral")
    norm = mistral.tensor("model.norm.weight").astype(np.float16)
    assert plan_conversion(Directory(mistral.tensors(model__norm__weight=norm))).dtype == np.float32


def test_all_problems_with_names_and_shapes_are_told_together(hf):
    mistral = hf("mistral")
    mistral.tensors(
        model__norm__weight=None,
        model__stranger=np.zeros(3, np.float32),
        lm_head__weight=np.zeros((40, 15), np.float32),
        model__embed_tokens__weight=np.zeros((40, 16), np.int8),
    )
    error = read_error(mistral.directory)
    assert error.startswith("4 problems with the tensors, nothing was written")
    assert "model.norm.weight: missing" in error
    assert "model.stranger: no such tensor" in error
    assert "lm_head.weight: shape [40, 15], config.json says [40, 16]" in error
    assert "model.embed_tokens.weight: stored as I8; save it dequantized" in error


def test_missing_head_names_the_key_that_would_explain_it(hf):
    assert "tie_word_embeddings: true" in read_error(hf("mistral").tensors(lm_head__weight=None))


def test_old_buffers_are_ignored(hf):
    buffers = {f"model__layers__{i}__self_attn__rotary_emb__inv_freq": np.ones(4, np.float32) for i in (0, 1)}
    assert len(plan_conversion(Directory(hf("mistral").tensors(**buffers))).bindings) == 21


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"no safetensors, but long enough for a header", None])
def test_a_file_that_is_damaged_or_cut_short_is_named(hf, content):
    mistral = hf("mistral")
    mistral.file.write_bytes(mistral.file.read_bytes()[:-1] if content is None else content)
    error = read_error(mistral.directory)
    assert "model.safetensors is damaged or cut short" in error and "copy it again" in error


def test_missing_shards_are_all_named(hf):
    llama = hf("llama3").directory
    shards = sorted(llama.glob("model-*.safetensors"))
    for shard in shards:
        shard.unlink()
    assert f"{shards[0].name}: no such file\n  {shards[1].name}: no such file" in read_error(llama)


def test_index_and_shards_must_agree(hf):
    llama = hf("llama3").directory
    index = json.loads((llama / INDEX).read_text())
    shard = index["weight_map"].pop(Q)
    index["weight_map"]["model.ghost"] = shard
    (llama / INDEX).write_text(json.dumps(index))
    error = read_error(llama)
    assert f"model.ghost: not in {shard}" in error and f"{Q}: in {shard} but not in {INDEX}" in error


def test_a_tensor_in_two_shards_names_both_and_what_helps(hf):
    llama = hf("llama3").directory
    shard_of = json.loads((llama / INDEX).read_text())["weight_map"]
    first = shard_of[Q]
    second = next(shard for shard in shard_of.values() if shard != first)
    save_file(load_file(llama / second) | {Q: load_file(llama / first)[Q]}, llama / second)
    error = read_error(llama)
    assert f"{Q}: in {first} and in {second}" in error and "one version of the model into an empty folder" in error


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../a.safetensors"}}'])
def test_unusable_index(hf, content):
    llama = hf("llama3").directory
    (llama / INDEX).write_text(content)
    error = read_error(llama)
    assert INDEX in error and "copy it again" in error


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("pytorch_model.bin", "pickle files can run any code"),
        ("pytorch_model-00001-of-00002.bin", "save_pretrained"),
        ("model.pt", "pickle"),
        ("consolidated.00.pth", "pickle"),
        ("model.gguf", "GGUF"),
        ("adapter_model.safetensors", "merge it into its base model"),
        ("notes.txt", "download the weights as safetensors"),
    ],
)
def test_other_weights_are_refused_with_the_remedy(hf, name, remedy):
    mistral = hf("mistral")
    mistral.file.rename(mistral.directory / name)
    assert remedy in read_error(mistral.directory)


def test_no_directory_and_no_config(tmp_path):
    assert "there is no directory" in read_error(tmp_path / "nowhere")
    assert "has no config.json" in read_error(tmp_path)
    (tmp_path / "config.json").write_text("{'model_type'")
    assert "is not valid JSON" in read_error(tmp_path)
