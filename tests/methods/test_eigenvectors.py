"""Eigenvectors against LAPACK's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods.gear import leading_eigenvectors


@pytest.mark.parametrize("n", [1, 2, 3, 20, 33])
def test_they_span_what_those_of_lapack_span(n):
    """Matrices of full and low rank, tiny and huge, of zeros, and with equal eigenvalues."""
    rows = np.random.default_rng(n).normal(size=(6, 40, n)).astype(np.float32)
    rows[1, :, n // 2 :], rows[2] = 0.0, rows[2] * 1e-12
    rows[3], rows[4], rows[5] = rows[3] * 1e12, 0.0, np.eye(40, n)
    products = np.einsum("bsi,bsj->bij", rows, rows)
    count = (n + 1) // 2
    run = jax.jit(functools.partial(leading_eigenvectors, count=count))
    bases = np.asarray(run(jnp.asarray(products)), np.float64)
    np.testing.assert_allclose(
        bases.swapaxes(1, 2) @ bases, np.broadcast_to(np.eye(count), (6, count, count)), atol=1e-5
    )
    for matrix, vectors in zip(products.astype(np.float64), bases, strict=True):
        values = np.linalg.eigvalsh(matrix)[::-1]
        scale = max(values[0], 1e-300)
        np.testing.assert_allclose(matrix @ vectors / scale, vectors * (values[:count] / scale), atol=2e-5)
