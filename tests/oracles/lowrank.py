"""Low-rank keys and values in NumPy, float64, one sequence and one step at a time.

MatryoshkaKV: arXiv 2410.14731, section 3. CSKV: arXiv 2409.10593, section 2. Merged heads: arXiv 2406.07056, section 3.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvjax.testing import dense_attention
from tests.contract import layer

Reconstruct = Callable[[np.ndarray], np.ndarray]
"""Takes the tokens of all heads [K n H], returns the stored tokens [K n H]."""


def attend_decoded(batch: layer.SequenceBatch, keys: Reconstruct, values: Reconstruct) -> np.ndarray:
    """Runs all decode steps, each over the stored tokens once its own one is written -> f64[B K G STEPS H]."""
    out = np.zeros((len(batch.lengths), layer.K, layer.G, layer.STEPS, layer.H))
    for b, n in enumerate(map(int, batch.lengths)):
        for t in range(layer.STEPS):
            k, v = (
                reconstruct(np.asarray(x[b, :, : n + t + 1], np.float64))
                for x, reconstruct in ((batch.k, keys), (batch.v, values))
            )
            q = np.asarray(batch.q[b, :, :, n + t : n + t + 1]).reshape(-1, 1, layer.H)
            out[b, :, :, t] = dense_attention(q, k, v, np.array([n + t])).reshape(layer.K, layer.G, layer.H)
    return out


def rotate(x: np.ndarray, pos: np.ndarray, sign: int = 1) -> np.ndarray:
    """Rotates x [... n H] to positions [n], or back with sign -1: channels i, i + H / 2 by pos / 10,000^(2 i / H)."""
    half = x.shape[-1] // 2
    angle = sign * pos[:, None] * 10_000.0 ** (-np.arange(half) / half)
    rotated = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([rotated.real, rotated.imag], -1)


def project(x: np.ndarray, basis: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """The nearest points of x [n C] in mean + span of the columns of a basis [C r]."""
    return (x - mean) @ basis @ basis.T + mean


def concat_heads(x: np.ndarray) -> np.ndarray:
    """Concatenates the channels of all heads: [K n H] -> [n K*H]."""
    return np.concatenate(list(x), -1)


def split_heads(x: np.ndarray, K: int) -> np.ndarray:
    """The inverse of `concat_heads`."""
    return np.stack(np.split(x, K, -1))


def random_bases(rng: np.random.Generator, groups: int, channels: int) -> np.ndarray:
    """Random orthonormal bases, f32[groups channels channels]."""
    return np.linalg.qr(rng.normal(size=(groups, channels, channels)))[0].astype(np.float32)
