"""After the prompt: which tokens stay, and what becomes of the others."""
