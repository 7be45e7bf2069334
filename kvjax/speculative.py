"""Speculative decoding: a draft under a cheaper cache, a shortened context or another model, and a verifier."""

from __future__ import annotations

from kvjax.generation.speculative.speculate import Speculation, speculate

__all__ = ["Speculation", "speculate"]
