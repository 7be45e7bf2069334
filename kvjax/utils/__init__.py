"""Helpers that know nothing about models or caches: arguments, files of text and of packages, JSON, locks, display."""
