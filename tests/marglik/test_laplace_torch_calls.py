"""Each call of the table in docs/laplace-torch.md has laplace-torch's numbers."""

import math
import re
from copy import deepcopy
from functools import cache, partial
from pathlib import Path

import laplace
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import KfacGGN
from marglik import (
    KronLaplace,
    Laplace,
    Posterior,
    calibrate,
    laplace_predictive,
    maximize_evidence,
)

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


def with_backend(library):
    return partial(library, **({"backend": KfacGGN} if library is laplace.Laplace else {}))


@cache
def fitted(library, structure, likelihood):
    la = with_backend(library)(network(), likelihood, "all", structure)
    la.fit(DataLoader(TensorDataset(*data(likelihood)), 10))
    return la


def found(library, structure, likelihood, call):
    """What the call returns; else, as of an assignment, the evidence and a prediction after it."""
    x, y = data(likelihood)
    loader = DataLoader(TensorDataset(x, y), 10)
    names = {
        "Laplace": with_backend(library), "model": network(), "likelihood": likelihood,
        "x": x[:3], "loader": loader, "torch": torch,
    }  # fmt: skip
    if call.startswith("Laplace("):
        if not re.search('"(kron|diag|full)"|last_layer|likelihood\\)', call):
            call = call.replace('"all"', f'"all", "{structure}"')
        la = eval(call, names)
        la.fit(loader)
    else:
        la = names["la"] = deepcopy(fitted(library, structure, likelihood))
        names["model"] = la.model
        torch.manual_seed(2)  # now, since a pass over a loader draws from torch's generator
        is_statement = ";" in call or " = " in call
        value = exec(call, names) if is_statement else eval(call, names)
        if value is not None:
            return value
    return la.log_marginal_likelihood(), la.prior_precision, la(x[:3])


def is_for(call, note, structure, likelihood):
    """Whether a call is for it: by its arguments, or by the table's words."""
    other = {"regression": "classification", "classification": "regression"}[likelihood]
    structures = re.findall('"(kron|diag|full)"', call)
    if call in ("Laplace(model, likelihood)", 'Laplace(model, likelihood, last_layer_name="2")'):
        structures = ["kron"]
    elif note.startswith('"'):
        structures = re.findall('"(kron|diag|full)"', note)
    return not note.startswith(other) and structure in (structures or [structure])


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


def test_variances_and_jacobians_by_other_names():
    """Calls that laplace-torch has for some structures and layers alone."""
    la, (x, _) = fitted(Laplace, "kron", "regression"), data("regression")
    J, f = la.backend.last_layer_jacobians(x)
    outputs, variances = la.functional_variance_fast(x)
    assert_close(outputs, f)
    assert_close(variances, la.functional_variance(J).diagonal(dim1=-2, dim2=-1))
    indices = torch.tensor([0, 7, 30])
    subnetwork = Laplace(network(), "regression", "subnetwork", "full", subnetwork_indices=indices)
    assert subnetwork.n_params_subnet == 3


def test_what_the_table_compares_differs_where_calls_differ():
    """The control of the test above."""
    plain = found(Laplace, "kron", "classification", "la(x)")
    for call in ("la(x, link_approx='bridge')", "la(x, link_approx='mc', n_samples=20)"):
        assert not torch.allclose(plain, found(Laplace, "kron", "classification", call), rtol=1e-4)
    for structure in ("diag", "full"):
        assert not torch.allclose(
            plain, found(Laplace, structure, "classification", "la(x)"), rtol=1e-4
        )


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_kron_is_that_of_laplace_torch(subset, likelihood):
    """With its own backend, whose factors are those of expand, on a layer that shares weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 2, 6, 6, generator=generator).double()
    x += torch.randn(20, 2, 1, 1, generator=generator)  # an image's positions are alike
    _, y = data(likelihood)
    loader = DataLoader(TensorDataset(x, y[:20]), 8)

    def fitted(library, *arguments, **options):
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        la = library(nn.Sequential(*layers).double(), likelihood, *arguments, **options)
        la.fit(loader)
        return la.log_det_ratio, la.log_marginal_likelihood(), la(x)

    expected = fitted(laplace.Laplace, subset, "kron")
    assert_close(fitted(Laplace, subset, "kron"), expected)
    if subset == "all":  # the last layer shares no weights
        assert_close(fitted(KronLaplace), expected)
        for mode in ("auto", "reduce"):
            other = fitted(Laplace, subset, "kron", kfac_approx=mode)[0]
            assert (other - expected[0]).abs() > 0.1 * expected[0]


DRAWS = [call for call, _ in CALLS if "n_samples" in call or call.startswith("la.sample")]


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("call", DRAWS)
def test_draws_of_the_last_layer_are_laplace_torchs(call, structure):
    """From the same seed, set after `fit`."""
    if call == 'la.functional_samples(x, pred_type="nn", n_samples=20)':
        call = call.replace("functional", "predictive")  # the other one raises an error there
    x, y = data("classification")
    draws = []
    for library in (Laplace, laplace.Laplace):
        la = library(network(), "classification", "last_layer", structure)
        la.fit(DataLoader(TensorDataset(x, y), 10))
        for _ in range(2):  # the second finds what the first has kept
            torch.manual_seed(2)
            draws.append(eval(call, {"la": la, "x": x}))
    assert_close(draws[:2], draws[2:])
    torch.manual_seed(3)
    assert not torch.allclose(eval(call, {"la": la, "x": x}), draws[3])


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["kron", "full"])
def test_predictions_that_there_are_not_are_refused(structure, likelihood):
    """Each way of calling lists those that there are; laplace-torch refuses the same calls."""
    x, y = data(likelihood)
    ours, theirs = (
        of(network(), likelihood, "all", structure) for of in (Laplace, laplace.Laplace)
    )
    for la in (ours, theirs):
        la.fit(DataLoader(TensorDataset(x, y), 10))
    before = ours.prior_precision
    for options, message in (
        ({"pred_type": "NN"}, "pred_type='NN'.*'glm', 'nn'"),
        ({"link_approx": "Probit"}, "'glm' with link_approx='Probit'.*'mc', 'bridge'"),
        ({"pred_type": "nn", "link_approx": "probit"}, "'nn' with link_approx='probit'.*'mc'"),
    ):
        search = {"method": "gridsearch", "val_loader": [(x, y)], "grid_size": 2}
        with pytest.raises(ValueError, match=message):
            ours.optimize_prior_precision(**options, **search)
        with pytest.raises(ValueError, match=message):
            ours(x, **options)
        with pytest.raises(ValueError, match="supported"):
            theirs(x, **options)
    for samples in (ours.functional_samples, ours.predictive_samples):
        with pytest.raises(ValueError, match="'glm', 'nn'"):
            samples(x, pred_type="NN")
    assert torch.equal(ours.prior_precision, before)
    ours(x, pred_type="nn", n_samples=2)  # whose one link need not be named


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_one_task_after_another_is_laplace_torchs(structure):
    """Its example of continual learning: the posterior of each task is the next one's prior."""
    x, y = data("classification")

    def learned(library, override=False):
        model = network()
        la = with_backend(library)(model, "classification", "all", structure)
        H = torch.zeros(()) if structure == "kron" else la.H.clone()
        assert not H.any()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for task in (slice(10), slice(10, 30)):
            for _ in range(5):
                loss = nn.functional.cross_entropy(model(x[task]), y[task])
                theta = nn.utils.parameters_to_vector(model.parameters())
                optimizer.zero_grad()
                (loss - la.log_prob(theta) / 10).backward()
                optimizer.step()
            numbers = []
            if structure == "diag":
                delta = la.posterior_precision if la.n_data else 1.0
                prior = {"prior_mean": la.mean, "prior_precision": delta}
                of_task = with_backend(library)(model, "classification", "all", structure, **prior)
                of_task.fit(DataLoader(TensorDataset(x[task], y[task]), 10))
                numbers = [of_task.log_marginal_likelihood()]
            la.fit(DataLoader(TensorDataset(x[task], y[task]), 10), override=override)
        return *numbers, la.mean, la.n_data, la.log_marginal_likelihood(), la(x[:3])

    ours = learned(Laplace)
    assert_close(ours, learned(laplace.Laplace), rtol=1e-7, atol=1e-9)
    assert not torch.allclose(ours[-1], learned(Laplace, override=True)[-1], rtol=1e-3)


class Named(nn.Module):
    """A network of mappings, which it takes whole, or by the names of their entries."""

    def __init__(self, layers, whole):
        super().__init__()
        self.layers = layers
        self.forward = self.of_mapping if whole else self.of_entries

    def of_mapping(self, batch):
        return self.layers(batch["inputs"])

    def of_entries(self, inputs, other=None):
        return self.layers(inputs)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["diag", "full", "lowrank"])
@pytest.mark.parametrize("form", ["pairs", "mappings", "whole mappings"])
def test_positions_of_mappings_are_as_examples_of_their_own(form, structure, likelihood):
    """Batches that are mappings, and outputs (N, T, C), of which some labels do not count."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, 4, dtype=torch.float64, generator=generator)
    y = torch.randn(5, 3, 3, dtype=torch.float64, generator=generator)
    options, sigma, counted = {}, 0.6, torch.ones(5, 3).bool()
    if likelihood == "classification":
        y, options, sigma = y.argmax(-1), {"ignore_index": -100}, 1.0
        y[0, 1:], y[3] = -100, -100
        counted = y != -100
    bare = network()
    model = bare if form == "pairs" else Named(bare, whole=form == "whole mappings")
    batches = [*zip(x.split(3), y.split(3), strict=True)]
    given = x
    if form != "pairs":
        given = {"inputs": x, "more": torch.zeros(5)}
        batches = [{"inputs": a, "more": torch.zeros(len(a)), "labels": b} for a, b in batches]
    numbers = {"sigma_noise": sigma, "prior_precision": 0.7}
    la = Laplace(model, likelihood, "all", structure, **numbers, **options)
    flat = Laplace(bare, likelihood, "all", structure, **numbers)
    la.fit(batches)
    flat.fit([(x[counted], y[counted])])
    evidence = flat.log_marginal_likelihood()
    assert_close(la.log_marginal_likelihood(), evidence)
    assert la.n_data == 5
    for a, b in zip(
        la.output_distribution(given), flat.output_distribution(x.flatten(0, 1)), strict=True
    ):
        assert_close(a.flatten(0, 1), b)
    for link in ("probit", "bridge", "bridge_norm"):
        as_flat, found = flat(x.flatten(0, 1), link_approx=link), la(given, link_approx=link)
        for a, b in zip(
            *((v if type(v) is tuple else (v,)) for v in (as_flat, found)), strict=True
        ):
            assert_close(b.flatten(0, 1), a)
    for of, held_out in ((la, batches), (flat, [(x[counted], y[counted])])):
        of.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=9)
    assert la.prior_precision == flat.prior_precision
    flat.fit([(x[:, :2][counted[:, :2]], y[:, :2][counted[:, :2]])])  # negative control
    assert not torch.allclose(flat.log_marginal_likelihood(), evidence, rtol=1e-3)


def test_the_gradient_in_the_noise_is_that_of_differences():
    """In laplace-torch's "kron" it lacks a part; the numbers are those of the page."""
    x, y = data("regression")

    def gradients(library):
        la = library(network(), "regression", "all", "kron")
        la.fit(DataLoader(TensorDataset(x, y), 10))
        sigma = torch.tensor(0.5).double().requires_grad_()
        (found,) = torch.autograd.grad(la.log_marginal_likelihood(sigma_noise=sigma), sigma)
        ends = [la.log_marginal_likelihood(sigma_noise=sigma.detach() + h) for h in (1e-5, -1e-5)]
        return found, (ends[0] - ends[1]) / 2e-5

    ours, theirs = gradients(Laplace), gradients(laplace.Laplace)
    assert_close(*ours, rtol=1e-6, atol=0)
    assert_close(ours[1], theirs[1], rtol=1e-6, atol=0)
    numbers = f"marglik give {ours[0]:.2f}, and laplace-torch gives {theirs[0]:.2f}"
    assert numbers in " ".join(PAGE.read_text().split())


def test_the_grid_has_the_least_loss_of_each_precision():
    """laplace-torch's metric goes on from one precision to the next: it has their running mean."""
    x, y = data("classification")
    held_out = DataLoader(TensorDataset(x[20:], y[20:]), 5)
    grid, found = torch.logspace(-4, 4, 9), []
    for library in (Laplace, laplace.Laplace):
        la = library(network(), "classification", "all", "kron")
        la.fit(DataLoader(TensorDataset(x[:20], y[:20]), 10))
        la.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=9)
        found.append(la.prior_precision.item())
        losses = []
        for delta in grid:
            la.prior_precision = delta
            losses.append(nn.functional.nll_loss(la(x[20:]).log(), y[20:]))
    running = torch.stack(losses).cumsum(0) / torch.arange(1, 10)
    least = [grid[torch.stack(losses).argmin()].item(), grid[running.argmin()].item()]
    assert least[0] != least[1]
    assert found == pytest.approx(least)


def test_the_likelihood_of_several_terms_has_all_normalisers():
    """That of laplace-torch, for outputs (N, T, C), has N C of them."""
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    y, model = x[..., :3].sin(), network()
    expected = torch.distributions.Normal(model(x), 0.5).log_prob(y).sum()
    theirs = laplace.Laplace(network(), "regression", "all", "kron", sigma_noise=0.5)
    theirs.fit(DataLoader(TensorDataset(x, y), 6))
    for structure in ("full", "diag", "kron"):
        la = Laplace(model, "regression", "all", structure, sigma_noise=0.5)
        la.fit([(x, y)])
        assert_close(la.log_likelihood, expected)
    assert_close(la.log_det_ratio, theirs.log_det_ratio)
    missing = 6 * (3 - 1) * 3 * math.log(0.5 * math.sqrt(2 * math.pi))
    assert_close(theirs.log_likelihood, expected + missing)


def test_options_of_kronecker_factors_are_for_kron():
    for structure in ("diag", "full", "lowrank"):
        for name, value in (
            ("kfac_approx", "reduce"),
            ("diagonal_above", 3),
            ("expand_scaling", "examples"),
        ):
            with pytest.raises(ValueError, match=f"{name}={value!r} is only for .*'kron'"):
                Laplace(network(), "classification", "all", structure, **{name: value})
        Laplace(network(), "classification", "all", structure, fisher="exact", ignore_index=0)


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "lowrank"])
def test_known_faults_are_not_ours(structure, tmp_path):
    """The model keeps its mode and what is frozen; N is what was seen."""
    x, y = data("classification")
    model = network()
    model[0].bias.requires_grad_(False)
    for subset, parameters in (("all", 38), ("last_layer", 18)):
        la = Laplace(model, "classification", subset, structure, temperature=0.5)
        with pytest.raises(AttributeError, match="not fitted. Call fit"):
            la.log_marginal_likelihood()
        la.fit(DataLoader(TensorDataset(x, y), 8, drop_last=True))
        assert (la.n_data, la.n_params) == (24, parameters)
        la(x, pred_type="nn", link_approx="mc", n_samples=2)
        assert model.training and [p.requires_grad for p in model.parameters()].count(False) == 1
        la.sample_size = 7  # as of an evidence that is an estimate
        torch.save(la.state_dict(), tmp_path / "la.pt")
        again = Laplace(model, "classification", subset, structure)
        again.load_state_dict(torch.load(tmp_path / "la.pt"))
        assert again.sample_size == 7 and again.temperature == 0.5
        assert_close(again.log_marginal_likelihood(), la.log_marginal_likelihood())
        assert_close(again(x), la(x))
        _check_refusals(again, structure, la.state_dict())
        assert_close(again(x), la(x))
        trained = network()
        nn.init.zeros_(trained[2].weight)
        trained[0].bias.requires_grad_(False)
        other = Laplace(trained, "classification", subset, structure)
        with pytest.raises(ValueError, match="other values of the model's parameters"):
            other.load_state_dict(torch.load(tmp_path / "la.pt"))


def _check_refusals(la, structure, state):
    """A state that is not whole, of another structure or of another precision changes nothing."""
    before = la.prior_precision
    state = {**state, "prior_precision": 7 * before}
    others = [
        ({}, "Laplace lacks 'prior_precision', 'prior_mean', 'sigma_noise', 'temperature'"),
        ({**state, "structure": "another"}, f"'another', but this Laplace has '{structure}'"),
        (
            {**state, "fit": {}},
            "contains no Kronecker" if structure == "kron" else "fit lacks 'structure', 'H'",
        ),
        (
            {**state, "mean": state["mean"].float()},
            "in torch.float32, but this model is in torch.fl",
        ),
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
    with pytest.raises(ValueError, match="defines 'first' last, but runs 'last' last"):
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
        with pytest.raises(ValueError, match="no parameters|[Ii]ndices|one block per tensor"):
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


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_a_state_of_another_subset_is_refused(structure):
    """Where the parameters have the same values, too."""
    x, y = data("classification")

    def of(subset):
        model = network()
        model[2].bias = nn.Parameter(model[2].bias.detach()[:1].expand(3).clone())
        model[0].bias = nn.Parameter(model[0].bias.detach().fill_(0.5))
        options = {} if subset == "all" else {"subnetwork_indices": subset}
        name = "all" if subset == "all" else "subnetwork"
        return Laplace(model, "classification", name, structure, **options)

    subsets = [["0.bias"], ["2.bias"], ["0"]]
    if structure != "kron":
        subsets += [torch.tensor([0, 7, 30]), torch.tensor([0, 7]), "all"]
    for subset in subsets:
        la = of(subset)
        la.fit([(x, y)])
        for other in subsets:
            again = of(other)
            if other is subset:
                again.load_state_dict(la.state_dict())
                assert_close(again(x), la(x))
                continue
            with pytest.raises(ValueError, match="parameters in .* tensors, but this Laplace has"):
                again.load_state_dict(la.state_dict())


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_a_last_layer_made_before_training_has_the_networks_statistics(structure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = data("regression")
    la = Laplace(model, "regression", "last_layer", structure)
    before = model[1].running_mean.clone()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert (model[1].running_mean - before).norm() > 0.1
    fitted_later = Laplace(model, "regression", "last_layer", structure)
    for each in (la, fitted_later):
        each.fit([(x, y)])
    f, covariance = la(x)
    assert_close(f, model.eval()(x).detach())
    assert_close(covariance, fitted_later(x)[1])
    assert_close(la.log_marginal_likelihood(), fitted_later.log_marginal_likelihood())
    model.train()(3 * x)
    with pytest.raises(ValueError, match="'1.running_mean' has other values"):
        la(x)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_as_many_prior_precisions_as_a_subnetwork_has_parameters_are_theirs(structure):
    """Also where there are as many tensors."""
    x, y = data("regression")
    delta, indices = torch.linspace(0.5, 4, 4).double(), torch.tensor([0, 7, 30, 42])
    found = []
    for library in (Laplace, laplace.Laplace):
        la = library(
            network(), "regression", "subnetwork", structure, subnetwork_indices=indices,
            prior_precision=delta,
        )  # fmt: skip
        la.fit(DataLoader(TensorDataset(x, y), 10))
        assert la.n_layers == 4
        vectors = la.assemble_full_samples(torch.arange(8).double().view(2, 4))
        found.append((la.prior_precision_diag, la.log_det_ratio, la(x), la.mean_subnet, vectors))
    assert_close(*found)
    one_per_tensor = Laplace(
        network(), "regression", "subnetwork", structure, subnetwork_indices=indices[[0, 1, 3]]
    )
    one_per_tensor.prior_precision = delta
    tensors = torch.tensor([0, 0, 3])
    assert_close(one_per_tensor.prior_precision_diag, delta[tensors])


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_maximum_with_one_precision_per_tensor_where_there_are_as_many_parameters(structure):
    x, y = data("regression")
    indices = torch.tensor([0, 7, 41, 42])  # of two tensors, two of each
    la = Posterior(network(), "regression", structure=structure, indices=indices)
    la.fit([(x, y)])
    fit = maximize_evidence(la, learn_sigma_noise=False)
    delta = la.prior_precision
    assert_close(la.log_marginal_likelihood(), torch.tensor(fit.objective).double())
    assert delta[0] == delta[1] == fit.prior_precision["0.weight"]
    assert delta[2] == delta[3] == fit.prior_precision["2.bias"] != delta[0]


def test_other_arguments_of_laplace_torch():
    x, y = data("classification")
    la = KronLaplace(network(), "classification", damping=False, asdl_fisher_kwargs=None)
    la.fit([(x, y)])
    search = {"val_loader": [(x, y)], "grid_size": 3, "log_prior_prec_base": 2.0}
    la.optimize_prior_precision(method="gridsearch", **search)
    assert la.prior_precision.item() in (2**-4, 1, 2**4)
    for wrong in ({"damping": True}, {"asdl_fisher_kwargs": {"clip": 1.0}}):
        with pytest.raises(TypeError, match=f"'{[*wrong][0]}' is not an option"):
            KronLaplace(network(), "classification", **wrong)

    pairs = torch.stack([x[:10], x[10:20]], 1)
    reward = nn.Sequential(nn.Linear(4, 1), nn.Flatten()).double()
    predicted = []
    for library in (Laplace, laplace.Laplace):
        la = library(deepcopy(reward), "reward_modeling", "all", "full")
        la.fit(DataLoader(TensorDataset(pairs, torch.arange(10) % 2), 5))
        predicted.append((la(x[:3]), la(pairs[:3], fitting=True)))
    assert_close(*predicted)
