"""Checkpoints made to do harm, and disks that fail: a named error at once, and nothing written."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from checkpoints_convert.__main__ import main
from checkpoints_convert.conversion_plan import plan_conversion
from checkpoints_convert.convert import convert
from checkpoints_convert.describe import describe
from checkpoints_convert.source import INDEX, Directory
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from tests.fixtures import ROOT

DEEP = b"[" * 100_000 + b"]" * 100_000
ESCAPE = "\x1b[2J"


def plan_error(directory) -> str:
    with pytest.raises(KvjaxError) as e:
        plan_conversion(Directory(directory))
    return str(e.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_deeply_nested_json_is_named(hf, name):
    llama = hf("llama3").directory
    (llama / name).write_bytes(DEEP)
    assert f"{name} is not valid JSON" in plan_error(llama)


def test_a_deeply_nested_header_is_named(hf):
    mistral = hf("mistral")
    mistral.file.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP)
    assert "model.safetensors is damaged" in plan_error(mistral.directory)
    mistral.file.write_bytes((2**62).to_bytes(8, "little") + DEEP)
    assert "model.safetensors is damaged" in plan_error(mistral.directory)


@pytest.mark.parametrize("offsets", [[0], [], {}, "ab", [0, "1"], None])
def test_a_header_with_damaged_offsets_is_named(hf, offsets):
    mistral = hf("mistral")
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    mistral.file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    assert "model.safetensors is damaged" in plan_error(mistral.directory)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", b"[]", "tokenizer_config.json does not hold a JSON object"),
        (
            "tokenizer_config.json",
            b'{"chat_template": 3}',
            "is neither a text nor a list .* in the source of the model",
        ),
        ("chat_template.jinja", b"\xff", r"chat_template.jinja \(.* give a UTF-8 text file"),
    ],
)
def test_what_would_not_load_beside_the_weights_is_refused_at_once(hf, tmp_path, name, content, says):
    source = hf("mistral").directory
    (source / name).write_bytes(content)
    with pytest.raises(KvjaxError, match=says):
        convert(source, tmp_path / "out")
    assert name in describe(source)["convertible"]
    assert [p.name for p in tmp_path.iterdir()] == ["mistral"]


@pytest.mark.parametrize("layers", [20_000, 10**9, 10**18])
def test_layers_without_tensors_are_refused_before_they_are_listed(hf, layers):
    error = plan_error(hf("mistral").config(num_hidden_layers=layers))
    assert f"num_hidden_layers is {layers:,}, but the checkpoint has only 21 tensors" in error


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "max_position_embeddings", "sliding_window", "head_dim"])
@pytest.mark.parametrize("size", [2**31, 10**18, 10**400])
def test_sizes_beyond_all_reason_are_refused(hf, key, size):
    error = plan_error(hf("mistral").config(**{key: size}))
    assert "must be an integer from 1 to 2147483647" in error or "config.json" in error


def test_a_size_that_is_merely_wrong_names_the_tensors(hf):
    error = plan_error(hf("mistral").config(vocab_size=2**31 - 1))
    assert "model.embed_tokens.weight: shape [40, 16], config.json says [2147483647, 16]" in error


BAD_IDS = ["2", 2.5, {"a": 1}, [[2]], [2, "3"], -1, True]


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("ids", BAD_IDS)
def test_ids_that_are_none_are_named(hf, key, ids):
    assert f"{key} must name tokens by their ids" in plan_error(hf("mistral").config(**{key: ids}))


def test_ids_of_generation_config_and_beyond_the_vocabulary(hf):
    mistral = hf("mistral")
    mistral.config(bos_token_id=40, eos_token_id=[39, 40])
    config = plan_conversion(Directory(mistral.directory)).config
    assert config.bos_id is None and config.eos_ids == (2,)
    (mistral.directory / "generation_config.json").unlink()
    assert plan_conversion(Directory(mistral.directory)).config.eos_ids == (39,)
    (mistral.directory / "generation_config.json").write_text('{"eos_token_id": {"a": [1]}}')
    assert "eos_token_id must name tokens" in plan_error(mistral.directory)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": [["llama"]]}, r"model_type [['llama']] is not supported"),
        ({"model_type": {"a": 1}}, "model_type {'a': 1} is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ({"architectures": {"a": 1}}, "architectures must be a list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list of names"),
        ({"layer_types": [["full_attention"], {}]}, "layer_types must name 2 layers"),
        ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "RoPE scaling ['linear'] is not supported"),
    ],
)
def test_values_of_other_types_are_named(hf, changes, says):
    assert says in plan_error(hf("mistral").config(**changes))


def test_links_out_of_the_checkpoint_are_not_followed(hf, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    source = hf("mistral").directory
    (source / "tokenizer_config.json").symlink_to(secret)
    with pytest.raises(KvjaxError, match="tokenizer_config.json is a link to .*secret, outside .*put a copy of it"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "is a link to" in describe(source)["convertible"]
    (source / "tokenizer_config.json").unlink()
    (source / "real.json").write_text("{}")
    (source / "tokenizer_config.json").symlink_to("real.json")
    convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"


def test_hugging_faces_own_cache_is_full_of_links(hf, tmp_path):
    model = tmp_path / "models--someone--something"
    snapshot, blobs = model / "snapshots" / "0123abcd", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    source = hf("mistral").directory
    (source / "tokenizer_config.json").write_text("{}")
    for i, file in enumerate(sorted(source.iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    convert(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"


def test_escape_codes_in_names_and_values_do_not_reach_the_terminal(hf, tmp_path, capsys):
    mistral = hf("mistral")
    mistral.tensors(**{f"model__{ESCAPE}\nok": np.zeros(3, np.float32)})
    assert "model.\\x1b[2J\\nok: no such tensor" in plan_error(mistral.directory)
    assert main(["inspect", str(mistral.directory)]) == 0
    assert main(["inspect", str(mistral.config(model_type=f"llama{ESCAPE}"))]) == 0
    assert main(["convert", str(mistral.directory), str(tmp_path / "converted")]) == 1
    output = capsys.readouterr()
    assert "\x1b[2J" not in output.out + output.err and "\\x1b[2J" in output.out and "\\x1b[2J" in output.err


def manifest_error(directory: Path, change) -> str:
    """Returns the error of a manifest that was changed together with its digest."""
    raw = json.loads((directory / checkpoint.MANIFEST).read_text())
    raw.pop("digest")
    change(raw)
    (directory / checkpoint.MANIFEST).write_text(json.dumps(raw | {"digest": checkpoint.json_digest(raw)}))
    with pytest.raises(KvjaxError) as e:
        checkpoint.read_manifest(directory)
    return str(e.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw["config"].update(layers=10**9, windows=None), "layers must be an integer from 1 to 65536"),
        (
            lambda raw: raw["config"].update(vocab_size=10**18),
            "vocab_size must lie in [1, 2147483647], got 1000",
        ),
        (lambda raw: raw["config"].update(layers=2.0), "layers must be an integer"),
        (lambda raw: raw["config"].update(eos_ids=[-1]), "an entry of eos_ids must be 0 or more, got -1"),
        (lambda raw: raw["config"].update(eos_ids="ab"), "eos_ids must be a tuple, got 'ab'"),
        (lambda raw: raw["config"].update(bos_id=[1]), "bos_id must be a whole number, got [1]"),
        (lambda raw: raw["config"].update(bos_id=40), "eos_ids or bos_id must be an integer from 0 to 39"),
        (lambda raw: raw["config"].update(windows=["a", None]), "window must be a whole number, got 'a'"),
        (lambda raw: raw["config"].update(tie_embeddings="no"), "tie_embeddings must be true or false"),
        (lambda raw: raw["config"].update(rope_scaling={"kind": "linear", "factor": "2"}), "factor of RoPE scaling"),
        (lambda raw: raw["parameters"].update({f"{ESCAPE}\n": {"shape": []}}), "\\x1b[2J\\n: not a parameter"),
        (lambda raw: raw.update(digests="ab"), "is damaged"),
        (lambda raw: raw.update(dtype=["float32"]), "is damaged"),
        (lambda raw: raw.update(dtype="float99"), "is damaged"),
        (lambda raw: raw.update(files={"../../secret": "0"}), "is no name of a file"),
        (lambda raw: raw.update(files={"additional_chat_templates/../../secret": "0"}), "is no name of a file"),
        (lambda raw: raw.update(files={"additional_chat_templates/a/b.jinja": "0"}), "is no name of a file"),
        (lambda raw: raw.update(files={"other/secret": "0"}), "is no name of a file"),
    ],
)
def test_manifests_made_to_do_harm(tmp_path, change, says):
    convert(ROOT / "mistral", tmp_path / "out")
    assert says in manifest_error(tmp_path / "out", change)


def test_a_deeply_nested_manifest_is_named(tmp_path):
    (tmp_path / checkpoint.MANIFEST).write_bytes(DEEP)
    with pytest.raises(KvjaxError, match="kvjax.json is not valid JSON"):
        checkpoint.read_manifest(tmp_path)


def test_places_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "out", tmp_path / ("a" * 300)):
        assert main(["convert", str(ROOT / "mistral"), str(out)]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: cannot write ") and "Errno" not in error
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def full(*args, **more):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def as_tensorstore_says(*args, **more):
    raise ValueError("OUT_OF_RANGE: failed to write: No space left on device")


@pytest.mark.parametrize(
    ("where", "fails"),
    [
        ("pathlib.Path.write_text", full),
        ("pathlib.Path.write_bytes", full),
        ("pathlib.Path.rename", full),
        ("tensorstore.open", as_tensorstore_says),
    ],
)
def test_a_full_disk_leaves_what_was_there(hf, tmp_path, monkeypatch, capsys, where, fails):
    source, out = hf("llama3").directory, tmp_path / "out"
    (source / "tokenizer_config.json").write_text("{}")
    convert(ROOT / "mistral", out)
    for options, target in (([], tmp_path / "new"), (["--force"], out)):
        with monkeypatch.context() as patched:
            patched.setattr(where, fails)
            assert main(["convert", str(source), str(target), *options]) == 2
        assert "No space left" in capsys.readouterr().err
    assert checkpoint.read_manifest(out).config.llama_arguments()["windows"] == (6, 6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama3", "out"]
