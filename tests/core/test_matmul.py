"""Matrix products of few and of many tokens against NumPy's, in each form that they take."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.matmul import FEW_TOKENS, LARGE_WEIGHT, MAX_PARTS, matmul, unembed


@pytest.mark.parametrize("rows", [1, 2, 7, FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize(
    ("dtype", "relative_error"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)]
)
def test_products_are_numpys(rows, dtype, relative_error):
    rng = np.random.default_rng(rows)
    x, w, vectors = (jnp.asarray(rng.normal(size=s), dtype) for s in ((rows, 96), (96, 40), (50, 96)))
    exact = [np.asarray(a, np.float64) for a in (x, w, vectors)]
    for product, expected, result_dtype in (
        (jax.jit(matmul)(x, w), exact[0] @ exact[1], dtype),
        (jax.jit(unembed)(x, vectors), exact[0] @ exact[2].T, jnp.float32),
    ):
        assert product.shape == expected.shape and product.dtype == result_dtype
        np.testing.assert_allclose(
            np.asarray(product, np.float64), expected, atol=2 * relative_error * np.abs(expected).max()
        )


@pytest.mark.parametrize("size_in", [LARGE_WEIGHT // 128, LARGE_WEIGHT // 128 + 1])
def test_one_row_and_a_large_matrix_are_multiplied_in_parts_where_it_divides(size_in):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((1, size_in), (size_in, 128)))
    lowered = jax.jit(matmul).lower(x, w)
    assert f"tensor<{math.gcd(size_in, MAX_PARTS)}x1x128xf32>" in lowered.as_text()
    np.testing.assert_allclose(lowered.compile()(x, w), np.float64(x) @ np.float64(w), atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_gpu_multiplies_no_row_alone(monkeypatch, rows):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((rows, 24), (24, 8)))
    lowered = jax.jit(matmul).lower(x, w)
    assert f"(tensor<{max(rows, 2)}x24xf32>, tensor<24x8xf32>)" in lowered.as_text()
    np.testing.assert_allclose(lowered.compile()(x, w), np.float64(x) @ np.float64(w), atol=1e-5)


@pytest.mark.parametrize("rows", [1, FEW_TOKENS])
def test_narrow_numbers_are_summed_in_float32(rows):
    """bfloat16 has no number between 2,048 and 2,064."""
    x = jnp.ones((rows, 2052), jnp.bfloat16)
    sums = np.asarray(unembed(x, jnp.ones((3, 2052), jnp.bfloat16)))
    np.testing.assert_array_equal(sums, 2052)
