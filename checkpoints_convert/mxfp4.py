"""MXFP4, in which gpt-oss stores its experts: 32 numbers of four bits share a scale of eight.

A tensor NAME is stored as NAME_blocks u8[.. R C 16], two e2m1 numbers a byte, the low half first, and NAME_scales
u8[.. R C], exponents e8m0 of two. It is read as bfloat16[.. 32 C, R], transposed as transformers has it; every value
is exact in bfloat16.

Reference:
  OCP Microscaling Formats (MX) Specification v1.0; transformers, integrations/mxfp4.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

Description = TypeVar("Description", bound=Any)  # `checkpoints_convert.source.Tensor`, which imports this module
BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
EXPONENT_BIAS = 127
POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
E2M1 = np.concatenate([POSITIVE, -POSITIVE])
"""The number of each code of four bits, f32[16]; the highest bit is the sign."""
BYTES = np.arange(256)
PAIRS = E2M1[np.stack([BYTES & 15, BYTES >> 4], axis=-1)]
"""The two numbers of each byte, f32[256 2], the low half's first."""


def is_used(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its tensors are stored so, in the family that is published so."""
    quantization = config.get("quantization_config")
    is_named = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
    return is_named and config.get("model_type") == "gpt_oss"


def list_tensors(stored: Mapping[str, Description]) -> dict[str, Description]:
    """Returns the tensors that a checkpoint stands for: each pair of blocks and scales that fit is one tensor."""
    tensors = dict(stored)
    for name, blocks in stored.items():
        stem = name.removesuffix(BLOCKS)
        scales = stored.get(stem + SCALES)
        if stem == name or scales is None:
            continue
        # Others stay as they are, and are refused by their names as tensors that the family lacks.
        is_matrix = len(scales.shape) >= 2 and blocks.shape == (*scales.shape, GROUP // 2)
        if not is_matrix or {blocks.dtype, scales.dtype} != {"U8"}:
            continue
        *outer, rows, groups = scales.shape
        size = math.prod(blocks.shape) + math.prod(scales.shape)
        del tensors[name], tensors[stem + SCALES]
        shape = (*outer, groups * GROUP, rows)
        tensors[stem] = blocks._replace(shape=shape, dtype="BF16", stored="MXFP4", bytes=size)
    return tensors


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Computes bfloat16[.. 32 C, R] of u8[.. R C 16] and u8[.. R C]; a scale that is no number gives infinities."""
    *outer, rows, groups = scales.shape
    out = np.empty((math.prod(outer), groups * GROUP, rows), ml_dtypes.bfloat16)
    # One expert after another: float32 of all of them would be twice the result.
    flat = zip(blocks.reshape(-1, rows, groups, GROUP // 2), scales.reshape(-1, rows, groups), strict=True)
    for i, (codes, exponents) in enumerate(flat):
        numbers = PAIRS[codes].reshape(rows, groups, GROUP)
        with np.errstate(over="ignore"):
            numbers = np.ldexp(numbers, exponents.astype(np.int32)[..., None] - EXPONENT_BIAS)
        out[i] = numbers.reshape(rows, groups * GROUP).T.astype(ml_dtypes.bfloat16)
    return out.reshape(*outer, groups * GROUP, rows)
