"""The online loop: the network's steps, updates of the prior, checkpoints."""
