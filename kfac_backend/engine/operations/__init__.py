"""Parameters that no hook sees: followed operation by operation, or example by example."""
