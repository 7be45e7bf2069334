"""Reusing keys and values that were computed before: prefix trees, documents in any order, prepacking."""
