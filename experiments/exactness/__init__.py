"""Figures 1 and 2 of Eschenhagen et al. 2023: where expand and reduce are exact."""
