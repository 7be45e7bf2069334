"""Checkpoint directories: the written values come back, and nothing else is taken for a checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.errors import KvjaxError
from kvjax.models import Config, RopeScaling, checkpoint
from kvjax.models.model import random_model
from kvjax.models.sharding import param_shardings
from kvjax.utils.files import Busy

CONFIG = Config.llama(
    vocab_size=16,
    width=8,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=2,
    mlp_width=12,
    rope_scaling=RopeScaling("llama3", 8.0),
    windows=(None, 3),
    qk_norm=True,
    qkv_bias=True,
    eos_ids=(3, 5),
)


@pytest.fixture(scope="module")
def params():
    return random_model(CONFIG).params


@pytest.fixture
def model_directory(tmp_path, params):
    checkpoint.save(tmp_path / "model", CONFIG, params, source="a test")
    return tmp_path / "model"


def assert_same(ours, theirs):
    ours, theirs = flatten_dict(ours, sep="/"), flatten_dict(theirs, sep="/")
    assert ours.keys() == theirs.keys()
    for path, x in theirs.items():
        assert ours[path].dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(ours[path]), np.asarray(x), err_msg=path)


def test_round_trip(model_directory, params):
    config, restored = checkpoint.restore(model_directory)
    assert config == CONFIG
    assert_same(restored, params)
    record = checkpoint.read_manifest(model_directory)
    assert (record.dtype, record.source) == ("float32", "a test")
    assert set(record.digests) == {"embedding", "layer_0", "layer_1", "final_norm", "head"}
    assert sorted(p.name for p in model_directory.iterdir()) == ["kvjax.json", "params"]
    assert sorted(p.name for p in (model_directory / "params").iterdir()) == sorted(record.digests)


def test_no_file_names_the_place_where_it_was_written(model_directory):
    place = str(model_directory.parent).encode()
    assert [p for p in model_directory.rglob("*") if p.is_file() and place in p.read_bytes()] == []


def test_bfloat16_is_stored_as_such_and_widened_on_request(tmp_path, params):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    checkpoint.save(tmp_path / "model", CONFIG, narrow)
    assert_same(checkpoint.restore(tmp_path / "model")[1], narrow)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    assert_same(checkpoint.restore(tmp_path / "model", dtype=jnp.float32)[1], wide)


def test_mixed_types_are_saved_as_float32(tmp_path, params):
    mixed = {**params, "embedding": params["embedding"].astype(jnp.float16)}
    checkpoint.save(tmp_path / "model", CONFIG, mixed)
    assert {x.dtype for x in jax.tree.leaves(checkpoint.restore(tmp_path / "model")[1])} == {jnp.dtype("float32")}


def test_every_form_of_shardings(model_directory, params):
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    split, whole = NamedSharding(mesh, PartitionSpec("model")), NamedSharding(mesh, PartitionSpec())

    def sharding_of(path):
        return split if path == "embedding" else whole

    flat = flatten_dict(params, sep="/")
    tree = {name: jax.tree.map(lambda _: whole, sub) for name, sub in params.items()} | {"embedding": split}
    for shardings, expected in ((sharding_of, sharding_of), (tree, sharding_of), (whole, lambda path: whole)):
        restored = checkpoint.restore(model_directory, shardings=shardings)[1]
        assert_same(restored, params)
        for path, x in flatten_dict(restored, sep="/").items():
            assert x.sharding.is_equivalent_to(expected(path), flat[path].ndim), path
    del tree["final_norm"]
    with pytest.raises(KvjaxError, match="shardings with an entry for every parameter: 'final_norm/scale'"):
        checkpoint.restore(model_directory, shardings=tree)


def test_shards_that_do_not_follow_the_chunks_are_cut_from_them(model_directory, params):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))

    def sharding_of(path):
        axes = {1: ("a",), 2: ("a", "b"), 3: ("a", None, "b"), 4: ("a", None, None, "b")}[flat[path].ndim]
        return NamedSharding(mesh, PartitionSpec(*axes))

    flat = flatten_dict(params, sep="/")
    chunks = {path: x["chunk"] for path, x in checkpoint.read_manifest(model_directory).parameters.items()}
    assert chunks["layer_0/attention/q/kernel"] == [8, 1, 1, 2] and chunks["layer_0/mlp/down/kernel"] == [3, 8]
    restored = checkpoint.restore(model_directory, shardings=sharding_of)[1]
    assert_same(restored, params)
    assert all(
        x.sharding.is_equivalent_to(sharding_of(path), x.ndim) for path, x in flatten_dict(restored, sep="/").items()
    )


@pytest.mark.parametrize(
    ("shape", "num_devices"),
    [
        (Config.llama(128_256, 4096, 1, 32, 8, 128, 14_336, qkv_bias=True), (1, 2, 4, 8)),  # Llama 3.1 8B
        (Config.llama(49_152, 576, 1, 9, 3, 64, 1536), (1, 3)),  # SmolLM2 135M
        (Config.llama(151_936, 896, 1, 14, 2, 64, 4864, qk_norm=True), (1, 2)),  # Qwen2.5 0.5B
        (Config.llama(50_257, 1600, 1, 16, 4, 64, 6400), (1,)),  # a vocabulary that no mesh divides
    ],
)
def test_the_shards_of_every_mesh_are_whole_chunks_of_at_most_sixteen_mebibytes(shape, num_devices):
    shapes, axes = checkpoint.parameter_shapes(shape), checkpoint.parameter_axes(shape)
    for path, size in shapes.items():
        chunk = checkpoint.choose_chunk_shape(size, axes[path], 2, shape)
        assert all(n % c == 0 for n, c in zip(size, chunk, strict=True)), path
        assert np.prod(chunk) * 2 <= 16 * 2**20, path
        for devices in num_devices:
            spread = [n // devices if a in "KFV" else n for a, n in zip(axes[path], size, strict=True)]
            assert all(n % c == 0 for n, c in zip(spread, chunk, strict=True)), (path, devices)


def test_digests_are_those_of_the_numbers(tmp_path, params):
    signed = {**params, "final_norm": {"scale": -jnp.zeros(8)}}
    for name in ("a", "b"):
        checkpoint.save(tmp_path / name, CONFIG, signed)
    a, b = (checkpoint.read_manifest(tmp_path / name) for name in ("a", "b"))
    assert a == b
    chunk = np.asarray(params["layer_0"]["mlp"]["up"]["kernel"])[:, 3:6]
    assert a.parameters["layer_0/mlp/up/kernel"]["chunk"] == [8, 3]
    assert a.parameters["layer_0/mlp/up/kernel"]["digests"][1] == hashlib.sha256(chunk.tobytes()).hexdigest()
    assert np.signbit(checkpoint.restore(tmp_path / "a")[1]["final_norm"]["scale"]).all()


def test_a_directory_of_version_2_is_read_and_checked_as_before(tmp_path):
    directory, shipped = tmp_path / "model", resources.files("kvjax") / "testbed"
    shutil.copytree(str(shipped), directory)
    record = checkpoint.read_manifest(directory)
    assert record.version == 2 and json.loads(record.to_json()) == json.loads((directory / "kvjax.json").read_text())
    config, ours = checkpoint.restore(directory)
    checkpoint.save(tmp_path / "again", config, ours)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    split = param_shardings(config, mesh)
    for shardings, dtype in ((None, None), (split, None), (split, "bfloat16")):
        # What version 3 stores of it comes back with the same bits, rounded or not.
        old, new = (checkpoint.restore(tmp_path / name, dtype, shardings)[1] for name in ("model", "again"))
        assert_same(new, old)
    file = largest_file(directory / "params" / "layer_1")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(KvjaxError, match="part 'layer_1' .* is damaged .its digest differs"):
        checkpoint.restore(directory)


def test_one_part_alone(model_directory, params):
    assert_same(checkpoint.read_part(model_directory, "layer_1"), params["layer_1"])
    np.testing.assert_array_equal(checkpoint.read_part(model_directory, "embedding"), params["embedding"])


def test_extra_files_are_written(tmp_path, params):
    checkpoint.save(tmp_path / "model", CONFIG, params, extra_files={"tokenizer.json": b"{}"})
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"
    checkpoint.restore(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{ }")
    with pytest.raises(KvjaxError, match="tokenizer.json is missing or not what was written"):
        checkpoint.restore(tmp_path / "model")


def test_nothing_appears_unless_complete(tmp_path, params):
    with (
        pytest.raises(KvjaxError, match="head/kernel: missing"),
        checkpoint.Writer(tmp_path / "a", CONFIG, "float32") as w,
    ):
        for name in ("embedding", "layer_0", "layer_1", "final_norm"):
            w.put(name, params[name])
    with pytest.raises(KeyboardInterrupt), checkpoint.Writer(tmp_path / "a", CONFIG, "float32") as w:
        w.put("embedding", params["embedding"])
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_wrong_trees_are_refused_with_every_reason(tmp_path, params):
    wrong_tree = {
        **params,
        "head": {"kernel": params["head"]["kernel"].T},
        "tail": {"scale": params["final_norm"]["scale"]},
    }
    del wrong_tree["final_norm"]
    with pytest.raises(KvjaxError) as e:
        checkpoint.save(tmp_path / "model", CONFIG, wrong_tree)
    assert "final_norm/scale: missing" in str(e.value)
    assert "tail/scale: not a parameter of this config" in str(e.value)
    assert "head/kernel: shape [16, 8], the config says [8, 16]" in str(e.value)
    assert not list(tmp_path.iterdir())


def test_existing_directory_is_refused_or_replaced_when_complete(model_directory, params):
    with pytest.raises(KvjaxError, match="exists"):
        checkpoint.save(model_directory, CONFIG, params)
    doubled = jax.tree.map(lambda x: 2 * x, params)
    with pytest.raises(RuntimeError), checkpoint.Writer(model_directory, CONFIG, "float32", replace=True) as w:
        w.put("embedding", doubled["embedding"])
        raise RuntimeError
    assert_same(checkpoint.restore(model_directory)[1], params)
    checkpoint.save(model_directory, CONFIG, doubled, replace=True)
    assert_same(checkpoint.restore(model_directory)[1], doubled)
    assert [p.name for p in model_directory.parent.iterdir()] == ["model"]


def test_a_file_in_the_way_is_not_replaced(tmp_path, params):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(KvjaxError, match="not a kvjax checkpoint, so it is not replaced"):
        checkpoint.save(tmp_path / "model", CONFIG, params, replace=True)


def test_what_lies_beside_is_the_users_own(tmp_path, model_directory, params):
    names = [f"model{end}" for end in (".partial", ".old", ".joined", ".lock")]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    checkpoint.save(model_directory, CONFIG, params, replace=True)
    with pytest.raises(RuntimeError), checkpoint.Writer(model_directory, CONFIG, "float32", replace=True):
        raise RuntimeError
    assert [(tmp_path / name / "mine").read_text() for name in names] == ["mine"] * 4
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["model", *names])


@pytest.fixture
def link(tmp_path):
    """A link to a path in another folder, which does not exist yet."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch/model")
    return tmp_path / "link"


@pytest.mark.parametrize("there", ["nothing", "empty", "model"])
def test_a_link_is_followed(link, params, there):
    if there == "empty":
        link.resolve().mkdir()
    if there == "model":
        checkpoint.save(link.resolve(), CONFIG, jax.tree.map(lambda x: 2 * x, params))
    checkpoint.save(link, CONFIG, params, replace=there == "model")
    assert link.is_symlink() and not (link.parent / "scratch" / "model").is_symlink()
    assert_same(checkpoint.restore(link.parent / "scratch" / "model")[1], params)
    assert [p.name for p in link.resolve().parent.iterdir()] == ["model"]
    assert sorted(p.name for p in link.parent.iterdir()) == ["link", "scratch"]


def test_a_link_to_itself_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(KvjaxError, match="leads back to itself"):
        checkpoint.Writer(tmp_path / "link", CONFIG, "float32")


def write_parts(directory, params):
    """Writes all parts; the returned writer has only to move them to their place."""
    writer = checkpoint.Writer(directory, CONFIG, "float32", replace=True)
    writer.__enter__()
    for name, x in params.items():
        writer.put(name, x)
    return writer


def test_one_process_at_a_time_writes_a_directory_under_whichever_name(link, params):
    writer, other = write_parts(link, params), checkpoint.Writer(link.resolve(), CONFIG, "float32")
    with pytest.raises(Busy, match="another process writes .*scratch/model; wait"):
        other.__enter__()
    writer.__exit__(None, None, None)
    assert_same(checkpoint.restore(link)[1], params)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_replacement_that_fails_at_the_last_step_leaves_the_old_one(model_directory, params, monkeypatch, error):
    rename = type(model_directory).rename

    def fails(self, target):
        if self.name == "new":
            raise error
        return rename(self, target)

    writer = write_parts(model_directory, jax.tree.map(lambda x: 2 * x, params))
    monkeypatch.setattr(type(model_directory), "rename", fails)
    with pytest.raises(error):
        writer.__exit__(None, None, None)
    assert_same(checkpoint.restore(model_directory)[1], params)
    assert [p.name for p in model_directory.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_before_it_begins_leaves_nothing(tmp_path, monkeypatch, error):
    mkdir = type(tmp_path).mkdir

    def fails(self, *args, **more):
        if self.name == "params":
            raise error
        mkdir(self, *args, **more)

    monkeypatch.setattr(type(tmp_path), "mkdir", fails)
    with pytest.raises(error):
        checkpoint.Writer(tmp_path / "model", CONFIG, "float32").__enter__()
    assert not list(tmp_path.iterdir())


def test_what_was_set_aside_by_a_killed_replacement_goes_back(model_directory, params):
    doubled = jax.tree.map(lambda x: 2 * x, params)
    writer = write_parts(model_directory, doubled)
    model_directory.rename(writer._old)
    writer._lock.__exit__(None, None, None)  # as when the process ends here
    with pytest.raises(KvjaxError, match="exists"):
        checkpoint.save(model_directory, CONFIG, doubled)
    assert_same(checkpoint.restore(model_directory)[1], params)
    assert [p.name for p in model_directory.parent.iterdir()] == ["model"]


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_a_flipped_bit_names_the_part_whichever_file_it_is_in(model_directory, params):
    files = [p for p in (model_directory / "params" / "layer_1").rglob("*") if p.is_file()]
    assert len(files) >= 2
    num_unread = 0
    for file in files:
        intact = file.read_bytes()
        flipped = bytearray(intact)
        flipped[len(flipped) // 2] ^= 1
        for damaged in (flipped, intact[: len(intact) // 2], b""):
            file.write_bytes(damaged)
            try:
                _, restored = checkpoint.restore(model_directory)
            except KvjaxError as e:
                assert re.search("part 'layer_1' .* is damaged .*copy the checkpoint again", str(e))
            else:  # what nothing reads, as an index that was written anew, changes nothing
                num_unread += 1
                assert_same(restored, params)
        file.write_bytes(intact)
    assert num_unread <= len(files)


def test_numbers_of_another_part_name_the_chunk(model_directory):
    shutil.rmtree(model_directory / "params" / "layer_1")
    (model_directory / "params" / "layer_0").rename(model_directory / "params" / "layer_1")
    with pytest.raises(KvjaxError, match="part 'layer_1' of .* cannot be read"):
        checkpoint.read_part(model_directory, "layer_1")
    checkpoint.save(model_directory.parent / "other", CONFIG, random_model(CONFIG, 1).params)
    shutil.rmtree(model_directory / "params" / "layer_1")
    shutil.copytree(model_directory.parent / "other" / "params" / "layer_1", model_directory / "params" / "layer_1")
    with pytest.raises(KvjaxError, match=r"the digest of chunk \(0, 0, 0\) of layer_1/attention/k/kernel differs"):
        checkpoint.read_part(model_directory, "layer_1")


def test_a_missing_file_or_part_is_named(model_directory):
    largest_file(model_directory / "params" / "head").unlink()
    with pytest.raises(KvjaxError, match="part 'head' .* is damaged"):
        checkpoint.restore(model_directory)
    (model_directory / "params" / "head").rename(model_directory / "head")
    with pytest.raises(KvjaxError, match="part 'head' .* is missing"):
        checkpoint.restore(model_directory)


def edit(directory, change):
    raw = json.loads((directory / "kvjax.json").read_text())
    change(raw)
    (directory / "kvjax.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(version=4), "version 4, and this kvjax reads versions 2 and 3 .* upgrade kvjax"),
        (
            lambda raw: raw.update(version=1),
            "version 1, and this kvjax reads versions 2 and 3 .*convert the checkpoint",
        ),
        (lambda raw: raw.update(format="other"), "has format 'other'"),
        (lambda raw: raw.pop("format"), "is damaged.*convert the checkpoint again"),
        (lambda raw: raw.pop("digests"), "is damaged"),
        (lambda raw: raw["parameters"]["embedding"]["digests"].pop(), "embedding lacks a digest of each chunk"),
        (lambda raw: raw["parameters"]["embedding"].update(chunk=[0, 8]), "embedding lacks a digest of each chunk"),
        (lambda raw: raw["parameters"]["embedding"].pop("chunk"), "is damaged"),
        (lambda raw: raw["parameters"]["embedding"].update(chunk=8), "is damaged"),
        (lambda raw: raw.update(digests=None), "is damaged"),
        (lambda raw: raw.update(parameters=[]), "is damaged"),
        (
            lambda raw: raw["config"].update(mlp_width=13),
            r"layer_0/mlp/up/kernel: shape \[8, 12\], the config says \[8, 13\]",
        ),
        (lambda raw: raw["config"].update(layers=3, windows=None), "layer_2/mlp/up/kernel: missing"),
        (lambda raw: raw["config"].update(kv_heads=3), "must be a multiple of kv_heads"),
        (lambda raw: raw["config"].update(surprise=1), "not a kvjax model configuration"),
        (lambda raw: raw["parameters"]["embedding"].update(dtype="float99"), "its digest differs"),
        (lambda raw: raw["config"].update(rope_theta=20_000.0), "kvjax.json is missing or not what was written"),
        (lambda raw: raw.pop("digest"), "kvjax.json is missing or not what was written"),
        (lambda raw: raw["config"].update(norm_eps=-1.0), "norm_eps must be above 0, got -1.0"),
        (lambda raw: raw["config"].update(norm_eps=float("nan")), "norm_eps must be above 0, got nan"),
        (lambda raw: raw["config"].update(rope_theta=float("inf")), "theta must be above 0, got inf"),
        (lambda raw: raw["config"].update(rope_theta="1e4"), "theta must be a number.*, got '1e4'"),
    ],
)
def test_damaged_or_newer_manifests(model_directory, change, message):
    edit(model_directory, change)
    with pytest.raises(KvjaxError, match=message):
        checkpoint.restore(model_directory)


def test_foreign_directories(tmp_path, model_directory):
    with pytest.raises(KvjaxError, match="there is no checkpoint directory"):
        checkpoint.restore(tmp_path / "nowhere")
    (tmp_path / "hf").mkdir()
    with pytest.raises(KvjaxError, match="has no kvjax.json"):
        checkpoint.restore(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(KvjaxError, match="is a Hugging Face checkpoint; convert it: python -m checkpoints_convert"):
        checkpoint.restore(tmp_path / "hf")
    (model_directory / "kvjax.json").write_text("[1]")
    with pytest.raises(KvjaxError, match="kvjax.json does not hold a JSON object"):
        checkpoint.restore(model_directory)


def test_parameter_shapes_follow_the_config():
    tied = checkpoint.parameter_shapes(Config.llama(16, 8, 1, 4, 2, 2, 12, tie_embeddings=True, out_bias=True))
    assert "head/kernel" not in tied
    assert tied["layer_0/attention/q/kernel"] == (8, 2, 2, 2)
    assert tied["layer_0/attention/o/kernel"] == (2, 2, 2, 8)
    assert tied["layer_0/attention/o/bias"] == (8,)
    assert checkpoint.part_names(tied) == ("embedding", "final_norm", "layer_0")
