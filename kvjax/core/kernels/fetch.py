"""Gathers token vectors from pinned host memory: by a kernel in which the GPU reads them itself, and in plain JAX.

A GPU can read pinned host memory in place. When the host gathers instead, as under `compute_on`, the indices have to
reach it first, XLA makes one call of all layers' gathers, and nothing else is launched until that call has returned.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32, Shaped

from kvjax.core.types import Array

ROWS_PER_PROGRAM = 8
"""Few, so that many programs wait for the bus at once: a transfer over PCIe takes microseconds to begin."""


def fits(data: Array, idx: Array) -> bool:
    """Whether there is anything to read, and Triton's 32-bit offsets reach all of it."""
    return 0 < data.size < 2**31 and idx.size > 0


def fetch(
    data: Shaped[Array, "B K S W"], idx: Int32[Array, "B K n"], *, interpret: bool = False
) -> Shaped[Array, "B K n W"]:
    """Gathers vectors from host memory into device memory, at indices in bounds.

    A kernel for NVIDIA GPUs; `interpret` runs it on any device.
    """
    # Imported here: Pallas takes a third of the time of `import kvjax`, and only GPUs need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (B, K, n), (S, W) = idx.shape, data.shape[2:]
    rows, lanes = min(ROWS_PER_PROGRAM, pl.next_power_of_2(n)), pl.next_power_of_2(W)

    def kernel(idx_ref, data_ref, out_ref):
        row, col = jnp.arange(rows, dtype=jnp.int32), jnp.arange(lanes, dtype=jnp.int32)[None]
        real = pl.program_id(2) * rows + row < n
        source = triton.load(idx_ref.at[row], mask=real, other=0)
        mask = real[:, None] & (col < W)
        x = triton.load(data_ref.at[source[:, None], col], mask=mask, other=0)
        triton.store(out_ref.at[row[:, None], col], x, mask=mask)

    return pl.pallas_call(
        kernel,
        grid=(B, K, pl.cdiv(n, rows)),
        in_specs=[
            pl.BlockSpec((None, None, rows), lambda b, k, i: (b, k, i)),
            pl.BlockSpec((None, None, S, W), lambda b, k, i: (b, k, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, rows, lanes), lambda b, k, i: (b, k, i, 0)),
        out_shape=jax.ShapeDtypeStruct((B, K, n, W), data.dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="fetch_rows",
    )(idx, data)


def gather(data: Shaped[Array, "B K S W"], idx: Int32[Array, "B K n"]) -> Shaped[Array, "B K n W"]:
    """Gathers what `fetch` does, on any device."""
    # A single gather without clipping: code that `compute_on` runs on the host admits no constants.
    dims = lax.GatherDimensionNumbers(
        offset_dims=(3,),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(0, 1),
        start_indices_batching_dims=(0, 1),
    )
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(data, idx[..., None], dims, (1, 1, 1, data.shape[3]), mode=mode)
