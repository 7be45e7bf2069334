"""Expected Attention in NumPy, float64, from its paper (arXiv 2510.00636) and kvpress: one head of one sequence.

Queries q [G T H], keys k and values v [T H], all of T tokens after rotation by RoPE; `frequencies` [H / 2] in radians.
"""

from __future__ import annotations

import numpy as np


def rotation_matrix(position: int, frequencies: np.ndarray) -> np.ndarray:
    """The matrix [H H] that rotates a column vector to a position; the pairs of channels are (i, i + H / 2)."""
    half = len(frequencies)
    matrix = np.zeros((2 * half, 2 * half))
    for i, frequency in enumerate(frequencies):
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        matrix[i, i], matrix[i, i + half] = cos, -sin
        matrix[i + half, i], matrix[i + half, i + half] = sin, cos
    return matrix


def scores(q, k, v, frequencies, sinks, future, covariance=True, value_norms=True, epsilon=0.0) -> np.ndarray:
    """The scores [T - sinks] of the tokens after the sinks."""
    G, T, H = q.shape
    mean_rotation = np.mean([rotation_matrix(T + t, frequencies) for t in range(future)], 0)
    head_scores = []
    for head in range(G):
        bare_queries = np.array([rotation_matrix(t, frequencies).T @ q[head, t] for t in range(sinks, T)])
        mean = mean_rotation @ bare_queries.mean(0)
        query_covariance = mean_rotation @ np.cov(bare_queries.T, bias=True).reshape(H, H) @ mean_rotation.T
        logits = np.array(
            [mean @ x / np.sqrt(H) + covariance * (x @ query_covariance @ x) / (2 * H) for x in k[sinks:]]
        )
        attention = np.exp(logits - logits.max())
        head_scores.append(attention / attention.sum())
    expected = np.mean(head_scores, 0)
    return (expected + epsilon) * np.linalg.norm(v[sinks:], axis=1) if value_norms else expected
