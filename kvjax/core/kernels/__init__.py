"""Pallas kernels for NVIDIA GPUs, each with its plain form in JAX."""

import os

import jax


def use_kernels() -> bool:
    """Whether programs that are traced now contain the kernels: on a GPU, unless KVJAX_GPU_KERNELS is "0"."""
    return jax.default_backend() == "gpu" and os.environ.get("KVJAX_GPU_KERNELS") != "0"
