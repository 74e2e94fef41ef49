"""Errors and Ctrl-C in predictions: no sample of the posterior is left as the network's weights."""

import pytest
import torch
from torch import nn

from marglik import KronLaplace, PredictiveConfig, laplace_predictive, map_predictive
from tests.interrupts import everything_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:By default `link_approx`"),
]

X, Y = torch.linspace(-1, 1, 12).reshape(4, 3), torch.tensor([0, 1, 2, 0])
NN = {"pred_type": "nn", "n_samples": 2}
USES = {
    "glm": lambda la: la(X),
    "nn": lambda la: la(X, link_approx="mc", **NN),
    "functional samples": lambda la: la.functional_samples(X, **NN),
    "predictive samples": lambda la: la.predictive_samples(X, **NN),
    "linearised": lambda la: laplace_predictive(
        la, PredictiveConfig("linearised", networks=2)
    )(X),
    "our probit": lambda la: laplace_predictive(la)(X),
    "MAP": lambda la: map_predictive(la.model)(X),
    "a grid": lambda la: la.optimize_prior_precision(
        pred_type="nn", method="gridsearch", val_loader=[(X, Y)], grid_size=2, n_samples=2,
        link_approx="mc",
    ),
}  # fmt: skip


@pytest.fixture
def la():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    model[2].eval()
    la = KronLaplace(model, "classification")
    la.fit([(X, Y)])
    return la


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("use", USES)
def test_a_forward_that_fails(la, use, error):
    """In the second network, where the first has been sampled."""
    calls = 0

    def fails(*_):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error

    la.model[2].register_forward_hook(fails)
    before = everything_of(la.model)
    try:
        USES[use](la)
    except error:
        pass
    assert calls == (1 if use == "MAP" else 2) or use in ("glm", "our probit", "linearised")
    assert everything_of(la.model) == before
