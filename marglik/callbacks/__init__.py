"""Learned weight decays in the training loops of Lightning and Hugging Face.

Each trainer has a module of its own, so that only its library is imported:
`marglik.callbacks.lightning` and `marglik.callbacks.transformers`. Both use `prior_learner`.
"""
