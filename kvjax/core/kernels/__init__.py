"""Pallas kernels for NVIDIA GPUs, each with its plain form in JAX."""
