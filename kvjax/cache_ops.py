"""Operations on a bare `kvjax.Cache`: crop, take, fork, join and edit; and batches with shared prefixes."""

from __future__ import annotations

from kvjax.generation.cache_ops.edit import edit
from kvjax.generation.cache_ops.sequences import crop, fork, join, take
from kvjax.generation.reuse.prefix_tree import read_batch

__all__ = ["crop", "edit", "fork", "join", "read_batch", "take"]
