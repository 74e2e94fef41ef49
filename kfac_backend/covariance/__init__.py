"""Gradients of single examples, in the eigenbasis of a block: covariances and second moments."""
