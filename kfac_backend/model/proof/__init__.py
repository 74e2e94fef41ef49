"""The proof that hooks see all that the rules need; following parameters that pass no hook."""
