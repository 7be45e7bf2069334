"""Matrix products of few and of many tokens against NumPy's, in each form that they take."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core import matmul as matmul_module
from kvjax.core.attention import causal_attention
from kvjax.core.matmul import FEW_TOKENS, LARGE_WEIGHT, MAX_PARTS, grouped_matmul, has_matrix_unit, matmul, unembed


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


@pytest.mark.parametrize("rows", [1, 3, 40, 129])
@pytest.mark.parametrize("crowded", [False, True])
def test_each_run_of_rows_is_multiplied_by_its_own_weight(rows, crowded):
    rng = np.random.default_rng(rows)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((rows, 12), (8, 12, 10)))
    run = np.sort(np.full(rows, 5) if crowded else rng.integers(0, 8, rows))
    counts = jnp.asarray(np.bincount(run, minlength=8), jnp.int32)
    expected = np.einsum("td,tdf->tf", x, np.asarray(w)[run])
    np.testing.assert_allclose(jax.jit(grouped_matmul)(x, w, counts), expected, atol=1e-5)


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


CPU_FLAGS = {
    "AMX": ("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n", True),
    "AVX-512 alone": ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 avx512_fp16\n", False),
    "AMX for integers": ("flags\t\t: fpu amx_tile amx_int8\nmodel name\t: no amx_bf16\n", False),
    "Arm": ("Features\t: fp asimd bf16 i8mm\n", False),
    "no such file": (None, False),
}


@pytest.fixture
def set_cpuinfo(monkeypatch, tmp_path):
    """Writes another /proc/cpuinfo; None for a system that has none."""

    def write(text: str | None) -> None:
        path = tmp_path / "cpuinfo"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(matmul_module, "CPUINFO", path)
        has_matrix_unit.cache_clear()

    yield write
    has_matrix_unit.cache_clear()


def lower_products(rows: int, dtype: jnp.dtype) -> str:
    """The programs of `matmul` and `unembed` for x [rows 24], traced anew."""
    x, w, vectors = (jnp.zeros(shape, dtype) for shape in ((rows, 24), (24, 8), (50, 24)))
    return jax.jit(lambda *a: (matmul(a[0], a[1]), unembed(a[0], a[2]))).lower(x, w, vectors).as_text()


@pytest.mark.parametrize("cpu", CPU_FLAGS)
def test_many_bfloat16_tokens_are_summed_in_float32_where_the_cpu_multiplies_matrices(cpu, set_cpuinfo):
    text, is_fast = CPU_FLAGS[cpu]
    set_cpuinfo(text)
    assert has_matrix_unit() == is_fast
    program = lower_products(FEW_TOKENS + 1, jnp.bfloat16)
    for shape in (f"{FEW_TOKENS + 1}x8", f"{FEW_TOKENS + 1}x50"):
        # The result of the product itself, before it is cast.
        assert f"-> tensor<{shape}x{'f32' if is_fast else 'bf16'}>" in "".join(
            line for line in program.splitlines() if "dot_general" in line
        )


def test_the_flags_of_a_cpu_change_no_program_of_other_dtypes_or_few_tokens(set_cpuinfo):
    cells = [(FEW_TOKENS + 1, jnp.float32), (FEW_TOKENS + 1, jnp.float16), (2, jnp.float32), (2, jnp.bfloat16)]
    programs = []
    for text, _ in (CPU_FLAGS["AMX"], CPU_FLAGS["AVX-512 alone"]):
        set_cpuinfo(text)
        programs.append([lower_products(*cell) for cell in cells])
    assert programs[0] == programs[1]


@pytest.mark.parametrize("cpu", ["AMX", "AVX-512 alone"])
def test_either_product_of_many_tokens_is_numpys_and_has_its_gradient(cpu, set_cpuinfo):
    set_cpuinfo(CPU_FLAGS[cpu][0])
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((FEW_TOKENS + 1, 96), (96, 40)))
    product, gradient = jax.value_and_grad(lambda x: jnp.square(matmul(x, w).astype(jnp.float32)).sum())(x)
    exact = [np.asarray(a, np.float64) for a in (x, w)]
    y = exact[0] @ exact[1]
    np.testing.assert_allclose(product, np.square(y).sum(), rtol=2**-8)
    expected = 2 * y @ exact[1].T
    np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, atol=4 * 2**-8 * np.abs(expected).max())


@pytest.mark.parametrize("cpu", ["AMX", "AVX-512 alone"])
def test_a_prompt_attends_with_the_operands_that_its_cpu_multiplies_faster(cpu, set_cpuinfo):
    text, is_fast = CPU_FLAGS[cpu]
    set_cpuinfo(text)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((1, 2, 2, 40, 8), (1, 2, 40, 8), (1, 2, 40, 8)))
    lowered = jax.jit(lambda *a: causal_attention(*a)).lower(q, k, v)
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert products and all(("bf16" in line) == is_fast for line in products)
    s = np.einsum("bkgth,bksh->bkgts", np.float64(q), np.float64(k)) * 8**-0.5
    p = np.exp(np.where(np.tri(40, dtype=bool), s, -np.inf))
    expected = np.einsum("bkgts,bksh->bkgth", p / p.sum(-1, keepdims=True), np.float64(v))
    out = lowered.compile()(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(out), expected, atol=2**-6)
