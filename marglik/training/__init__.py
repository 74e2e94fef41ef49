"""Train a network and learn its prior online: network steps, prior updates, checkpoints."""
