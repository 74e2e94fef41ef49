"""Learned weight decays in the training loops of others: Lightning's and Hugging Face's trainers.

Each has a module of its own, since nobody needs both: `marglik.callbacks.lightning` and
`marglik.callbacks.transformers`. What they share is in `prior_learner`.
"""
