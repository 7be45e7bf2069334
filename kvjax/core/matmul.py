"""Matrix products in the form that each backend multiplies fastest; all forms agree up to rounding.

T is the number of tokens, or of the sequences of a decode step.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Float, Float32, Int32

from kvjax.core.quantized_kernel import dequantize, has_groups
from kvjax.core.types import Array

FEW_TOKENS = 64
"""Tokens up to which every CPU multiplies 16-bit numbers several times faster when XLA sums them in float32."""
LARGE_WEIGHT = 2**19
"""Elements of a float32 weight from which splitting the product of one token into parallel parts pays."""
MAX_PARTS = 2 ** (max(4, os.cpu_count() or 1).bit_length() - 1)
"""Most parts of such a product; more than two cores need, so that the last part to finish is a small one."""
PACKING_DOES_NOT_PAY = range(4, 33)
"""Numbers of tokens for which XLA:CPU packs the weights anew in every product, and that costs more than it saves."""
NO_PACKING = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""Compiler options that leave such products to other code than YNNPACK."""

CPUINFO = pathlib.Path("/proc/cpuinfo")
"""The file in which Linux lists the flags of the CPU."""


def matmul(x: Float[Array, "T D"], w: Float[Array, "D F"] | Mapping[str, Array]) -> Float[Array, "T F"]:
    """Multiplies vectors by a weight, which may be a `QuantizedKernel`; the result is in x's dtype."""
    if not isinstance(w, Mapping):
        return _multiply(x, w, x.dtype)
    # Tied to x, as a GPU's compiler may otherwise decode the weights of all layers before a loop over tokens. The CPU's
    # drops the barrier, and does so.
    x, kernel = lax.optimization_barrier((x, dict(w)))
    if has_groups(kernel):
        decoded = dequantize(kernel).astype(x.dtype)
        if jax.default_backend() == "gpu":
            # The compiler prefers this matrix transposed, and would transpose the codes of all layers before a loop: a
            # second copy of them in memory.
            decoded = with_layout_constraint(decoded, Layout((0, 1)))
        return _multiply(x, decoded, x.dtype)
    # The scales come after the product: a GPU then converts the codes inside of it, and writes no decoded matrix. Sums
    # of codes, a hundred times as large as those of weights, may exceed float16.
    product = _multiply(x, kernel["codes"].astype(x.dtype), jnp.float32 if x.dtype == jnp.float16 else x.dtype)
    return (product * kernel["scale"].astype(product.dtype)[None]).astype(x.dtype)


def matmul_in_float32(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float32[Array, "..."]:
    """Multiplies matrices in full float32; by default GPUs and TPUs multiply in fewer bits."""
    return jnp.matmul(x.astype(jnp.float32), y.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def _multiply(x: Array, w: Array, dtype: Any) -> Array:
    """Multiplies x [T D] by w [D F] and returns the sums in a dtype."""
    if _sums_in_float32(x):
        return _product_in_float32(x, w, (((1,), (0,)), ((), ()))).astype(dtype)
    if len(x) == 1 and x.dtype == jnp.float32 and w.size >= LARGE_WEIGHT and jax.default_backend() == "cpu":
        # Split along the contracted axis: XLA:CPU multiplies a single row on one core.
        parts = math.gcd(w.shape[0], MAX_PARTS)
        x, w = x.reshape(parts, 1, -1), w.reshape(parts, -1, w.shape[1])
        return lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,)))).sum(0)
    rows = _pad_single_row(x) if jax.default_backend() == "gpu" else x
    return jnp.matmul(rows, w, preferred_element_type=dtype)[: len(x)]


def grouped_matmul(
    x: Float[Array, "T D"], w: Float[Array, "E D F"] | Mapping[str, Array], counts: Int32[Array, " E"]
) -> Float[Array, "T F"]:
    """Multiplies runs of vectors by a weight of their own: the first counts[0] vectors by w[0], and so on.

    Every vector is multiplied, whatever the counts are; they add up to T. Quantized weights have E as the first axis of
    codes and scale.
    """
    if jax.default_backend() == "tpu" and not isinstance(w, Mapping):
        return lax.ragged_dot(x, w, counts)
    # Elsewhere XLA multiplies every vector by every weight for `ragged_dot`. Here each run is padded to whole blocks,
    # and a block is multiplied by its own weight alone: at most T + E * size vectors, which is at most twice T.
    (T, D), E = x.shape, len(counts)
    size = max(1, T // E)
    num_blocks = (T + min(E, T) * (size - 1)) // size
    blocks = -(-counts // size)  # of each run
    run = jnp.repeat(jnp.arange(E), counts, total_repeat_length=T)
    first_in_x, first_in_padded = jnp.cumsum(counts) - counts, (jnp.cumsum(blocks) - blocks) * size
    place = (first_in_padded - first_in_x)[run] + jnp.arange(T)
    padded = jnp.zeros((num_blocks * size, D), x.dtype).at[place].set(x, unique_indices=True)
    weight = jnp.repeat(jnp.arange(E), blocks, total_repeat_length=num_blocks)

    def multiply_block(block: tuple[Array, Array]) -> Array:
        return matmul(block[0], jax.tree.map(lambda w: w[block[1]], w))

    out = lax.map(multiply_block, (padded.reshape(num_blocks, size, D), weight))
    return out.reshape(num_blocks * size, -1)[place]


def unembed(x: Float[Array, "T D"], embedding: Float[Array, "V D"]) -> Float32[Array, "T V"]:
    """Computes logits from hidden vectors."""
    # Contracted along the last axes of both, so that a tied embedding is read as it lies and never transposed.
    dims = (((1,), (1,)), ((), ()))
    # Other backends sum in float32 whatever the result's dtype: rounded to 16 bits, many logits would be equal.
    if jax.default_backend() == "cpu" and not _sums_in_float32(x):
        return lax.dot_general(x, embedding, dims).astype(jnp.float32)
    return _product_in_float32(x, embedding, dims)


def compiler_options(num_tokens: int, width: int, dtype: Any, tied: bool = False) -> dict[str, str]:
    """Returns XLA's options for a program that multiplies x [num_tokens width] with weights of this dtype."""
    # Packing smaller weights costs less, because they stay in the processor's caches; and with a tied embedding only
    # YNNPACK is fast.
    is_wide = width >= 768 and not tied
    turn_off = dtype == jnp.float32 and num_tokens in PACKING_DOES_NOT_PAY and is_wide
    return dict(NO_PACKING) if turn_off and jax.default_backend() == "cpu" else {}


def _sums_in_float32(x: Array) -> bool:
    """Whether a product of x [T in] asks for sums in float32; a wrong answer costs only speed."""
    if jax.default_backend() != "cpu" or x.dtype.itemsize >= 4:
        return False
    # XLA has a product of bfloat16 numbers for AMX, which takes a fifth of the time, but only with sums in float32. The
    # other CPUs, those with avx512_bf16 included, take 1.4 times as long with them as for a float32 product.
    return x.shape[0] <= FEW_TOKENS or (x.dtype == jnp.bfloat16 and has_matrix_unit())


@functools.cache
def has_matrix_unit() -> bool:
    """Whether this machine's CPU multiplies matrices of bfloat16 numbers (Intel AMX).

    The answer comes from the CPU's flags and not from a timed product, so that a busy machine compiles the same
    programs as a quiet one. Systems other than Linux do not show the flags, and count as CPUs without the unit.
    """
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("flags") and "amx_bf16" in line.split() for line in lines)


def _product_in_float32(x: Array, w: Array, dims: lax.DotDimensionNumbers) -> Array:
    return lax.dot_general(_pad_single_row(x), w, dims, preferred_element_type=jnp.float32)[: len(x)]


def _pad_single_row(x: Array) -> Array:
    """Adds a row of zeros to x [1 D]; XLA's code for matrices of one row is slow.

    For 16-bit numbers on a CPU, and on a GPU, where it writes each product of a weight and its factor to memory and
    reads them all again to add them: three times the bytes of the weights.
    """
    return jnp.pad(x, ((0, 1), (0, 0))) if len(x) == 1 else x


def eigh(x: Float32[Array, "... C C"]) -> tuple[Float32[Array, "... C"], Float32[Array, "... C C"]]:
    """Computes the eigenvalues of symmetric matrices, ascending, and their eigenvectors as columns."""
    return map_matrices(lambda matrix: tuple(jnp.linalg.eigh(matrix)), x)


def map_matrices(function: Callable[..., Any], *x: Float32[Array, "..."]) -> Any:
    """Calls a function of linear algebra on batches of matrices; on a CPU one matrix at a time.

    A CPU's library divides a batch among threads, and simulated devices that wait for it may occupy all of them and
    wait for ever.
    """
    if jax.default_backend() != "cpu":
        return function(*x)
    batch = x[0].shape[:-2]
    out = lax.map(lambda matrices: function(*matrices), tuple(a.reshape(-1, *a.shape[-2:]) for a in x))
    return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), out)
