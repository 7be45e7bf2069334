"""Helpers without JAX arrays: arguments, files, JSON documents, locks, printing."""
