"""How keys and values are held, and where."""
