"""KVQuant in NumPy, float64, from its authors' code with ranges that are found online: one vector at a time."""

from __future__ import annotations

import numpy as np

NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""The levels of NF4, as published (Dettmers et al. 2023, arXiv 2305.14314, appendix E)."""


def vector(x: np.ndarray, levels: np.ndarray, share: float) -> np.ndarray:
    """Numbers [n] as they are held: those at or beyond two quantiles exactly, the others at the nearest level."""
    out = np.zeros(len(x), bool)
    if share:
        out = (x >= np.quantile(x, 1 - share / 2)) | (x <= np.quantile(x, share / 2))
    held = x.copy()
    if not out.all():
        least, most = x[~out].min(), x[~out].max()
        half, middle = (most - least) / 2, (most + least) / 2
        for i in np.flatnonzero(~out):
            place = (x[i] - middle) / half if half else 0.0
            held[i] = levels[np.abs(levels - place).argmin()] * half + middle
    return held


def held(x: np.ndarray, prompt: int, axis: str, levels: np.ndarray, share: float, every: int, first: int) -> np.ndarray:
    """One head's tokens [n H] when the last has just been written: prompt, full chunks, and what is not yet a chunk."""
    full = max(len(x) - 1 - prompt, 0) // every
    ends = [0, *(prompt + every * i for i in range(full + 1))]
    found = x.copy()
    for start, end in zip(ends, ends[1:], strict=False):
        block = found[start:end].T if axis == "channel" else found[start:end]
        for row in block:
            row[:] = vector(row, levels, share) if end > start else row
    found[:first] = x[:first]
    return found
