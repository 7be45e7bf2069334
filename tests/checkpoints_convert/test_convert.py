"""convert and check, end to end."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import kvjax
from checkpoints_convert import check as checking
from checkpoints_convert.__main__ import main
from checkpoints_convert.check import check, missing_packages
from checkpoints_convert.conversion_plan import plan_conversion
from checkpoints_convert.convert import convert, read, read_parts
from checkpoints_convert.describe import describe
from checkpoints_convert.source import Directory
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from tests.fixtures import FAMILIES, ROOT, load_family

Q = "model__layers__0__self_attn__q_proj__weight"


def leaves(tree) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in flatten_dict(tree, sep="/").items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_written_directory_restores_to_the_source(name, tmp_path):
    config = convert(ROOT / name, tmp_path / "out")
    restored, params = checkpoint.restore(tmp_path / "out", dtype=jnp.float32)
    expected_config, expected, _ = load_family(name)
    assert restored == config == expected_config
    ours, theirs = leaves(params), leaves(expected)
    assert ours.keys() == theirs.keys()
    for path, x in theirs.items():
        np.testing.assert_array_equal(ours[path], x)
    assert check(ROOT / name, tmp_path / "out", compare_logits=False).logit_difference is None


def test_dtype_is_the_stored_one_unless_asked(tmp_path):
    convert(ROOT / "mistral", tmp_path / "as stored")
    convert(ROOT / "mistral", tmp_path / "wide", "f32")
    convert(ROOT / "qwen3", tmp_path / "narrow", "bf16")
    assert checkpoint.read_manifest(tmp_path / "as stored").dtype == "bfloat16"
    assert checkpoint.restore(tmp_path / "wide")[1]["embedding"].dtype == jnp.float32
    source = Directory(ROOT / "qwen3").read("model.embed_tokens.weight")
    narrow = checkpoint.restore(tmp_path / "narrow")[1]["embedding"]
    np.testing.assert_array_equal(np.asarray(narrow), source.astype(ml_dtypes.bfloat16))
    assert check(ROOT / "qwen3", tmp_path / "narrow", compare_logits=False).tensors == 25


def test_progress_reaches_the_total(tmp_path):
    progress = []
    convert(ROOT / "mistral", tmp_path / "out", progress=lambda *args: progress.append(args))
    names = checkpoint.part_names(checkpoint.read_manifest(tmp_path / "out").parameters)
    assert [name for name, _, _ in progress] == ["", *names] and progress[0][1] == 0
    assert progress[-1][1] == progress[-1][2] == 2 * 6736
    assert all(before[1] <= after[1] for before, after in zip(progress, progress[1:], strict=False))


def test_tokenizer_files_come_along(hf, tmp_path):
    source = hf("mistral").directory
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"z": 0, "?": 1}, unk_token="?"))
    inner.save(str(source / "tokenizer.json"))
    (source / "README.md").write_text("not needed")
    convert(source, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["kvjax.json", "params", "tokenizer.json"]
    inner.save(str(source / "tokenizer.json"), pretty=False)
    with pytest.raises(KvjaxError, match="tokenizer.json: not the source's"):
        check(source, tmp_path / "out")


def write_words(directory: Path, **files: dict) -> None:
    """Writes a tokenizer of two words, and further files of it by their names without the ending."""
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"z": 0, "?": 1}, unk_token="?")).save(
        str(directory / "tokenizer.json")
    )
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def test_tokens_and_the_end_beside_tokenizer_json_come_along(hf, tmp_path):
    source = hf("mistral").directory
    write_words(
        source, added_tokens={"<|im_start|>": 2, "<|im_end|>": 3}, special_tokens_map={"eos_token": "<|im_end|>"}
    )
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "default.jinja").write_text("<|im_start|>z{{ eos_token }}")
    assert convert(source, tmp_path / "out").eos_ids == (2, 3)
    check(source, tmp_path / "out", compare_logits=False)
    model = kvjax.load(tmp_path / "out")
    assert model.config.eos_ids == (2, 3)
    assert model.chat_ids([{"role": "user", "content": "z"}]) == [[2, 0, 3]]


def test_chat_templates_with_names_come_along(hf, tmp_path):
    source = hf("mistral").directory
    write_words(source, tokenizer_config={"chat_template": [{"name": "default", "template": "?"}]})
    folder = source / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("z{% for tool in tools %}z{% endfor %}")
    (folder / "rag.jinja").write_text("{{ documents[0].text }}")
    (folder / "notes.txt").write_text("not needed")
    convert(source, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out" / folder.name).iterdir()) == ["rag.jinja", "tool_use.jinja"]
    check(source, tmp_path / "out", compare_logits=False)
    model, user = kvjax.load(tmp_path / "out"), [{"role": "user", "content": "z"}]
    assert model.chat_texts(user) == ["?"]
    assert model.chat_texts(user, tools=[{"function": {"name": "f"}}]) == ["zz"]
    assert model.chat_texts(user, documents=[{"text": "? z"}], chat_template="rag") == ["? z"]
    (folder / "rag.jinja").write_text("of another version")
    with pytest.raises(KvjaxError, match="rag.jinja: not the source's"):
        check(source, tmp_path / "out", compare_logits=False)
    (tmp_path / "out" / folder.name / "rag.jinja").write_text("of another version")
    with pytest.raises(KvjaxError, match="rag.jinja"):  # the manifest has its digest
        kvjax.load(tmp_path / "out")
    (folder / "rag.jinja").unlink()
    (tmp_path / "secret").write_text("{{ secret }}")
    (folder / "rag.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(KvjaxError, match="rag.jinja is a link to .*secret, outside of the checkpoint"):
        convert(source, tmp_path / "third")


def test_a_directory_that_was_converted_before_ends_with_the_tokenizers_end(hf, tmp_path):
    convert(hf("mistral").directory, tmp_path / "out")
    assert kvjax.load(tmp_path / "out").config.eos_ids == (2,)
    table = {"3": {"content": "<|end|>", "special": True}, "2": {"content": "<|user|>", "special": True}}
    write_words(tmp_path / "out", tokenizer_config={"eos_token": "<|end|>", "added_tokens_decoder": table})
    model = kvjax.load(tmp_path / "out")
    assert model.config.eos_ids == (2, 3) and model.text_tokenizer().encode("<|user|>z<|end|>") == [2, 0, 3]
    write_words(tmp_path / "out", tokenizer_config={"eos_token": "</s>"}, added_tokens={"<p>": 2, "</s>": 3})
    assert kvjax.load(tmp_path / "out").config.eos_ids == (2, 3)


def test_an_id_that_no_tokenizer_gives_is_refused_before_anything_is_written(hf, tmp_path):
    source = hf("mistral").directory
    write_words(source, added_tokens={"<|im_end|>": 7})
    with pytest.raises(KvjaxError, match="added_tokens.json gives the token '<.im_end.>' the id 7, which would be 2"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


WORDS = {"model": {"type": "WordLevel", "vocab": {"z": 0, "?": 1}, "unk_token": "?"}}
NO_ENTRY = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": []}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "is not a tokenizer that `tokenizers` can read"),
        ('{"version": ', "is not a tokenizer that `tokenizers` can read"),
        (json.dumps(WORDS | {"post_processor": NO_ENTRY | {"special_tokens": {}}}), "fails to encode a text of 1 char"),
    ],
)
def test_a_broken_tokenizer_is_refused_before_anything_is_written(hf, tmp_path, monkeypatch, content, says):
    source = hf("mistral").directory
    (source / "tokenizer.json").write_text(content)
    monkeypatch.setattr(Directory, "read", None)  # no weights are read
    with pytest.raises(KvjaxError, match=f"/tokenizer.json {says}.*; copy it again"):
        convert(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["mistral"]


@pytest.mark.parametrize("refused", ["exists", "tokenizer"])
def test_what_is_refused_has_no_bar(hf, tmp_path, monkeypatch, capsys, refused):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal's
    source, out = hf("mistral").directory, tmp_path / "out"
    if refused == "exists":
        out.mkdir()
        (out / "mine").touch()
    else:
        (source / "tokenizer.json").write_text("{}")
    assert main(["convert", str(source), str(out)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert main(["convert", str(ROOT / "llama3"), str(tmp_path / "other")]) == 0
    assert "convert" in capsys.readouterr().err  # the bar of one that is not refused


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_named_and_nothing_stays(hf, tmp_path, bad):
    mistral = hf("mistral")
    weights = mistral.tensor(Q.replace("__", "."))
    weights[3, 5] = bad
    with pytest.raises(KvjaxError, match=r"layers.0.self_attn.q_proj.weight: 1 of 512 .* first at \[3, 5\]"):
        convert(mistral.tensors(**{Q: weights}), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["mistral"]


def test_weights_that_do_not_fit_the_type_are_named(hf, tmp_path):
    mistral = hf("mistral")
    weights = mistral.tensor(Q.replace("__", "."))
    weights[0, 0] = 1e6
    source = mistral.tensors(**{Q: weights})
    with pytest.raises(KvjaxError, match="q_proj.weight: weights up to 9.99e.05 do not fit float16; use --dtype"):
        convert(source, tmp_path / "out", "f16")
    convert(source, tmp_path / "out", "bf16")


def test_tied_head_may_be_repeated_but_not_differ(hf, tmp_path):
    tied = hf("llama3_tied")
    embedding = tied.tensor("model.embed_tokens.weight")
    assert "head" not in read(tied.tensors(lm_head__weight=embedding))[1]
    embedding[1, 1] += 1
    with pytest.raises(KvjaxError, match="lm_head.weight differs.*set tie_word_embeddings to false"):
        convert(tied.tensors(lm_head__weight=embedding), tmp_path / "out")


def test_existing_directories(hf, tmp_path):
    out = tmp_path / "out"
    convert(ROOT / "mistral", out)
    with pytest.raises(KvjaxError, match="exists.*--force"):
        convert(ROOT / "llama3", out)
    with pytest.raises(KvjaxError):  # a failed replacement leaves the old one
        convert(hf("llama3").config(num_hidden_layers=3), out, replace=True)
    assert checkpoint.restore(out)[0].llama_arguments()["windows"] == (6, 6)
    convert(ROOT / "llama3", out, replace=True)
    assert checkpoint.restore(out)[0].llama_arguments()["windows"] is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama3", "out"]


KILLED = """
import os, sys
from kvjax.models import checkpoint
put = checkpoint.Writer.put
checkpoint.Writer.put = lambda self, name, x: os._exit(9) if name == "layer_1" else put(self, name, x)
from checkpoints_convert.__main__ import main
main(sys.argv[1:])
"""


def test_a_killed_conversion_loses_nothing_and_can_be_repeated(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    convert(ROOT / "mistral", old)
    for out, options in ((new, []), (old, ["--force"])):
        command = [sys.executable, "-c", KILLED, "convert", str(ROOT / "llama3"), str(out), *options]
        assert subprocess.run(command, cwd=ROOT.parent.parent, capture_output=True).returncode == 9
    assert not new.exists() and checkpoint.restore(old)[0].llama_arguments()["windows"] == (6, 6)
    for left in tmp_path.glob(".kvjax-*/new"):
        with pytest.raises(KvjaxError, match="cut short"):
            checkpoint.restore(left)
    convert(ROOT / "llama3", new)
    convert(ROOT / "llama3", old, replace=True)
    assert checkpoint.restore(new)[0] == checkpoint.restore(old)[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old"]


def random_llama(directory, layers: int, width: int = 128) -> int:
    """Writes a float32 Llama in which no layer is a large part; returns its bytes."""
    sizes = {"vocab_size": 64, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    raw = {"model_type": "llama", "num_attention_heads": 4, **sizes}
    (directory / "config.json").write_text(json.dumps(raw))
    shapes = {"model.embed_tokens": (64, width), "lm_head": (64, width), "model.norm": (width,)}
    for i in range(layers):
        layer = {f"self_attn.{m}_proj": (width, width) for m in "qkvo"}
        layer |= {"mlp.gate_proj": (2 * width, width), "mlp.up_proj": (2 * width, width)}
        layer |= {
            "mlp.down_proj": (width, 2 * width),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.standard_normal(s, np.float32) for name, s in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return sum(x.nbytes for x in tensors.values())


def peak_of_writing(source: Directory, out: Path) -> int:
    """The most bytes in use at once while all parts of a source are read and written."""
    todo = plan_conversion(source)  # traces the decoder's shapes, which is not what is measured
    with checkpoint.Writer(out, todo.config, todo.dtype) as writer:
        tracemalloc.start()
        for name, subtree in read_parts(source, todo, todo.dtype):
            writer.put(name, subtree)
            del subtree
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_memory_stays_near_one_layer(tmp_path):
    total = random_llama(tmp_path, layers=16)
    # After thousands of tests Python's table of interned strings takes 8 MB, and may move into a larger one meanwhile.
    # That happens once, so the smaller peak is the conversion's.
    peaks = [peak_of_writing(Directory(tmp_path), tmp_path / f"out{i}") for i in range(2)]
    assert total > 10e6 and min(peaks) < total / 4


def test_check_names_every_difference(hf, tmp_path):
    out = tmp_path / "out"
    config, params = read(ROOT / "mistral")
    params["layer_0"]["attention"]["q"]["kernel"][0, 0, 0, 0] += 1
    params["final_norm"]["scale"][2] += 1
    checkpoint.save(out, config, params)
    with pytest.raises(KvjaxError) as e:
        check(ROOT / "mistral", out)
    assert str(e.value).count("differs") == 2
    assert "model.layers.0.self_attn.q_proj.weight: differs" in str(e.value)
    assert "model.norm.weight: differs" in str(e.value)
    with pytest.raises(KvjaxError, match="config field rope_theta: 10000.0, the source says 77.0"):
        check(hf("mistral").config(rope_theta=77.0), out)
    # A value is named by its place, and no line is the repr of a whole layer.
    config, params = read(ROOT / "loud" / "mixtral")
    experts = dataclasses.replace(config.kinds[0].mlp.experts, top_k=1)
    kind = dataclasses.replace(config.kinds[0], mlp=dataclasses.replace(config.kinds[0].mlp, experts=experts))
    checkpoint.save(tmp_path / "experts", dataclasses.replace(config, kinds=(kind,)), params)
    with pytest.raises(KvjaxError, match=r"\n  config field kinds.0.mlp.experts.top_k: 1, the source says 2$"):
        check(ROOT / "loud" / "mixtral", tmp_path / "experts")


def test_check_names_the_extra_where_logits_cannot_be_compared(tmp_path, capsys, monkeypatch):
    convert(ROOT / "qwen3", tmp_path / "out")
    monkeypatch.setattr(checking.importlib.util, "find_spec", lambda name: None)
    assert main(["check", str(ROOT / "qwen3"), str(tmp_path / "out")]) == 0
    said = 'logits not compared, for want of torch, transformers: pip install "kvjax[parity]"'
    assert said in " ".join(capsys.readouterr().out.split())
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(KvjaxError, match=r'comparing logits needs torch: pip install "kvjax\[parity\]"'):
        check(ROOT / "qwen3", tmp_path / "out", compare_logits=True)


@pytest.mark.filterwarnings("default")  # what the peer's import warns of is not ours to fix
def test_check_compares_logits_where_transformers_is_installed(tmp_path):
    convert(ROOT / "qwen3", tmp_path / "out", "bf16")  # rounds: the peer's weights are rounded alike
    difference = check(ROOT / "qwen3", tmp_path / "out").logit_difference
    assert 0 < difference < 1e-4 if not missing_packages(ROOT / "qwen3") else difference is None


def test_logits_of_a_gguf_file_need_one_package_more(tmp_path, monkeypatch):
    monkeypatch.setattr(checking.importlib.util, "find_spec", lambda name: None if name == "accelerate" else name)
    file = tmp_path / "model.gguf"
    file.touch()
    assert (missing_packages(file), missing_packages(ROOT / "qwen3")) == (("accelerate",), ())


@pytest.mark.parametrize(("relative_error", "fails"), [(5e-5, False), (2e-4, True), (np.nan, True)])
def test_check_limits_the_difference_of_logits(tmp_path, monkeypatch, relative_error, fails):
    convert(ROOT / "mistral", tmp_path / "out")
    config, params, _ = load_family("mistral")

    def shifted_logits(src, prompts, dtype):
        ours = np.asarray(kvjax.logits(kvjax.Model(config, params), prompts))
        rows = [x[: len(p)] for x, p in zip(ours, prompts, strict=True)]
        return [x + np.float32(relative_error) * np.abs(x).max() for x in rows]

    monkeypatch.setattr(checking, "transformers_logits", shifted_logits)
    if fails:
        with pytest.raises(KvjaxError, match="logits differ"):
            check(ROOT / "mistral", tmp_path / "out", compare_logits=True)
    else:
        difference = check(ROOT / "mistral", tmp_path / "out", compare_logits=True).logit_difference
        assert difference == pytest.approx(relative_error, rel=0.1)


def test_command_line(tmp_path, capsys):
    source, out = str(ROOT / "llama3"), str(tmp_path / "out")
    assert main(["convert", source, out, "--dtype", "f32"]) == 0
    assert main(["check", source, out, "--tensors-only"]) == 0
    assert "all 21 tensors equal the source; logits not compared" in capsys.readouterr().out
    assert main(["inspect", source]) == main(["inspect", out]) == 0
    output = capsys.readouterr().out
    assert "Hugging Face" in output and "float32 (21)" in output and "bfloat16 (21)" in output and "6,736" in output
    assert main(["convert", source, out]) == 1
    assert "error: " in capsys.readouterr().err
    assert main(["convert", source, out, "--force"]) == 0


@pytest.mark.parametrize(("family", "weights"), [("loud/deepseek_v2", "int8"), ("qwen2", "int4")])
def test_kernels_are_written_in_codes(tmp_path, capsys, family, weights):
    source, out = str(ROOT / family), str(tmp_path / "out")
    assert main(["convert", source, out, "--weights", weights]) == 0
    assert main(["check", source, out]) == 0
    assert f"tensors equal the source in {weights}; logits not compared" in capsys.readouterr().out
    ours, exact = describe(out), describe(source)
    assert f"{weights} (" in ours["types"] and ours["parameters"] == exact["parameters"]
    convert(source, tmp_path / "exact")
    loaded, expected = kvjax.load(out), kvjax.load(tmp_path / "exact", weights=weights)
    assert loaded.weights == weights and loaded.config == expected.config
    assert loaded.fingerprint == expected.fingerprint
    with pytest.raises(KvjaxError, match=f"holds {weights} weights, whose logits are not transformers'"):
        check(source, out, compare_logits=True)
    part = dict(loaded.params["layer_0"])
    part["mlp"] = {**part["mlp"], "up": jax.tree.map(lambda x: -x, part["mlp"]["up"])}
    checkpoint.save(out, loaded.config, {**loaded.params, "layer_0": part}, replace=True)
    with pytest.raises(KvjaxError, match="layer_0/mlp/up/kernel/codes: differs"):
        check(source, out)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        (
            "llama3_scaled",
            "2 layers, 4 heads on 2 of 8, an MLP 24 wide (silu), RoPE of 8 channels",
        ),
        (
            "loud/mixtral",
            "2 layers, 4 heads on 2 of 8, 5 experts of which 2, each 24 wide (silu)",
        ),
        (
            "loud/deepseek_v2",
            "6 experts of which 3 from 2 of 3 groups, each 8 wide (silu) and a shared one",
        ),
        (
            "loud/gemma3",
            "1 layer, 4 heads on 2 of 8, an MLP 24 wide (gelu_tanh), RoPE",
        ),
        ("loud/gpt_oss", "the MLP, learned sinks"),
        ("loud/qwen3_5", "a gated delta rule after a convolution over 3 tokens, values of 10, norms times 1 + scale"),
        ("loud/qwen3_next", "each 8 wide (silu) and a shared one 10 wide with a gate, a gated delta rule"),
        ("loud/qwen3_next", "RoPE of 4 channels (theta 100), a gate of the output, norms of queries and keys"),
        ("loud/gemma4", "RoPE of 12 channels (theta 100, proportional by 1, 0.5 of the pairs), dot products times 1"),
        ("loud/gemma4_shared", "keys and values of layer 1, RoPE of 12 channels"),
        ("loud/gemma4_moe", "and a shared one 24 wide, each with its own norms"),
    ],
)
def test_inspect_describes_layers_in_words(family, words):
    lines = describe(ROOT / family)
    layers = [value for label, value in lines.items() if label.startswith("layers")]
    assert any(words in value for value in layers)
    assert not any(re.search(r"[A-Z]\w+\(\w+=|\w+=None", value) for value in lines.values())


def test_inspect_counts_a_recurrent_state_by_itself():
    lines = describe(ROOT / "loud" / "qwen3_5")
    # Two layers of two key heads: the inputs of two earlier tokens, and for each of three value heads a matrix.
    state = 2 * 2 * (2 * 2 * (2 * 6 + 3 * 10) + 4 * 3 * 6 * 10)
    assert lines["recurrent state"] == f"{state:,} bytes a sequence of any length, in bfloat16"
    assert lines["KV per token"] == f"{2 * 2 * 2 * 8} bytes in bfloat16"
    assert "recurrent state" not in describe(ROOT / "loud" / "mixtral")


def test_inspect_says_that_images_are_not_read():
    names = load_file(ROOT / "loud" / "gemma3_vision" / "model.safetensors")
    count = sum("language_model" not in name for name in names)
    lines = describe(ROOT / "loud" / "gemma3_vision")
    assert lines["convertible"] == f"yes, as a decoder of texts: {count} tensors of other parts are left out"


def test_inspect_says_why_not(hf, capsys):
    directory = hf("llama3").config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert main(["inspect", str(directory)]) == 0
    assert "no: config.json: RoPE scaling 'dynamic' is not supported" in " ".join(capsys.readouterr().out.split())


def rename_tensors(directory: Path, change) -> Path:
    """Renames the tensors of a checkpoint, in one file or in shards with their index."""
    for file in directory.glob("*.safetensors"):
        save_file({change(name): x for name, x in load_file(file).items()}, file)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        raw = json.loads(index.read_text())
        raw["weight_map"] = {change(name): shard for name, shard in raw["weight_map"].items()}
        index.write_text(json.dumps(raw))
    return directory


FORMS = {
    "base": lambda name: name.removeprefix("model."),
    "images of transformers 4": lambda name: f"language_model.{name}",
    "images of transformers 5": lambda name: name.replace("model.", "model.language_model.", 1),
    "data parallel": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled base": lambda name: "_orig_mod." + name.removeprefix("model."),
    "peft": lambda name: f"base_model.model.{name}",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama3", "llama3_tied", "loud/mixtral", "loud/qwen3_moe", "loud/gpt_oss", "phi3"])
def test_a_checkpoint_is_the_same_under_the_prefix_of_another_class(hf, tmp_path, name, form):
    expected_config, expected = read(ROOT / name)
    directory = rename_tensors(hf(name).directory, FORMS[form])
    config, parameters = read(directory)
    ours, theirs = leaves(parameters), leaves(expected)
    assert config == expected_config and ours.keys() == theirs.keys()
    for path, x in theirs.items():
        np.testing.assert_array_equal(ours[path], x)
    convert(directory, tmp_path / "out")
    assert check(directory, tmp_path / "out", compare_logits=False).tensors


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("llama3_tied", "LlamaModel"), ("loud/gemma3", "Gemma3TextModel"), ("loud/smollm3", "SmolLM3Model")],
)
def test_a_decoder_that_was_saved_without_its_tied_head_is_read(hf, name, architecture):
    directory = rename_tensors(hf(name).config(architectures=[architecture]), FORMS["base"])
    tensors = {n: x for n, x in load_file(directory / "model.safetensors").items() if not n.startswith("lm_head")}
    save_file(tensors, directory / "model.safetensors")
    assert "embed_tokens.weight" in tensors
    ours, theirs = leaves(read(directory)[1]), leaves(read(ROOT / name)[1])
    assert ours.keys() == theirs.keys()
    for path, x in theirs.items():
        np.testing.assert_array_equal(ours[path], x)


def test_a_decoder_whose_own_head_is_missing_says_how_to_save_it(hf):
    editable = hf("mistral")
    editable.tensors(lm_head__weight=None)
    directory = rename_tensors(editable.config(architectures=["MistralModel"]), FORMS["base"])
    with pytest.raises(KvjaxError, match=r"1 problems .*\n.*lm_head.weight: missing .*save it as ..ForCausalLM"):
        read(directory)


def test_buffers_are_left_aside_and_everything_else_is_named(hf):
    buffers = {
        "layers__0__attn__masked_bias": np.float32(-1e4),
        "layers__1__self_attn__masked_bias": np.full((1,), -1e4, np.float32),
        "layers__0__attn__bias": np.tril(np.ones((1, 1, 8, 8), np.uint8)),
        "layers__0__self_attn__rotary_emb__inv_freq": np.ones(4, np.float32),
        "rotary_emb__inv_freq": np.ones(4, np.float32),
        "layers__1__self_attn__rotary_emb__cos_cached": np.ones((8, 4), np.float32),
    }
    expected = leaves(read(ROOT / "mistral")[1])
    for prefix in ("", "model__"):
        editable = hf("mistral")
        editable.tensors(**{prefix + name: x for name, x in buffers.items()})
        if not prefix:
            rename_tensors(editable.directory, FORMS["base"])
        ours = leaves(read(editable.directory)[1])
        assert all(np.array_equal(ours[path], x) for path, x in expected.items())
        stranger = {f"{prefix}layers__0__attn__bias": np.ones(8, np.float32), "model__stranger": np.ones(1, np.float32)}
        with pytest.raises(KvjaxError, match="2 problems") as e:
            read(editable.tensors(**stranger))
        assert "layers.0.attn.bias: no such tensor" in str(e.value) and "stranger: no such tensor" in str(e.value)


def test_layers_under_two_prefixes_are_refused_by_name(hf):
    editable = hf("mistral")
    one = editable.tensor("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(KvjaxError, match=r"1 problems .*\n  layers.0.mlp.up_proj.weight: no such tensor"):
        read(editable.tensors(layers__0__mlp__up_proj__weight=one))
