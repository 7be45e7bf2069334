"""The convenient layer: prompts as text or ids, padding, checks, timing, contexts."""
