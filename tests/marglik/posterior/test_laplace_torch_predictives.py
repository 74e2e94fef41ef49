"""laplace-torch's own predictives on `KronLaplace`: the same numbers, without Jacobians."""

import laplace
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend.laplace_torch.interface import KfacGGN
from marglik import KronLaplace
from tests.marglik.small_laplace import DELTAS, data, fitted, network

pytestmark = pytest.mark.filterwarnings("ignore:By default `link_approx`")


def pair(likelihood, **options):
    """Ours, which has no Jacobians any more, and laplace-torch's own."""
    model = network().eval()
    options = {"prior_precision": DELTAS} | options
    ours = KronLaplace(model, likelihood, kfac_approx="expand", **options)
    theirs = laplace.KronLaplace(model, likelihood, backend=KfacGGN, **options)
    for la in (ours, theirs):
        la.fit(DataLoader(TensorDataset(*data(likelihood)), 8))
    ours.backend.jacobians = lambda *a, **k: pytest.fail("a Jacobian was made")
    return ours, theirs, data(likelihood)[0]


@pytest.mark.parametrize(
    "options",
    [{"link_approx": link} for link in ("probit", "bridge", "bridge_norm", "mc")]
    + [{"link_approx": "mc", "diagonal_output": True}],
)
def test_predictives_of_laplace_torch(options):
    ours, theirs, x = pair("classification")
    probabilities = []
    for la in (ours, theirs):
        torch.manual_seed(0)
        probabilities.append(la(x, n_samples=10, **options))
    assert_close(*probabilities)


def test_backprop_takes_laplace_torchs_way():
    la, x = fitted(enable_backprop=True)
    x = x[:2].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(la(x)[:, 0].sum(), x)
    step = 1e-5 * torch.randn_like(x)
    plain, _ = fitted()
    ahead, behind = (plain(x.detach() + sign * step)[:, 0].sum() for sign in (1, -1))
    assert_close((gradient * step).sum(), (ahead - behind) / 2, rtol=1e-5, atol=1e-12)
    assert not la.output_distribution(x)[1].requires_grad


def test_bernoulli_needs_our_predictive():
    la, x = fitted("bernoulli")
    for predict in (la, la.predictive_samples):
        with pytest.raises(NotImplementedError, match="laplace_predictive\\(laplace\\)\\(x\\)"):
            predict(x)
    assert la.functional_samples(x, n_samples=4).shape == (4, 8, 3)
