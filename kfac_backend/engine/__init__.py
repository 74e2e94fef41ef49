"""Run a model and capture the inputs and output gradients of its layers."""
