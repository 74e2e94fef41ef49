"""Several ranks: what a pass and its communication take."""
