"""KVQuant in NumPy, float64 (arXiv 2401.18079, section 3), with the authors' constants and online ranges."""

from __future__ import annotations

import numpy as np

NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""The levels of NF4, as published (Dettmers et al. 2023, arXiv 2305.14314, appendix E)."""


def fake_quantize(x: np.ndarray, levels: np.ndarray, fraction: float) -> np.ndarray:
    """Rounds numbers [n] to the nearest level, except those at or beyond two quantiles, which stay exact."""
    is_outlier = np.zeros(len(x), bool)
    if fraction:
        is_outlier = (x >= np.quantile(x, 1 - fraction / 2)) | (x <= np.quantile(x, fraction / 2))
    out = x.copy()
    if not is_outlier.all():
        least, most = x[~is_outlier].min(), x[~is_outlier].max()
        half, middle = (most - least) / 2, (most + least) / 2
        for i in np.flatnonzero(~is_outlier):
            position = (x[i] - middle) / half if half else 0.0
            out[i] = levels[np.abs(levels - position).argmin()] * half + middle
    return out


def reconstruct(
    x: np.ndarray, prompt: int, axis: str, levels: np.ndarray, fraction: float, chunk_tokens: int, num_exact: int
) -> np.ndarray:
    """One head's stored tokens [n H] after the last was written: the prompt, full chunks, and an exact remainder."""
    full = max(len(x) - 1 - prompt, 0) // chunk_tokens
    bounds = [0, *(prompt + chunk_tokens * i for i in range(full + 1))]
    out = x.copy()
    for start, end in zip(bounds, bounds[1:], strict=False):
        block = out[start:end].T if axis == "channel" else out[start:end]
        for vector in block:
            vector[:] = fake_quantize(vector, levels, fraction) if end > start else vector
    out[:num_exact] = x[:num_exact]
    return out
