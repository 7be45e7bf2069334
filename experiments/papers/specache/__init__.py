"""SpeCache (arXiv 2503.16163): its tables and figures."""
