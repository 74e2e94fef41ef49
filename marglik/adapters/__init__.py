"""A fitted posterior with the interface of another library, in a module that says what to install.

`marglik.KronLaplace` has the interface of laplace-torch.
"""
