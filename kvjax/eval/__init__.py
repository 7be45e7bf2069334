"""Measuring methods: one context, many questions, on the same state."""
