"""Exact keys and values of texts, read once, alone or packed; put together and mended by CacheBlend and Cache-Craft."""

from __future__ import annotations

from kvjax.generation.exact import Exact, read_exactly
from kvjax.generation.packed import pack_exactly, read_packed
from kvjax.generation.reuse.blend import blend
from kvjax.generation.reuse.craft import Chunk, Chunks, cut

__all__ = ["Chunk", "Chunks", "Exact", "blend", "cut", "pack_exactly", "read_exactly", "read_packed"]
