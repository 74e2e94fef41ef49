"""The backends inside laplace-torch: every structure, likelihood and predictive."""

import pytest
import torch
from laplace import Laplace
from laplace.curvature import CurvlinopsEF, CurvlinopsGGN
from laplace.utils import Kron
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend.laplace_torch.interface import KfacEF, KfacGGN
from tests import oracles
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.networks import Model
from tests.uses import kfac_blocks

LIKELIHOODS = ["classification", "regression"]
pytestmark = pytest.mark.filterwarnings("ignore:By default `link_approx`")


def network(groups=1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(),
        nn.Conv2d(4, 4, 2, groups=groups, bias=False), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).double()  # fmt: skip


def loader(likelihood, n=11, batch_size=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, 4, 4, dtype=torch.float64, generator=generator)
    labels = torch.randint(3, (n,), generator=generator)
    targets = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    return DataLoader(
        TensorDataset(x, labels if likelihood == "classification" else targets), batch_size
    )


def fitted(data=None, model=None, likelihood="classification", *, backend=KfacGGN, **options):
    """laplace-torch's posterior of all weights of a network, fitted to the data."""
    options = {"hessian_structure": "kron", "subset_of_weights": "all", **options}
    model = network() if model is None else model
    la = Laplace(model, likelihood, backend=backend, **options)
    la.fit(loader(likelihood) if data is None else data)
    return la


@pytest.mark.parametrize("kfac_approx", MODES)
@pytest.mark.parametrize(
    ("backend", "peer", "likelihood"),
    [
        (KfacGGN, CurvlinopsGGN, "classification"),
        (KfacGGN, CurvlinopsGGN, "regression"),
        (KfacEF, CurvlinopsEF, "classification"),
    ],
)
def test_factors_equal_those_of_curvlinops(backend, peer, likelihood, kfac_approx):
    data = loader(likelihood)
    mode = {"kfac_approx": kfac_approx}
    ours = fitted(data, None, likelihood, backend=backend, backend_kwargs=mode)
    theirs = fitted(data, None, likelihood, backend=peer, asdl_fisher_kwargs=mode)
    assert_close(ours.H_facs.to_matrix(), theirs.H_facs.to_matrix())
    assert_close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    x = data.dataset.tensors[0][:5]
    assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_empirical_fisher_is_that_of_the_log_likelihood(subset, structure, likelihood):
    model, data = network(), loader(likelihood)
    options = {"hessian_structure": structure, "subset_of_weights": subset}
    la = fitted(data, model, likelihood, backend=KfacEF, **options)
    blocks = oracles.empirical_fisher_blocks(model, *data.dataset.tensors, likelihood)
    names = blocks if subset == "all" else ("6.weight", "6.bias")
    diagonal = torch.cat([blocks[name].diagonal() for name in names])
    assert_close(la.H if structure == "diag" else la.H.diagonal(), diagonal)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_monte_carlo_samples(structure):
    """num_samples counts in each structure: the error falls as 1/√samples."""
    x, y = next(iter(loader("classification", batch_size=11)))
    exact = _dense(KfacGGN(network(), "classification"), structure, x, y)
    errors = []
    for options in ({}, {"num_samples": 400}):
        torch.manual_seed(0)
        backend = KfacGGN(network(), "classification", stochastic=True, **options)
        errors.append((_dense(backend, structure, x, y) - exact).norm() / exact.norm())
    assert errors[0] > 0.2 > 0.1 > errors[1] > 0


def _dense(backend, structure, x, y):
    """The curvature of one batch as a vector of its entries."""
    if structure == "kron":
        return backend.kron(x, y, len(y))[1].to_matrix().flatten()
    return getattr(backend, structure)(x, y)[1].flatten()


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("backend", [KfacGGN, KfacEF])
def test_batches_that_are_mappings(backend, structure):
    x, y = loader("classification").dataset.tensors
    rows = [{"pixels": x_n, "labels": y_n} for x_n, y_n in zip(x, y, strict=True)]
    named = Model(lambda m, batch: m.net(batch["pixels"]), net=network())
    options = {"hessian_structure": structure, "backend": backend}
    la = fitted(DataLoader(rows, 4), named, dict_key_x="pixels", **options)
    plain = fitted(**options)
    assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood())
    assert_close(la({"pixels": x[:3]}), plain(x[:3]))


def test_grouped_convolutions_are_block_diagonal():
    model, data = network(groups=2), loader("classification")
    la = fitted(data, model)
    x = data.dataset.tensors[0]
    expected = torch.block_diag(*kfac_blocks(model, x, "classification", "expand").values())
    assert_close(la.H_facs.to_matrix(), expected)
    dense = expected + torch.eye(len(expected)).double()
    assert_close(la.log_det_posterior_precision, torch.linalg.slogdet(dense).logabsdet)
    Js, _ = la.backend.jacobians(x[:2])
    covariance = torch.einsum("ncp,pq,nkq->nck", Js, torch.linalg.inv(dense), Js)
    assert_close(la.functional_variance(Js), covariance)
    assert_close(la.H.diag(), expected.diagonal())
    assert_close(la.H.to_matrix(), expected)
    assert la.sample(3).shape == (3, len(expected))


def test_damping_survives_prior_and_temperature():
    la = fitted(damping=True, prior_precision=0.5, temperature=2.0)
    expected = 0.0
    for F in la.H_facs.kfacs:
        values = [torch.linalg.eigvalsh(factor) * 0.5 ** (1 / len(F)) for factor in F]
        if len(F) == 1:
            expected += (values[0] + 0.5).log().sum()
        else:
            root = 0.5**0.5
            expected += torch.outer(values[0] + root, values[1] + root).log().sum()
    assert_close(la.log_det_posterior_precision, expected)


def test_state_dict_of_laplace_torch_round_trips():
    data, x = loader("classification"), loader("classification").dataset.tensors[0]
    la, twice = fitted(data), fitted(data)
    other = Laplace(network(), "classification", "all", backend=KfacGGN)
    other.load_state_dict(la.state_dict())
    assert_close(other(x), la(x))
    other.fit(data, override=False)
    twice.fit(data, override=False)
    assert_close(other.H_facs.to_matrix(), twice.H_facs.to_matrix())


def test_parameters_without_a_block_are_named():
    # The examples do not come first.
    shift = Model(lambda m, x: (torch.diag(m.by) @ x.mT).mT, by=torch.zeros(4))
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 4), shift, nn.Linear(4, 3)).double()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="2.by"):
        fitted(model=model, backend_kwargs={"unsupported": "freeze"})


@pytest.mark.parametrize("backend", [KfacGGN, KfacEF])
def test_options_of_the_pass_reach_it(backend):
    with pytest.raises(ValueError, match="backward_precision='tf32' has no effect on device 'cpu'"):
        backend(network(), "classification", backward_precision="tf32").kron(
            torch.randn(2, 2, 4, 4).double(), torch.tensor([0, 1]), N=2
        )


def test_batches_and_decompositions_stay_as_they_were():
    (x, y), (x2, y2), *_ = loader("classification")
    backend = KfacGGN(network(), "classification")
    first, second = backend.kron(x, y, N=11)[1], backend.kron(x2, y2, N=11)[1]
    before = first.to_matrix()
    total = Kron.init_from_model(list(backend.model.parameters()), "cpu", torch.float64)
    total += first
    total += second
    assert_close(first.to_matrix(), before, rtol=0, atol=0)
    decomposed, expected = total.decompose(), total.to_matrix()
    assert_close(expected, (first + second).to_matrix())
    total += first
    assert_close(decomposed.to_matrix(), expected)
    with pytest.raises(ValueError, match="Can only add curvature from the same backend and model"):
        Kron([[torch.ones(2, 2)] for _ in first.kfacs]) + first
