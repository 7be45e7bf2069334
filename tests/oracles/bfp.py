"""Block floating point in NumPy, float64, with key channels in the order of their size (arXiv 2403.20137)."""

from __future__ import annotations

import numpy as np


def exponent(largest: float, bits: int) -> int:
    """The least exponent with which the largest mantissa reaches a positive number."""
    e = -126
    while (2 ** (bits - 1) - 1) * 2.0**e < largest:
        e += 1
    return e


def fake_quantize(x: np.ndarray, bits: int, block: int) -> np.ndarray:
    """Rounds a vector [H] to mantissas and back."""
    out = []
    for numbers in x.reshape(-1, block):
        scale = 2.0 ** exponent(np.abs(numbers).max(), bits)
        out += [round(y / scale) * scale for y in numbers.tolist()]
    return np.array(out)


def channel_order(k: np.ndarray) -> list[int]:
    """The channels of keys k [n H], the largest first; ties go to the lower channel."""
    size = (k**2).sum(0)
    return sorted(range(k.shape[1]), key=lambda c: (-size[c], c))


def fake_quantize_keys(k: np.ndarray, prompt: int, bits: int, block: int) -> np.ndarray:
    """Rounds keys [n H] in the channel order of their first `prompt` tokens, and restores the order."""
    channels = channel_order(k[:prompt])
    out = np.empty_like(k)
    out[:, channels] = np.stack([fake_quantize(x, bits, block) for x in k[:, channels]])
    return out
