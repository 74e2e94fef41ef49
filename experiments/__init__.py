"""One script per table and figure, and the benchmarks; results as JSON in `results/`."""
