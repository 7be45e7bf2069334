"""Eigenvectors of small symmetric matrices by plain array operations, so that any device may compute them in a step.

LAPACK's `eigh` cannot stand in a decode step: on several CPU devices its threads wait for those of the collectives
that other devices are in, which wait for it.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.core.mesh import vary
from kvjax.core.types import Array

SWEEPS = 10  # over all pairs; float32 needs six to nine of them for matrices of up to 256 rows


def leading_eigenvectors(matrix: Array, count: int) -> Array:
    """Of positive semidefinite matrices f32[... n n] the eigenvectors of the greatest eigenvalues: f32[... n count].

    Jacobi's method: each round turns n / 2 disjoint pairs of rows and columns so that the number where they meet
    becomes zero, and then pairs them anew, as in a tournament (Brent & Luk 1985).
    """
    n = matrix.shape[-1]
    largest = jnp.abs(matrix).max((-2, -1), keepdims=True)
    a = matrix / jnp.where(largest > 0, largest, 1.0)
    if n % 2:  # a row without a partner meets one of its own, whose eigenvalue is the least
        a = jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, 1), (0, 1)]).at[..., n, n].set(-1.0)
    size = n + n % 2
    order = _next_pairs(size)

    def turn(_: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        a, vectors = found
        cosine, sine = _angles(a)
        a = _turned(_turned(a, cosine, sine).swapaxes(-2, -1), cosine, sine)
        return a[..., order, :][..., order], _turned(vectors, cosine, sine)[..., order, :]

    start = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), a.shape)  # eigenvectors as rows
    a, vectors = lax.fori_loop(0, SWEEPS * (size - 1), turn, (a, vary(start)))
    values = jnp.diagonal(a, axis1=-2, axis2=-1)
    best = jnp.argsort(-values, axis=-1)[..., :count, None]
    return jnp.take_along_axis(vectors, best, -2)[..., :n].swapaxes(-2, -1)


def _angles(a: Array) -> tuple[Array, Array]:
    """Cosine and sine f32[... n/2 1] that make a number zero where row i and row i + n / 2 meet."""
    half = a.shape[-1] // 2
    on = jnp.diagonal(a, axis1=-2, axis2=-1)
    off = jnp.diagonal(a[..., :half, half:], axis1=-2, axis2=-1)
    ratio = (on[..., half:] - on[..., :half]) / jnp.where(off == 0, 1.0, 2 * off)
    tangent = jnp.where(ratio >= 0, 1.0, -1.0) / (jnp.abs(ratio) + jnp.sqrt(1 + jnp.square(ratio)))
    tangent = jnp.where(off == 0, 0.0, tangent)
    cosine = 1 / jnp.sqrt(1 + jnp.square(tangent))
    return cosine[..., None], (tangent * cosine)[..., None]


def _turned(rows: Array, cosine: Array, sine: Array) -> Array:
    """Rows i and i + n / 2 turned by their angle."""
    half = rows.shape[-2] // 2
    first, second = rows[..., :half, :], rows[..., half:, :]
    return jnp.concatenate([cosine * first - sine * second, sine * first + cosine * second], -2)


def _next_pairs(n: int) -> np.ndarray:
    """Where each row comes from, so that in n - 1 rounds every row meets every other one; the first stays."""
    first, second = list(range(n // 2)), list(range(n // 2, n))
    if n > 2:
        first, second = [0, second[0], *first[1:-1]], [*second[1:], first[-1]]
    return np.array(first + second, np.int32)
