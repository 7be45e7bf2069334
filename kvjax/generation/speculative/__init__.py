"""Speculative decoding with a draft method or a draft model."""
