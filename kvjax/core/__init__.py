"""Kernels for GPUs, each beside a reference in plain JAX that computes the same."""
