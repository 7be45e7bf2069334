"""Speculative decoding: a draft under a cheaper cache, on a shorter context or by another model, and a verifier."""

from __future__ import annotations

from kvjax.speculative.speculation import Speculation, speculate

__all__ = ["Speculation", "speculate"]
