"""Evaluation tasks: each makes cases, that is contexts with questions or texts to predict."""
