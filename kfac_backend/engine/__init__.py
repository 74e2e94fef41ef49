"""What a model shows: calling it, hooks on its layers, the proofs that they see all."""
