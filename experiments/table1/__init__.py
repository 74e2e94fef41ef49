"""Table 1 of Eschenhagen et al. 2023: seconds and memory of a K-FAC step."""
