"""GEAR in NumPy, float64, from its paper (arXiv 2403.05527, section 4): the tokens of one head, [n H]."""

from __future__ import annotations

from math import floor

import numpy as np


def outlier_indices(vector: np.ndarray, fraction: float) -> list[int]:
    """The indices of the largest and the smallest numbers of a vector; ties go to the lower index."""
    num_each = floor(fraction / 2 * len(vector) + 1e-9)
    largest = sorted(range(len(vector)), key=lambda i: (-vector[i], i))[:num_each]
    smallest = sorted((i for i in range(len(vector)) if i not in largest), key=lambda i: (vector[i], i))[:num_each]
    return largest + smallest


def round_to_levels(vector: np.ndarray, bits: int) -> np.ndarray:
    """Rounds a vector to 2^bits levels from its minimum to its maximum."""
    lo, step = vector.min(), (vector.max() - vector.min()) / (2**bits - 1)
    return np.round((vector - lo) / step) * step + lo if step > 0 else vector


def compress_chunk(x: np.ndarray, axis: str, bits: int, rank: int, fraction: float) -> np.ndarray:
    """Compresses a chunk of tokens [n H] and restores it; its vectors are channels (keys) or tokens (values)."""
    vectors = (x.T if axis == "channel" else x).astype(float)
    coded, exact = np.empty_like(vectors), np.zeros(vectors.shape, bool)
    for i, vector in enumerate(vectors):
        outliers = outlier_indices(vector, fraction)
        exact[i, outliers] = True
        without = np.where(exact[i], vector.mean(), vector)
        coded[i] = round_to_levels(without, bits)
    if axis == "channel":
        coded, exact = coded.T, exact.T
    error = np.where(exact, 0.0, x - coded)
    left, size, right = np.linalg.svd(error, full_matrices=False)
    low_rank = (left[:, :rank] * size[:rank]) @ right[:rank]
    return np.where(exact, x, coded + low_rank)


def reconstruct(
    x, prompt: int, axis: str, bits: int, ranks: tuple[int, int], fraction: float, chunk_tokens: int
) -> np.ndarray:
    """The tokens [n H] as the last one reads them: the prompt is one chunk, `chunk_tokens` decoded tokens another."""
    tokens = x.astype(float).copy()
    tokens[:prompt] = compress_chunk(x[:prompt], axis, bits, ranks[0], fraction)
    for first in range(prompt, len(x) - chunk_tokens, chunk_tokens):
        tokens[first : first + chunk_tokens] = compress_chunk(
            x[first : first + chunk_tokens], axis, bits, ranks[1], fraction
        )
    return tokens
