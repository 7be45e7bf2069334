"""Speculative sampling (arXiv 2211.17192, Algorithm 1) and RAPID's shift (arXiv 2502.20330), for one position."""

from __future__ import annotations

import numpy as np


def softmax(z: np.ndarray) -> np.ndarray:
    """The softmax of z [V]."""
    e = np.exp(z - z.max())
    return e / e.sum()


def shift_logits(z: np.ndarray, y: np.ndarray, m: float, alpha: float) -> np.ndarray:
    """Shifts the verifier's logits z [V] by the draft's y [V]."""
    p, q = softmax(z), softmax(y)
    out = z.copy()
    for token in range(len(z)):
        if q[token] >= alpha * q.max():
            out[token] -= m * (p[token] - q[token])
    return out


def acceptance_and_residual(
    z: np.ndarray, y: np.ndarray, m: float = 0.0, alpha: float = 0.1
) -> tuple[np.ndarray, np.ndarray]:
    """Each drafted token's probability of acceptance [V], and the distribution after a rejection [V]."""
    p, q, target = softmax(z), softmax(y), softmax(shift_logits(z, y, m, alpha))
    accept = np.array([min(1.0, target[x] / q[x]) for x in range(len(z))])
    residual = np.array([max(p[x] - q[x], p[x] - target[x], 0.0) for x in range(len(z))])
    return accept, residual / residual.sum()
