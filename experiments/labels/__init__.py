"""Wrong labels in the training data."""
