"""Each call of the table in docs/laplace-torch.md has laplace-torch's numbers."""

import re
from functools import partial
from pathlib import Path

import laplace
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import KfacGGN
from marglik import KronLaplace, Laplace, calibrate, laplace_predictive

PAGE = Path(__file__).parents[2] / "docs/laplace-torch.md"
TABLE = PAGE.read_text().partition("## The same calls")[2].partition("##")[0]
CALLS = re.findall(r"^\| `(.*?)` \| (.*?) ?\|$", TABLE, re.M)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data(likelihood):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 4, dtype=torch.float64, generator=generator)
    y = (x[:, :3] + 0.5 * torch.randn(30, 3, generator=generator)).sin()
    return x, y.argmax(1) if likelihood == "classification" else y


def found(library, structure, likelihood, call):
    """What the call returns; else, as of an assignment, the evidence and a prediction after it."""
    x, y = data(likelihood)
    loader = DataLoader(TensorDataset(x, y), 10)
    backend = {"backend": KfacGGN} if library is laplace.Laplace else {}
    with_backend = partial(library, **backend)
    names = {"Laplace": with_backend, "model": network(), "likelihood": likelihood, "x": x[:3],
             "loader": loader, "torch": torch}  # fmt: skip
    if call.startswith("Laplace("):
        if not re.search('"(kron|diag|full)"|last_layer|likelihood\\)', call):
            call = call.replace('"all"', f'"all", "{structure}"')
        la = eval(call, names)
        la.fit(loader)
    else:
        la = names["la"] = with_backend(names["model"], likelihood, "all", structure)
        la.fit(loader)
        torch.manual_seed(2)  # now, since a pass over a loader draws from torch's generator
        is_statement = ";" in call or " = " in call
        value = exec(call, names) if is_statement else eval(call, names)
        if value is not None:
            return value
    return la.log_marginal_likelihood(), la.prior_precision, la(x[:3])


def is_for(call, note, structure, likelihood):
    """Whether a call is for it: by its arguments, or by the table's words."""
    named = re.findall('"(kron|diag|full)"', call)
    if named or call in (
        "Laplace(model, likelihood)",
        'Laplace(model, likelihood, last_layer_name="2")',
    ):
        return structure in (named or ["kron"])
    other = {"regression": "classification", "classification": "regression"}[likelihood]
    return not note.startswith(other) and not (note == '"kron"' and structure != "kron")


CASES = [
    ("kron", "classification"),
    ("kron", "regression"),
    ("diag", "regression"),
    ("full", "classification"),
]
"""Each structure, each likelihood."""


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_a_call_has_laplace_torchs_numbers(call):
    code, note = call
    cases = 0
    for case in CASES:
        if is_for(code, note, *case):
            ours, theirs = (found(of, *case, code) for of in (Laplace, laplace.Laplace))
            assert_close(ours, theirs, rtol=1e-7, atol=1e-9, check_dtype=False,
                         msg=lambda m, case=case: f"{case}: {m}")  # fmt: skip
            cases += 1
    assert cases


def test_what_the_table_compares_differs_where_calls_differ():
    """The control of the test above."""
    plain = found(Laplace, "kron", "classification", "la(x)")
    for call in ("la(x, link_approx='bridge')", "la(x, link_approx='mc', n_samples=20)"):
        assert not torch.allclose(plain, found(Laplace, "kron", "classification", call), rtol=1e-4)
    for structure in ("diag", "full"):
        assert not torch.allclose(
            plain, found(Laplace, structure, "classification", "la(x)"), rtol=1e-4
        )


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "lowrank"])
def test_known_faults_are_not_ours(structure, tmp_path):
    """The model keeps its mode and what is frozen; N is what was seen."""
    x, y = data("classification")
    model = network()
    model[0].bias.requires_grad_(False)
    for subset, parameters in (("all", 38), ("last_layer", 18)):
        la = Laplace(model, "classification", subset, structure)
        with pytest.raises(AttributeError, match="not fitted; call fit"):
            la.log_marginal_likelihood()
        la.fit(DataLoader(TensorDataset(x, y), 8, drop_last=True))
        assert (la.n_data, la.n_params) == (24, parameters)
        la(x, pred_type="nn", link_approx="mc", n_samples=2)
        assert model.training and [p.requires_grad for p in model.parameters()].count(False) == 1
        torch.save(la.state_dict(), tmp_path / "la.pt")
        again = Laplace(model, "classification", subset, structure)
        again.load_state_dict(torch.load(tmp_path / "la.pt"))
        assert_close(again(x), la(x))
        _check_refusals(again, structure, la.state_dict())
        assert_close(again(x), la(x))
        trained = network()
        nn.init.zeros_(trained[2].weight)
        other = Laplace(trained, "classification", subset, structure)
        with pytest.raises(ValueError, match="of other parameters than the model has"):
            other.load_state_dict(torch.load(tmp_path / "la.pt"))


def _check_refusals(la, structure, state):
    """A state that is not whole, of another structure or of another precision changes nothing."""
    before = la.prior_precision
    state = {**state, "prior_precision": 7 * before}
    others = [
        ({}, "Laplace lacks 'prior_precision', 'sigma_noise', 'mean', 'structure', 'fit'"),
        ({**state, "structure": "another"}, f"'another', and this Laplace '{structure}'"),
        ({**state, "fit": {}}, "holds no Kronecker" if structure == "kron" else "fit lacks 'H'"),
        ({**state, "mean": state["mean"].float()}, "in torch.float32, and this one is in torch.fl"),
    ]
    for key in state:
        without = {name: value for name, value in state.items() if name != key}
        others.append((without, f"Laplace lacks '{key}'"))
    for wrong, message in others:
        with pytest.raises(ValueError, match=message):
            la.load_state_dict(wrong)
        assert torch.equal(la.prior_precision, before)


def test_the_last_layer_is_the_one_that_runs_last():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(5, 3).double(), nn.Linear(4, 5).double()

        def forward(self, x):
            return self.last(self.first(x).tanh())

    batch = data("classification")
    with pytest.raises(ValueError, match="lists 'first' last, but 'last' runs last"):
        Laplace(Reversed(), "classification").fit([batch])
    with pytest.raises(ValueError, match="All parameters of the model are frozen"):
        Laplace(Reversed().requires_grad_(False), "classification")
    la = Laplace(Reversed(), "classification", last_layer_name="last")
    la.fit([batch])
    alone = Laplace(nn.Linear(4, 3).double(), "classification")  # a layer that is the whole model
    alone.fit([batch])
    assert alone.n_params == 15
    assert la.n_params == 18 and calibrate(la, [batch])(batch[0]).mean.shape == (30, 3)


def test_data_that_is_read_once_counts_whole():
    """The check of the last layer looks at the first batch."""
    x, y = data("classification")
    batches = [*zip(x.split(10), y.split(10), strict=True)]
    again, once = (Laplace(network(), "classification") for _ in range(2))
    again.fit(batches)
    once.fit(iter(batches))
    assert once.n_data == 30
    assert_close(once.log_marginal_likelihood(), again.log_marginal_likelihood())


def low_rank(rank, batches):
    """A fitted approximation of this rank, and the one of full rank."""
    x, y = data("classification")
    la = Laplace(network(), "classification", "all", "lowrank", prior_precision=0.7, rank=rank)
    la.fit([*zip(x.chunk(batches), y.chunk(batches), strict=True)])
    dense = Laplace(network(), "classification", "all", "full", prior_precision=0.7)
    dense.fit([(x, y)])
    return la, dense


def test_low_rank_is_the_largest_eigenpairs():
    """Evidence, covariances and samples by the dense matrix whose other eigenvalues are 0."""
    x, _ = data("classification")
    for rank, batches in ((100, 4), (6, 1)):
        la, dense = low_rank(rank, batches)
        values, vectors = torch.linalg.eigh(dense.H)
        assert values[:-6].max() > 0.1  # negative control: six eigenpairs are not all
        values[: max(0, len(values) - rank)] = 0
        whole = dense.log_marginal_likelihood()
        dense.H = vectors * values @ vectors.mT
        assert_close(la.log_marginal_likelihood(), dense.log_marginal_likelihood())
        assert (whole < la.log_marginal_likelihood() - 0.1) == (rank == 6)
        assert_close(la(x, link_approx="bridge"), dense(x, link_approx="bridge"))
        samples = la.sample(100_000, torch.Generator().manual_seed(0))
        covariance = torch.linalg.inv(dense.H + 0.7 * torch.eye(len(values)).double())
        assert (samples.T.cov() - covariance).norm() < 0.03 * covariance.norm()
    la, dense = low_rank(6, 4)  # cut after each batch: never more than H
    assert torch.linalg.eigvalsh(dense.H - la.H.T @ la.H).min() > -1e-9


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "lowrank"])
def test_a_subnetwork_leaves_the_rest_constant(structure):
    """By names, of layers or parameters; by indices where there are no factors."""
    x, y = data("classification")
    frozen = network()
    frozen[0].weight.requires_grad_(False)
    expected = Laplace(frozen, "classification", "all", structure)
    expected.fit([(x, y)])
    number = sum(p.numel() for p in network()[0].parameters()) - frozen[0].bias.numel()
    ways = [["2", "0.bias"], torch.arange(number, 43)]
    for chosen in ways[: 1 if structure == "kron" else 2]:
        model = network()
        la = Laplace(model, "classification", "subnetwork", structure, subnetwork_indices=chosen)
        la.fit([(x, y)])
        assert la.n_params == expected.n_params == 23 and all(
            p.requires_grad for p in model.parameters()
        )
        assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())
        assert_close(la.scatter, expected.scatter, check_dtype=False)
        assert_close(la(x), expected(x))
        sample = la.network_outputs(la.sample(3, torch.Generator().manual_seed(0)), x)
        of = expected.sample(3, torch.Generator().manual_seed(0))
        assert_close(sample, expected.network_outputs(of, x))
    for wrong in (["nothing"], [], torch.tensor([0, 43]), torch.tensor([1, 1])):
        with pytest.raises(ValueError, match="no parameters|indices|whole tensors"):
            Laplace(network(), "classification", "subnetwork", structure, subnetwork_indices=wrong)


def test_other_likelihoods_predict_by_our_predictive():
    x, y = data("regression")
    la = KronLaplace(network(), "bernoulli")
    la.fit([(x, (y > 0).double())])
    for predict in (la, la.predictive_samples):
        with pytest.raises(NotImplementedError, match="'bernoulli'.*laplace_predictive"):
            predict(x)
    assert la.functional_samples(x, n_samples=4).shape == (4, 30, 3)
    assert laplace_predictive(la)(x).mean.shape == (30, 3)


@pytest.mark.parametrize("structure", ["diag", "full", "lowrank"])
def test_what_jacobians_do_not_have_is_named(structure):
    with pytest.raises(ValueError, match="fisher='mc' is for hessian_structure='kron'"):
        Laplace(network(), "classification", "all", structure, fisher="mc")
    la = Laplace(network(), "classification", "all", structure)
    with pytest.raises(ValueError, match="The data is empty"):
        la.fit([])
    la.fit([data("classification")])
    with pytest.raises(NotImplementedError, match="laplace_predictive.* take 'kron'"):
        calibrate(la, [data("classification")])
