"""Adapters for laplace-torch; the only room of this package that imports it."""
