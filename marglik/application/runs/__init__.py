"""Implement the commands and their options."""
