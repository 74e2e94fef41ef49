"""Gram matrices of convolutions' patches, without unfolding where that is slower."""
