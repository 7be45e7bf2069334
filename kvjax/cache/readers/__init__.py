"""Readers: which slots of the cache a query attends to."""
