"""Reuse of keys and values that were computed before: prefix trees, chunks in any order, prepacking, CacheGen."""
