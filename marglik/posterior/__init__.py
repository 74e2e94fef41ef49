"""The posterior: prior, evidence, hyperparameters, priors post hoc, files."""
