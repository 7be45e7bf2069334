"""Rows of a buffer in pinned host memory, read by the GPU itself; and the same in plain JAX.

A GPU can read pinned host memory where it lies. When the host gathers the rows instead, as `compute_on` has it do, the
indices have to reach it first, XLA makes one call of all layers' gathers, and nothing else is launched until that call
has come back.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.types import Array

ROWS = 8  # that one program reads


def fits(data: Array, idx: Array) -> bool:
    """Whether there is anything to read, and Triton's offsets of 32 bits reach all of it."""
    return 0 < data.size < 2**31 and idx.size > 0


def fetch(data: Array, idx: Array, *, interpret: bool = False) -> Array:
    """Rows idx i32[B K n], in bounds, of data [B K S W] -> [B K n W] in device memory; a kernel for NVIDIA GPUs.

    `interpret` runs it on any device.
    """
    # Here, as they cost a third of what `import kvjax` costs, and only GPUs need them.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (B, K, n), (S, W) = idx.shape, data.shape[2:]
    rows, lanes = min(ROWS, pl.next_power_of_2(n)), pl.next_power_of_2(W)
    return pl.pallas_call(
        functools.partial(_kernel, n, W),
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


def _kernel(n: int, width: int, idx_ref, data_ref, out_ref):
    """The program: ROWS of the n rows of one row of the batch and one head."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, lanes = out_ref.shape
    row, col = jnp.arange(rows, dtype=jnp.int32), jnp.arange(lanes, dtype=jnp.int32)[None]
    real = pl.program_id(2) * rows + row < n
    at = triton.load(idx_ref.at[row], mask=real, other=0)
    mask = real[:, None] & (col < width)
    found = triton.load(data_ref.at[at[:, None], col], mask=mask, other=0)
    triton.store(out_ref.at[row[:, None], col], found, mask=mask)


def gather(data: Array, idx: Array) -> Array:
    """What `fetch` computes, on any device: one bare gather, as code that runs on the host admits no constants."""
    dims = lax.GatherDimensionNumbers(
        offset_dims=(3,),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(0, 1),
        start_indices_batching_dims=(0, 1),
    )
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(data, idx[..., None], dims, (1, 1, 1, data.shape[3]), mode=mode)
