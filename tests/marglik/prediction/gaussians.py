"""Gaussian outputs, and predictions of them, for the tests of links."""

import torch

from marglik.prediction.links import predict_from_gaussian


def gaussians(C, n=4, scale=1.5, seed=0):
    """Means (n, C) and covariances (n, C, C) of full rank."""
    generator = torch.Generator().manual_seed(seed)
    f, root = (
        scale * torch.randn(n, C, *more, generator=generator, dtype=torch.float64)
        for more in ((), (C,))
    )
    return f, root @ root.mT / C + 0.1 * torch.eye(C)


def predict(f, covariance, likelihood="classification", link="mc", samples=50, **options):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(samples, f.shape[1], generator=generator, dtype=torch.float64)
    return predict_from_gaussian(f, covariance, likelihood, link, noise, **options)
