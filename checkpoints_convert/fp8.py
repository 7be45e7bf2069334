"""FP8 in blocks, in which DeepSeek-V3, Kimi-K2 and Ministral 3 are published.

A matrix NAME is stored as f8_e4m3[R C] and NAME_scale_inv, a factor for each block of 128 rows and columns or one for
all. It is read as the bfloat16 nearest to the product. The factor by which a program may round activations too
(activation_scale) is left aside, as kvjax does not round them.

Reference:
  deepseek-ai/DeepSeek-V3, inference/fp8_cast_bf16.py; transformers, integrations/finegrained_fp8.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

Description = TypeVar("Description", bound=Any)  # `checkpoints_convert.source.Tensor`, which imports this module
DTYPE, SCALES = "F8_E4M3", "_scale_inv"


def read_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the rows and columns of a block, where a config.json says that its matrices are stored so.

    A file whose matrices have one factor each has blocks without an end. None for another format, and for none.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        return None
    size, is_e4m3 = quantization.get("weight_block_size"), quantization.get("fmt", "e4m3") == "e4m3"
    if size is None and is_e4m3:
        return (2**62, 2**62)
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size) or not is_e4m3:
        return None
    return (size[0], size[1])


def list_tensors(stored: Mapping[str, Description], block: tuple[int, int]) -> dict[str, Description]:
    """Returns the tensors that a checkpoint stands for: each matrix of codes with factors that fit is one tensor."""
    tensors = dict(stored)
    for name, codes in stored.items():
        scales = stored.get(name + SCALES)
        # Others stay as they are, and are refused by their types, or by their names.
        if codes.dtype != DTYPE or scales is None or len(codes.shape) != 2:
            continue
        grid = tuple(math.ceil(n / size) for n, size in zip(codes.shape, block, strict=True))
        if scales.dtype not in ("F32", "BF16") or math.prod(scales.shape) != math.prod(grid):
            continue
        if scales.shape != grid and math.prod(grid) > 1:
            continue
        del tensors[name + SCALES]
        tensors.pop(f"{name.removesuffix('weight')}activation_scale", None)
        size = math.prod(codes.shape) + 4 * math.prod(grid)
        tensors[name] = codes._replace(dtype="BF16", stored="FP8", bytes=size)
    return tensors


def read_codes(tensor: Any, name: str) -> np.ndarray:
    """Reads a stored tensor of codes, whose type NumPy's reader of safetensors does not know."""
    with open(tensor.file, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start = json.loads(file.read(length))[name]["data_offsets"][0] + 8 + length
    return np.memmap(tensor.file, ml_dtypes.float8_e4m3fn, "r", start, tensor.shape)


def dequantize(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Computes bfloat16[R C] of codes [R C] and a factor for each block, the last of which may be smaller."""
    rows, columns = codes.shape
    height, width = (min(n, size) for n, size in zip(codes.shape, block, strict=True))
    factors = np.asarray(scales, np.float32).reshape(-(-rows // height), -(-columns // width))
    out = np.empty(codes.shape, ml_dtypes.bfloat16)
    # One row of blocks after another: float32 of all of them would be twice the result.
    for i, row in enumerate(factors):
        part = slice(i * height, (i + 1) * height)
        out[part] = (codes[part].astype(np.float32) * np.repeat(row, width)[:columns]).astype(ml_dtypes.bfloat16)
    return out
