"""Files of exact keys and values, quantized to few levels and entropy-coded (CacheGen)."""

from __future__ import annotations

from kvjax.generation.reuse.cachegen import read, write

__all__ = ["read", "write"]
