"""Chunks of text that were read before, put together and mended: CacheBlend and Cache-Craft."""

from __future__ import annotations

from kvjax.run.reuse.blend import blend
from kvjax.run.reuse.craft import Chunk, Chunks, cut

__all__ = ["Chunk", "Chunks", "blend", "cut"]
