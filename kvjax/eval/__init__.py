"""Measuring methods: one context, many questions, on the same state."""

from kvjax.eval.case import Ask, Case, Spec
from kvjax.eval.compare import compare

__all__ = ["Ask", "Case", "Spec", "compare"]
