"""The benchmark of the packed kernel in miniature, on the CPU, where it leaves the kernel out."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import pytest

from experiments.bench import packed_kernel
from kvjax.core.kernels import packed_attention


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, value in {"K": 1, "G": 2, "H": 64}.items():
        monkeypatch.setattr(packed_kernel, name, value)
    jax.clear_caches()  # compiled with other sizes


def test_all_sides_agree_and_the_last_line_is_json(capsys):
    packed_kernel.main("--context 128 --batches 1,2 --megabytes 0 --rounds 2 --repeats 2 --read-megabytes 1".split())
    out = capsys.readouterr().out
    assert "The kernel needs a GPU." in out
    cells = json.loads(out.strip().splitlines()[-1])["results"]
    assert [(c["batch"], c["context"], c["bits"], c["layers"]) for c in cells] == [(1, 128, 2, 1), (2, 128, 2, 1)]
    for c in cells:
        assert list(c["seconds_per_layer"]) == list(c["error"]) == ["dequantized", "dense", "jax xla"]
        assert c["error"]["dequantized"] == 0 and max(c["error"].values()) < packed_kernel.TOLERANCE
        # Keys and values: 2 bits each, and 2 numbers of 2 bytes for 64 of them; pos: 4 bytes a token.
        numbers = c["batch"] * 2 * 128 * 64
        assert c["bytes"]["dequantized"] == numbers / 4 + numbers / 64 * 4 + c["batch"] * 128 * 4
        assert c["bytes"]["dense"] == numbers * 2 + c["batch"] * 128 * 4
    assert len(packed_kernel.rows(cells[0])[0]) == len(packed_kernel.COLUMNS)


def test_a_gpu_has_the_kernel_and_cudnn_too():
    assert list(packed_kernel.sides(2, 128, gpu=True)) == ["kernel", "dequantized", "dense", "jax cudnn", "jax xla"]


def test_the_kernel_side_agrees(monkeypatch):
    monkeypatch.setattr(packed_attention, "attend", functools.partial(packed_attention.attend, interpret=True))
    runs = {name: x for name, x in packed_kernel.sides(8, 128, gpu=True).items() if name in ("kernel", "dequantized")}
    q = jax.random.normal(jax.random.key(1), (1, 1, 2, 1, 64), jnp.bfloat16)
    errors, _ = packed_kernel.relative_errors(runs, q, packed_kernel.random_layer(jax.random.key(0), 1, 128, 8))
    assert 0 < errors["kernel"] < packed_kernel.TOLERANCE


def test_sides_that_differ_stop_the_run_and_unsupported_ones_are_left_out():
    x = packed_kernel.random_layer(jax.random.key(0), 1, 128, 2)
    q = jnp.ones((1, 1, 2, 1, 64), jnp.bfloat16)
    right = packed_kernel.sides(2, 128, gpu=False)["dequantized"]

    def refuse(q, kv):
        raise ValueError("no such shape\nand much more")

    errors, notes = packed_kernel.relative_errors({"dequantized": right, "jax cudnn": ("jax", refuse)}, q, x)
    assert errors == {"dequantized": 0.0} and notes == ["jax cudnn is left out: no such shape"]
    with pytest.raises(AssertionError, match="dense differs from the reference by 100.0% of its norm"):
        packed_kernel.relative_errors(
            {"dequantized": right, "dense": ("dense", lambda q, block: 2 * right[1](q, x["packed"]))}, q, x
        )
    with pytest.raises(ValueError, match="no such shape"):
        packed_kernel.relative_errors({"dequantized": right, "dense": ("jax", refuse)}, q, x)


def test_context_must_hold_whole_groups(capsys):
    with pytest.raises(SystemExit):
        packed_kernel.main(["--context", "100"])
    assert "multiple of 64, got 100" in capsys.readouterr().err
