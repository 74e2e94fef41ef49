"""Contract per-example gradients in a block's eigenbasis: covariances, samples, second moments."""
