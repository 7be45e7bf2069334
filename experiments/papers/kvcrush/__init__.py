"""KVCrush (arXiv 2503.00022): its tables and figures."""
