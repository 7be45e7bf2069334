"""Prompts into caches, and tokens out of them."""
