"""What is done to a bare `kvjax.Cache`: rows, copies, cuts and edits; and prefixes that a batch shares."""

from __future__ import annotations

from kvjax.run.prefixes import read_batch
from kvjax.run.splice import splice
from kvjax.run.states import branch, crop, join, rows

__all__ = ["branch", "crop", "join", "read_batch", "rows", "splice"]
