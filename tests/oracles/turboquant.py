"""TurboQuant in NumPy, float64, from its paper (arXiv 2504.19874) and vLLM's rules: one vector at a time."""

from __future__ import annotations

import functools
import math

import numpy as np

from tests.oracles.token_codes import hadamard


@functools.cache
def lloyd_max_levels(d: int, bits: int) -> list[float]:
    """The levels for N(0, 1/d) by Lloyd's iterations, each mean over 200 trapezoids of its cell."""
    sigma = d**-0.5
    width = 7 * sigma / 2**bits
    centroids = [-3.5 * sigma + width * (i + 0.5) for i in range(2**bits)]
    for _ in range(200):
        edges = [-10.5 * sigma, *((a + b) / 2 for a, b in zip(centroids, centroids[1:], strict=False)), 10.5 * sigma]
        updated = [cell_mean(a, b, sigma) for a, b in zip(edges, edges[1:], strict=False)]
        if max(abs(a - b) for a, b in zip(updated, centroids, strict=True)) < 1e-10:
            break
        centroids = updated
    return centroids


def cell_mean(a: float, b: float, sigma: float) -> float:
    """The mean of a normal variable between a and b."""
    x = a + (b - a) * np.arange(201) / 200
    p = np.exp(-0.5 * (x / sigma) ** 2)
    return float(np.trapezoid(x * p) / np.trapezoid(p))


def exact_cell_mean(a: float, b: float) -> float:
    """The same mean for N(0, 1), by the error function."""
    probabilities = [math.erf(t / math.sqrt(2)) / 2 for t in (a, b)]
    densities = [math.exp(-t * t / 2) / math.sqrt(2 * math.pi) for t in (a, b)]
    return (densities[0] - densities[1]) / (probabilities[1] - probabilities[0])


def fake_quantize_key(k: np.ndarray, bits: int, correct: bool = True) -> tuple[list[int], np.ndarray]:
    """Quantizes a key [d] -> (its codes, the decoded key)."""
    d, length = len(k), math.sqrt((k**2).sum())
    rotation, levels = hadamard(d), lloyd_max_levels(d, bits)
    direction = rotation @ k / length if length else np.zeros(d)
    middles = [(a + b) / 2 for a, b in zip(levels, levels[1:], strict=False)]
    codes = [sum(y >= m for m in middles) for y in direction]
    quantized = np.array([levels[c] for c in codes])
    if correct:
        quantized = quantized / math.sqrt((quantized**2).sum() + 1e-16)
    return codes, float(np.float16(length)) * (rotation @ quantized)


def fake_quantize_value(v: np.ndarray, bits: int) -> np.ndarray:
    """Quantizes and dequantizes a value [d]; its step and minimum are float16."""
    top = 2**bits - 1
    step = max((v.max() - v.min()) / top, 1e-8)
    codes = np.clip(((v - v.min()) / step + 0.5).astype(int), 0, top)
    return codes * float(np.float16(step)) + float(np.float16(v.min()))
