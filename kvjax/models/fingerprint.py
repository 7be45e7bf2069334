"""A digest of all numbers of a model, which tells models of one configuration apart."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import memory
from kvjax.core.mesh import to_numpy

KIND = "all:"
"""The beginning of a fingerprint, in files too. Those of kvjax 0.2 and before have none: they covered the first four
entries of each parameter along each axis, and models that were trained further from one start were often equal."""

INDEX_FACTOR = 0x9E3779B1  # odd, so that the products of all indices below 2^32 differ
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
CHUNK_NUMBERS = 1 << 15  # on a CPU; a chunk and what is computed of it stay in the processor's caches


def fingerprint(params: Any) -> str:
    """Digests every number of a parameter tree, with its place, path, shape and dtype.

    The numbers of a parameter are added up modulo 2^32 after each has been mixed with its index. The order of the sum
    does not matter, so that a parameter's devices, mesh and layout change nothing.

    Args:
      params: arrays of JAX or NumPy, of numbers of up to 32 bits.

    Returns:
      `KIND` and 64 hexadecimal digits.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    # A code of 4 bits is widened: what the other half of its byte holds is not said.
    leaves = [(path, x.astype(np.int8) if x.dtype == jnp.int4 else x) for path, x in leaves]
    # All programs are started before the first result is awaited. NumPy needs none, which takes longer than the sum.
    sums = [_sum_in_memory(x) if memory.is_on_cpu(x) else _sum_on_device(x) for _, x in leaves]
    digest = hashlib.sha256()
    for (path, x), total in zip(leaves, sums, strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype} {to_numpy(total)}\n".encode())
    return KIND + digest.hexdigest()


def _sum_in_memory(x: Any) -> np.uint32:
    bits = np.ascontiguousarray(x).reshape(-1)
    bits, total = bits.view(UNSIGNED[bits.dtype.itemsize]), 0
    spread = np.arange(CHUNK_NUMBERS, dtype=np.uint32) * np.uint32(INDEX_FACTOR)
    for start in range(0, bits.size, CHUNK_NUMBERS):
        chunk = bits[start : start + CHUNK_NUMBERS].astype(np.uint32, copy=False)
        at = spread[: chunk.size] + np.uint32(start * INDEX_FACTOR % 2**32)
        total += int(_mix(chunk, at).sum(dtype=np.uint32))
    return np.uint32(total % 2**32)


@jax.jit
def _sum_on_device(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    # By axes and without a reshape, so that each device adds up its own shard.
    spread = jnp.zeros((), jnp.uint32)
    for axis in range(x.ndim):
        factor = np.uint32(math.prod(x.shape[axis + 1 :]) * INDEX_FACTOR % 2**32)
        spread += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * factor
    return _mix(bits, spread).sum(dtype=jnp.uint32)


def _mix(bits: Any, spread: Any) -> Any:
    """Mixes each number's bits with its spread index, uint32 both, of NumPy or JAX.

    A multiplication moves differences up and a shift moves them down. Without the first shift a model with all signs
    flipped, which are the highest bits, would add differences to few bits of the sum, and often none.
    """
    x = bits ^ spread
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    return (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
