"""Asking it, and keeping the answers."""
