"""Tools for testing a method offline: rules of methods, a toy model, a dense oracle, a search for copied arrays."""

from kvjax.testing.conformance import BrokenRule, CheckReport, RuleReport, check_method
from kvjax.testing.helpers import dense_attention, full_copies, toy_model

__all__ = ["BrokenRule", "CheckReport", "RuleReport", "check_method", "dense_attention", "full_copies", "toy_model"]
