"""Covariances and samples of a linearised network's outputs, without Jacobians."""
