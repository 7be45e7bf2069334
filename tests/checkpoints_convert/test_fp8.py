"""Matrices in FP8 with a factor for each block: read as the bfloat16 numbers that the codes stand for."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints_convert.check import check
from checkpoints_convert.convert import convert, read
from checkpoints_convert.describe import describe
from checkpoints_convert.fp8 import dequantize
from kvjax.errors import KvjaxError
from tests.checkpoints_convert.conftest import Editable

F8 = ml_dtypes.float8_e4m3fn
NAMES = {F8: "F8_E4M3", ml_dtypes.bfloat16: "BF16", np.float32: "F32"}


def test_numbers_are_those_of_transformers():
    """Of `Fp8Dequantize` in transformers 5.24: codes [4 6], factors of blocks of 2 by 2, and what it makes of them."""
    codes = np.frombuffer(bytes.fromhex("e6e6d5db6361d8ed5cd069555063cecb64686d435fdae3ee"), F8).reshape(4, 6)
    scales = np.frombuffer(bytes.fromhex("e474ac3b12af1f3b298fbf3bb8d0ad39a9d1b53a4ac01e3b"), "<f4").reshape(2, 3)
    numbers = "97be97be02bd5cbd843e583eacbd0cbf703da0bcd83e9c3d2e3b6f3c1fbcfabbee3d1f3e0d3d6f3a2a3de3bcdabd8bbe"
    expected = np.frombuffer(bytes.fromhex(numbers), ml_dtypes.bfloat16).reshape(4, 6)
    np.testing.assert_array_equal(dequantize(codes, scales, (2, 2)), expected)


def test_the_last_blocks_may_be_smaller():
    rng = np.random.default_rng(0)
    codes, scales = rng.normal(size=(5, 7)).astype(F8), rng.uniform(size=(3, 2)).astype(np.float32)
    numbers = dequantize(codes, scales, (2, 4))
    for r, c in np.ndindex(codes.shape):
        product = np.float32(codes[r, c]) * scales[r // 2, c // 4]
        assert numbers[r, c] == product.astype(ml_dtypes.bfloat16)


def save(tensors: dict[str, np.ndarray], file: Path) -> None:
    """Writes a file of safetensors, whose NumPy writer has no FP8."""
    header, end = {}, 0
    for name, x in tensors.items():
        offsets = [end, end := end + x.nbytes]
        header[name] = {"dtype": NAMES[x.dtype.type], "shape": list(x.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for x in tensors.values()))


def write(editable: Editable, block: list[int] | None, **quantization) -> Path:
    """Rewrites a fixture with the matrices of its layers in FP8, and beside it, in `numbers`, what they stand for."""
    tensors, numbers, rng = load_file(editable.file), {}, np.random.default_rng(1)
    for name, x in dict(tensors).items():
        if ".layers." not in name or x.ndim != 2 or name.endswith("mlp.gate.weight"):
            continue
        rows, columns = block or x.shape
        shape = (-(-x.shape[0] // rows), -(-x.shape[1] // columns)) if block else ()
        scales = rng.uniform(0.5, 2.0, shape).astype(np.float32)
        tensors[name] = x.astype(F8)
        numbers[name] = dequantize(tensors[name], scales, (rows, columns))
        tensors[f"{name}_scale_inv"] = scales
        if block is None:
            tensors[f"{name.removesuffix('weight')}activation_scale"] = np.ones((), np.float32)
    editable.tensors(**{name.replace(".", "__"): x for name, x in numbers.items()})
    expected = Path(editable.directory.rename(editable.directory.with_name("numbers")))
    directory = editable.directory
    directory.mkdir()
    raw = json.loads((expected / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block, **quantization}
    (directory / "config.json").write_text(json.dumps(raw))
    save(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(("name", "block"), [("deepseek_v3", [7, 5]), ("mistral3", None)])
def test_a_quantized_checkpoint_is_that_of_its_numbers(name, block, hf, tmp_path):
    directory = write(hf(f"loud/{name}"), block, fmt="e4m3")
    (config, ours), (expected_config, expected) = (read(x) for x in (directory, directory.with_name("numbers")))
    assert config == expected_config
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    lines = describe(directory)
    assert lines["convertible"].startswith("yes") and "FP8" in lines["types"]
    convert(directory, tmp_path / "out")
    assert check(directory, tmp_path / "out", compare_logits=False).tensors > 10


@pytest.mark.parametrize(
    ("block", "changes", "says"),
    [
        ([7, 5], {"fmt": "e5m2"}, "quantization_config .*fp8.* is not supported; save the weights dequantized"),
        ([7, 5], {"weight_block_size": [7]}, "quantization_config .*fp8.* is not supported"),
        ([7, 5], {"weight_block_size": [8, 5]}, "q_proj.weight: stored as F8_E4M3; save it dequantized"),
        ([7, 5], {"weight_block_size": None}, "q_proj.weight: stored as F8_E4M3; save it dequantized"),
    ],
)
def test_factors_that_do_not_fit_are_refused(block, changes, says, hf):
    with pytest.raises(KvjaxError, match=says):
        read(write(hf("loud/seed_oss"), block, **changes))
