"""A fitted posterior with the interface of another library, in a module that says what to install.

`marglik.Laplace` and `marglik.KronLaplace` have the calls of laplace-torch.
"""
