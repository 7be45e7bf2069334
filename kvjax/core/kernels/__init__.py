"""Pallas kernels, each beside its plain form."""
