"""A fitted posterior behind other libraries' interfaces: BoTorch, posteriors, torch-uncertainty.

Each has one module, which says what to install; none of these libraries is needed otherwise.
laplace-torch's interface is `marglik.KronLaplace`.
"""
