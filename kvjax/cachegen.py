"""Exact keys and values in a small file, in few levels and entropy-coded, and back (CacheGen)."""

from __future__ import annotations

from kvjax.generation.reuse.cachegen import read, write

__all__ = ["read", "write"]
