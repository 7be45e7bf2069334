"""RotateKV in NumPy, float64, from its authors' code (arXiv 2501.16383): one sequence, one token at a time."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.oracles.token_codes import hadamard


def quantize(x: np.ndarray, bits: int, clip: float) -> tuple[list[int], int, float]:
    """Quantizes a group [g] -> (its codes, the zero point, the step, which is stored in bfloat16)."""
    top, least, most = 2**bits - 1, x.min() * clip, x.max() * clip
    scale = max((most - least) / top, max(abs(least), abs(most)) / 2**14, 1e-30)
    scale = float(ml_dtypes.bfloat16(scale))
    zero = round(-least / scale)
    return [min(max(round(y / scale) + zero, 0), top) for y in x.tolist()], zero, scale


def dequantize(codes: list[int], zero: int, scale: float) -> np.ndarray:
    """Decodes a group of numbers."""
    return (np.array(codes, np.float64) - zero) * scale


def fake_quantize_value(v: np.ndarray, bits: int, clip: float) -> np.ndarray:
    """Quantizes and dequantizes a value [H]."""
    rotation = hadamard(len(v))
    return rotation @ dequantize(*quantize(rotation @ v, bits, clip))


def channel_order(mean: np.ndarray, heads: int) -> np.ndarray:
    """The order of a layer's rotated channels, by any multiple of the mean key before RoPE [K H]."""
    return np.argsort(rotate_heads(mean, heads), kind="stable")


def rotate_heads(k: np.ndarray, heads: int) -> np.ndarray:
    """Rotates the channels [K*H] of a key before RoPE [K H] within each group of heads."""
    groups = k.reshape(-1, heads * k.shape[1])
    return (groups @ hadamard(groups.shape[1])).ravel()


def fake_quantize_key(k: np.ndarray, order: np.ndarray, heads: int, bits: int, clip: float) -> np.ndarray:
    """Quantizes and dequantizes a key before RoPE [K H], in groups of H ordered channels."""
    K, H = k.shape
    ordered = rotate_heads(k, heads)[order].reshape(K, H)
    channels = np.empty(K * H)
    channels[order] = np.concatenate([dequantize(*quantize(group, bits, clip)) for group in ordered])
    groups = channels.reshape(-1, heads * H)
    return (groups @ hadamard(heads * H)).reshape(K, H)
