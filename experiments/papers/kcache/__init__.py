"""KCache (arXiv 2404.18057): its equations and tables."""
