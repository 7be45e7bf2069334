"""One script, one table or figure of a paper, on the shipped model or on any converted checkpoint."""
