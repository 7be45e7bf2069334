"""Keys and values that are computed once and used again: CacheBlend, Cache-Craft, Prepacking and shared prefixes."""

from __future__ import annotations

from kvjax.reuse.cacheblend import blend
from kvjax.reuse.cachecraft import Chunk, Chunks, cut
from kvjax.reuse.full_kv import FullKV, read_exactly
from kvjax.reuse.prefix_tree import read_batch
from kvjax.reuse.prepacking import pack_exactly, read_packed

__all__ = ["Chunk", "Chunks", "FullKV", "blend", "cut", "pack_exactly", "read_batch", "read_exactly", "read_packed"]
