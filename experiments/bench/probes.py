"""What the machine can do at best: bytes read per second and float32 operations per second."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.bench.common import timed
from kvjax.eval.run.machine import version

Probes = tuple[int, dict[str, Callable[[], float]]]
"""How much one run of a probe reads or computes, and by name what runs it and returns its seconds."""


def read_probes(megabytes: int = 512) -> Probes:
    """(bytes, runs): a sum, and a matrix times a vector, over an array too large for the caches."""
    x = jnp.ones((megabytes * 2**20 // 4 // 1024, 1024), jnp.float32)
    v = jnp.ones((1024,), jnp.float32)
    total, matvec = jax.jit(jnp.sum), jax.jit(jnp.matmul)
    jax.block_until_ready((total(x), matvec(x, v)))
    return x.nbytes, {"sum": lambda: timed(total, x), "matvec": lambda: timed(matvec, x, v)}


def product_probes(n: int = 2048) -> Probes:
    """(operations, runs): a product of two n x n matrices, in JAX and, when installed, in torch."""
    x = jnp.ones((n, n), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    runs = {"product (jax)": lambda: timed(product, x, x)}
    if version("torch"):
        import torch

        y = torch.ones(n, n)
        runs["product (torch)"] = lambda: timed(torch.matmul, y, y)
    return 2 * n**3, runs
