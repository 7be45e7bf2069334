"""The shipped model: its weights, vocabulary, text and tasks."""
