"""Runs of the evaluation: methods are asked the cases of tasks, and every answer is recorded."""
