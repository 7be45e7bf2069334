"""Exact keys and values of texts, computed once, and assembled by CacheBlend, Cache-Craft and Prepacking."""

from __future__ import annotations

from kvjax.generation.reuse.cacheblend import blend
from kvjax.generation.reuse.cachecraft import Chunk, Chunks, cut
from kvjax.generation.reuse.full_kv import FullKV, read_exactly
from kvjax.generation.reuse.prepacking import pack_exactly, read_packed

__all__ = ["Chunk", "Chunks", "FullKV", "blend", "cut", "pack_exactly", "read_exactly", "read_packed"]
