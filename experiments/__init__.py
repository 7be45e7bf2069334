"""Scripts that train, measure and compare; each prints a table and, as its last line, one JSON document."""
