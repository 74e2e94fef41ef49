"""Callbacks that learn weight decays in the training loops of Lightning and Hugging Face.

Each trainer has its own module, which imports only this trainer's library:
`marglik.callbacks.lightning` and `marglik.callbacks.transformers`.
"""
