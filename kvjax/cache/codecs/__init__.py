"""Codecs: how keys and values are stored, in which precision and in which memory."""
