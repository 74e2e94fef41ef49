"""The online loop: steps of the network, updates of the prior, checkpoints."""
