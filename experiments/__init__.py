"""One script per table and figure, and the benchmarks. `results/` has what the READMEs quote."""
