"""The explorer: what each method makes of every token of a text, step by step, as one page."""
