"""Eviction: which tokens a cache keeps after the prompt and while decoding, and what represents the others."""
