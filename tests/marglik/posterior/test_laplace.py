"""Posteriors: modes, cached eigenvalues, dtypes, wrong arguments."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from kfac_backend.options import CurvatureOptions
from marglik import KronLaplace, Posterior
from tests.marglik.posteriors import LIKELIHOODS, data, fitted, network, predictions

pytestmark = [
    pytest.mark.filterwarnings("ignore:By default `link_approx`"),
    pytest.mark.usefixtures("one_thread"),
]


def test_auto_is_the_default():
    found = {}
    for mode in ("default", "auto", "reduce", "expand"):
        options = {} if mode == "default" else {"kfac_approx": mode}
        la = KronLaplace(network(), "classification", **options)
        plain = Posterior(network(), "classification", CurvatureOptions(**options))
        for posterior in (la, plain):
            posterior.fit([data()])
        found[mode] = la.log_marginal_likelihood()
        assert torch.equal(found[mode], plain.log_marginal_likelihood())
    assert found["default"] == found["auto"]
    assert (found["expand"] - found["reduce"]).abs() > 0.1  # nats


def test_a_fit_in_inference_mode_is_the_same():
    loader = [data()]
    plain, inside = (Posterior(network().eval(), "classification") for _ in range(2))
    plain.fit(loader)
    with torch.inference_mode():
        inside.fit([(x * 1, y) for x, y in loader])
        factors = kronecker_factors(inside.model, loader, "classification", kfac_approx="auto")
    delta = torch.ones((), dtype=torch.float64, requires_grad=True)
    evidence = inside.log_marginal_likelihood(delta)
    evidence.backward()
    assert torch.equal(evidence, plain.log_marginal_likelihood()) and delta.grad
    assert torch.equal(factors.blocks["0.weight"].B, plain.factors.blocks["0.weight"].B)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"curvature": 1}, TypeError, "'curvature' is not an option; choose from .*kfac_approx"),
        ({"prior_precision": None}, TypeError, "=None is not supported. Pass a number or a tensor"),
        ({"model": None}, TypeError, "is None, of type NoneType, but must be a torch.nn.Module"),
        ({"model": nn.DataParallel(network())}, TypeError, "in DataParallel, .* model.module"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        KronLaplace(**{"model": network(), "likelihood": "classification"} | arguments)


def test_weights_in_channels_last():
    """Their order in memory is not that of their entries."""
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
        model = model.to(memory_format=memory_format)
        laplace = KronLaplace(model, "classification")
        laplace.fit([(torch.randn(6, 2, 3, 3), torch.arange(6) % 3)])
        found.append((laplace.mean, laplace.log_marginal_likelihood()))
    assert not model[0].weight.is_contiguous()
    assert torch.equal(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1])


# --- other dtypes ---

HYPERPARAMETERS = ("prior_precision", "sigma_noise")


def dtypes(laplace):
    tensors = [*laplace.model.parameters(), laplace.mean]
    return {t.dtype for t in tensors + [getattr(laplace, name) for name in HYPERPARAMETERS]}


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_to_double(likelihood):
    noise = {"sigma_noise": 0.3} if likelihood == "regression" else {}
    laplace, x = fitted(likelihood, dtype=torch.float32, **noise)
    before, evidence = predictions(laplace, x, ["probit"])["probit"], laplace.evidence_terms
    assert laplace.to(dtype=torch.float64) is laplace
    assert dtypes(laplace) == {torch.float64}
    assert {block.B.dtype for block in laplace.factors.blocks.values()} == {torch.float64}
    assert laplace.evidence_terms is not evidence  # nothing of before is used
    after = predictions(laplace, x.double(), ["probit"])["probit"]
    assert after.mean.dtype == torch.float64
    assert_close(after.mean.float(), before.mean)
    for method in ("mc", "linearised"):
        assert predictions(laplace, x.double(), [method])[method].mean.dtype == torch.float64

    # The same as a posterior that was made in float64 from these parameters and factors.
    options = {name: getattr(laplace, name) for name in HYPERPARAMETERS}
    made = KronLaplace(laplace.model, likelihood, **options)
    made.restore(laplace.factors)
    assert torch.equal(made.log_marginal_likelihood(), laplace.log_marginal_likelihood())
    both = [predictions(la, x.double(), ["mc"])["mc"].mean for la in (made, laplace)]
    assert torch.equal(*both)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hyperparameters_of_networks_in_half_precision(dtype):
    """Float16 ends at 65,504, and bfloat16 has three digits."""
    model = network().to(dtype)
    for posterior in (Posterior(model, "regression"), KronLaplace(model, "regression")):
        posterior.prior_precision, posterior.sigma_noise = 1.234567e5, 0.1234567
        posterior.to(dtype=dtype)
        assert posterior.prior_precision.item() == pytest.approx(1.234567e5, rel=1e-6)
        assert posterior.sigma_noise.item() == pytest.approx(0.1234567, rel=1e-6)
    assert not torch.tensor(1.234567e5, dtype=torch.float16).isfinite()


def test_narrow_networks_predict():
    """In float32, from parameters rounded as the network's; nothing of it is left behind."""
    dtype = torch.bfloat16
    wide, x = fitted(dtype=torch.float32)
    laplace = fitted(dtype=torch.float32)[0].to(dtype=dtype)
    uses = {
        "probit": lambda la, x: la(x),
        "mc": lambda la, x: la(x, link_approx="mc", n_samples=500),
        "nn": lambda la, x: la(x, pred_type="nn", link_approx="mc", n_samples=100),
        "functional": lambda la, x: la.functional_samples(x, "nn", 100).softmax(-1).mean(0),
        "predictive": lambda la, x: la.predictive_samples(x, "nn", 100).mean(0),
        "our mc": lambda la, x: predictions(la, x, ["mc"])["mc"].mean,
        "our linearised": lambda la, x: predictions(la, x, ["linearised"])["linearised"].mean,
    }
    for name, use in uses.items():
        torch.manual_seed(0)
        found = use(laplace, x.to(dtype))
        torch.manual_seed(0)
        assert found.dtype == torch.float32, name
        assert_close(found, use(wide, x), atol=0.03, rtol=0, msg=name)
    assert dtypes(laplace) == {dtype, torch.float32}  # δ and σ
