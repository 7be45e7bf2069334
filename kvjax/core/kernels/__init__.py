"""Pallas kernels for NVIDIA GPUs, each with its plain form in JAX."""

import jax

from kvjax.utils.arguments import environment_switch


def use_kernels() -> bool:
    """Whether programs that are traced now contain the kernels: on a GPU, unless KVJAX_GPU_KERNELS is 0."""
    return jax.default_backend() == "gpu" and environment_switch("KVJAX_GPU_KERNELS")
