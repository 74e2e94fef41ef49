"""Predictives, and what they are worth."""
