"""A posterior that is moved to another dtype or device, and one that gets its factors back."""

import pytest
import torch
from torch.testing import assert_close

from marglik import KronLaplace, Posterior
from tests.marglik.posteriors import LIKELIHOODS, fitted, network, predictions

pytestmark = pytest.mark.usefixtures("one_thread")

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


def test_factors_of_another_model():
    laplace = KronLaplace(network()[:1], "classification")
    with pytest.raises(ValueError, match="needs a block for every trainable parameter"):
        laplace.restore(fitted()[0].factors)
    assert laplace.factors is None


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
