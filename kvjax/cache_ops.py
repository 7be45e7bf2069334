"""What is done to a bare `kvjax.Cache`: rows, copies, cuts and edits; and prefixes that a batch shares."""

from __future__ import annotations

from kvjax.generation.cache_ops.edit import splice
from kvjax.generation.cache_ops.sequences import branch, crop, join, rows
from kvjax.generation.reuse.prefix_tree import read_batch

__all__ = ["branch", "crop", "join", "read_batch", "rows", "splice"]
