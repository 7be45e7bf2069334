"""Helpers that know nothing about models or caches: arguments, files, locks, packages, display."""
