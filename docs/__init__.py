"""The documentation: hand-written pages, and `docs.generate`, which writes the others."""
