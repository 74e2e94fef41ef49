"""A fitted posterior with the interface of BoTorch or torch-uncertainty.

Each library has a module of its own, which says what to install; nothing else needs them.
`marglik.KronLaplace` has the interface of laplace-torch.
"""
