"""Calibrated tables: arrays that a method reads from a file, and how a text's statistics make them."""
