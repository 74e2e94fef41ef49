"""Covariances of a network's outputs, without Jacobians."""
