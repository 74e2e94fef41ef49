"""Adapters for laplace-torch. Only this folder of the package imports it."""
