"""Predictives and their metrics."""
