"""Regression on the UCI sets: noise and weight decays learned, beside rivals."""
