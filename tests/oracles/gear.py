"""GEAR in NumPy, float64, from its paper (2403.05527, section 4): the tokens of one head, [n H]."""

from __future__ import annotations

from math import floor

import numpy as np


def outliers(vector: np.ndarray, share: float) -> list[int]:
    """Where the largest and the smallest numbers of a vector are; of equal ones the first."""
    count = floor(share / 2 * len(vector) + 1e-9)
    largest = sorted(range(len(vector)), key=lambda i: (-vector[i], i))[:count]
    smallest = sorted((i for i in range(len(vector)) if i not in largest), key=lambda i: (vector[i], i))[:count]
    return largest + smallest


def levels(vector: np.ndarray, bits: int) -> np.ndarray:
    """A vector rounded to 2^bits levels from its minimum to its maximum."""
    lo, step = vector.min(), (vector.max() - vector.min()) / (2**bits - 1)
    return np.round((vector - lo) / step) * step + lo if step > 0 else vector


def chunk(x: np.ndarray, axis: str, bits: int, rank: int, share: float) -> np.ndarray:
    """Tokens x [n H] that become codes together; vectors are channels (keys) or tokens (values)."""
    vectors = (x.T if axis == "channel" else x).astype(float)
    coded, exact = np.empty_like(vectors), np.zeros(vectors.shape, bool)
    for i, vector in enumerate(vectors):
        out = outliers(vector, share)
        exact[i, out] = True
        without = np.where(exact[i], vector.mean(), vector)
        coded[i] = levels(without, bits)
    if axis == "channel":
        coded, exact = coded.T, exact.T
    error = np.where(exact, 0.0, x - coded)
    left, size, right = np.linalg.svd(error, full_matrices=False)
    low_rank = (left[:, :rank] * size[:rank]) @ right[:rank]
    return np.where(exact, x, coded + low_rank)


def held(x, prompt: int, axis: str, bits: int, ranks: tuple[int, int], share: float, every: int) -> np.ndarray:
    """All tokens [n H] as the last of them sees them: the prompt is one chunk, `every` decoded tokens another."""
    out = x.astype(float).copy()
    out[:prompt] = chunk(x[:prompt], axis, bits, ranks[0], share)
    for first in range(prompt, len(x) - every, every):
        out[first : first + every] = chunk(x[first : first + every], axis, bits, ranks[1], share)
    return out
