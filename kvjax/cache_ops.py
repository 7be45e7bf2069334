"""What is done to a bare `kvjax.Cache`: rows, copies, cuts and edits; and prefixes that a batch shares."""

from __future__ import annotations

from kvjax.generation.prefixes import read_batch
from kvjax.generation.splice import splice
from kvjax.generation.states import branch, crop, join, rows

__all__ = ["branch", "crop", "join", "read_batch", "rows", "splice"]
