"""Gradients of single examples in a block's eigenbasis: covariances, samples, second moments."""
