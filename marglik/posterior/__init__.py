"""The Laplace posterior: prior, evidence, hyperparameters, precision."""
