"""Measuring methods: one context, many questions, on the same state."""

from kvjax.eval.run.compare import compare
from kvjax.eval.run.comparison import Comparison, EvalRow
from kvjax.eval.run.ray_workers import connect_ray
from kvjax.eval.tasks.case import Ask, Case, Spec

__all__ = ["Ask", "Case", "Comparison", "EvalRow", "Spec", "compare", "connect_ray"]
