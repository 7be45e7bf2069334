"""Helpers that know nothing about models or caches: arguments, files, JSON documents, locks, printing."""
