"""A posterior comes back from its folder as it was, and damage to it is found."""

from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

import marglik.laplace
from kfac_backend.options import CurvatureOptions
from marglik import KronLaplace, Posterior, load_posterior, save_posterior
from marglik.storage.record_files import POSTERIOR
from tests.marglik.posteriors import CASES, data, fitted, network, predictions

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = (POSTERIOR, "posterior.safetensors", "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    laplace, _ = fitted()
    save_posterior(laplace, tmp_path, model={"class_path": "torch.nn.Linear"}, data={"name": "d"})
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    laplace, x = fitted(**CASES[case])
    laplace.sample_size = 7 if case == "classification" else None
    save_posterior(laplace, tmp_path / "run", frozen=True)
    model = network(next(laplace.model.parameters()).dtype, seed=5)  # other parameters
    loaded = load_posterior(tmp_path / "run", model)
    before, after = predictions(laplace, x), predictions(loaded, x)
    for method, part in product(before, ("mean", "aleatoric", "epistemic")):
        assert torch.equal(getattr(before[method], part), getattr(after[method], part)), method
    evidences = [p.log_marginal_likelihood() for p in (loaded, laplace)]
    assert_close(*evidences, check_dtype=False)  # laplace-torch's calls have the model's dtype
    assert torch.equal(loaded.mean, laplace.mean)
    assert loaded.fitted_factors().is_corrected == (case == "corrected")
    for name in ("likelihood", "sigma_noise", "temperature", "n_data", "sample_size"):
        assert getattr(loaded, name) == getattr(laplace, name), name
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in laplace.model.parameters()
    ]
    # Negative control: none of the case's options could get lost unnoticed.
    if case != "classification":
        plain, _ = fitted(laplace.likelihood.name) if len(CASES[case]) > 1 else fitted()
        assert plain.log_marginal_likelihood() != laplace.log_marginal_likelihood()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("KronLaplace", {}),
        ("KronLLLaplace", {}),
        ("KronLLLaplace", {"last_layer_name": "0"}),
        ("SubnetLaplace", {"subnetwork_indices": ["0.weight", "6"]}),
    ],
)
def test_the_class_that_was_saved_is_loaded(name, more, tmp_path):
    (x, y), made = data("classification"), getattr(marglik.laplace, name)
    la = made(network(), "classification", prior_precision=0.7, **more)
    la.fit([(x, y)])
    save_posterior(la, tmp_path, frozen=True)
    loaded = load_posterior(tmp_path, network(seed=5))
    assert type(loaded) is made and loaded.n_params == la.n_params
    assert torch.equal(loaded(x), la(x))
    assert torch.equal(loaded.log_marginal_likelihood(), la.log_marginal_likelihood())
    plain = Posterior(la.model, "classification")  # negative control
    plain.fit([(x, y)])
    save_posterior(plain, tmp_path, frozen=True)
    assert type(load_posterior(tmp_path, network(seed=5))) is Posterior


OPTIONS = {
    "kfac_approx": {"0": "expand", "*": "reduce"},
    "fisher": "empirical",
    "ignore_index": -1,
    "unsupported": "freeze",
}


def with_options(**options):
    """A posterior of data, one label of which is -1."""
    x, y = data("classification")
    y[0] = -1
    laplace = Posterior(network(), "classification", CurvatureOptions(**options))
    laplace.fit([(x, y)])
    return laplace, [(x, y)]


def test_all_options_of_the_pass_are_kept(tmp_path):
    laplace, batches = with_options(**OPTIONS)
    save_posterior(laplace, tmp_path)
    loaded = load_posterior(tmp_path, network(seed=5))
    assert loaded.options == laplace.options == CurvatureOptions(**OPTIONS)
    loaded.fit(batches)
    assert torch.equal(loaded.log_marginal_likelihood(), laplace.log_marginal_likelihood())
    # Negative control: each option that shapes the factors makes a difference.
    for changed in ({"kfac_approx": "reduce"}, {"fisher": "exact"}):
        other, _ = with_options(**(OPTIONS | changed))
        assert other.log_marginal_likelihood() != laplace.log_marginal_likelihood()


@pytest.mark.parametrize(
    ("name", "damage"),
    [*((name, "a byte") for name in FILES), (POSTERIOR, "missing"), (FILES[2], "another run's")],
)
def test_damaged_files_are_found(name, damage, folder, tmp_path):
    path, model = folder / name, network(seed=5)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    if damage == "missing":
        path.unlink()
    if damage == "another run's":
        save_posterior(fitted("regression", seed=3)[0], tmp_path / "other", frozen=True)
        path.write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises((ValueError, FileNotFoundError), match=name) as caught:
        load_posterior(folder, model)
    assert any(way in str(caught.value) for way in ("wrote it again", "Create one with"))
    assert torch.equal(model[0].weight, network(seed=5)[0].weight)


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        pass


def unsavable(kind):
    if kind == "extra state":
        model = nn.Sequential(nn.Flatten(), WithExtraState(32, 3).double())
        laplace = KronLaplace(model, "classification")
        laplace.fit([data("classification")])
        return laplace
    laplace, _ = fitted()
    with torch.no_grad():
        laplace.model[0].bias[0] += 1e-3
    return laplace


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("extra state", "_extra_state' in the state dict of Sequential is a dict"),
        ("trained on", "no longer has the weights at which the posterior was fitted: '0.bias'"),
    ],
)
def test_what_cannot_be_saved_leaves_the_old_posterior(kind, message, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=message):
        save_posterior(unsavable(kind), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def lora(rank=2, seed=0):
    """A frozen base, some of it tied, under small trainable layers; one buffer."""
    torch.manual_seed(seed)

    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(32, 16).requires_grad_(False)
            self.again = self.base
            self.down, self.up = nn.Linear(32, rank, bias=False), nn.Linear(rank, 16, bias=False)
            self.head = nn.Linear(16, 3)
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, x):
            x = x.flatten(1)
            return self.head(self.again(x) + self.scale * self.up(self.down(x)))

    return LoRA().double()


@pytest.fixture
def on_base():
    laplace = KronLaplace(lora(), "classification", prior_precision=0.7)
    laplace.fit([data("classification")])
    return laplace


def test_a_frozen_base_is_not_saved(on_base, tmp_path):
    save_posterior(on_base, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == {"down.weight", "up.weight", "head.weight", "head.bias", "scale"}
    model = lora(seed=1)
    model.base.load_state_dict(on_base.model.base.state_dict())
    with pytest.raises(ValueError, match="without the frozen parameters.*SHA-256 sums"):
        load_posterior(tmp_path, lora(seed=1))
    loaded = load_posterior(tmp_path, model)
    x, _ = data("classification")
    for method, prediction in predictions(on_base, x).items():
        assert torch.equal(predictions(loaded, x, [method])[method].mean, prediction.mean)
    assert_close(loaded.log_marginal_likelihood(), on_base.log_marginal_likelihood())
    assert not model.base.weight.requires_grad and model.down.weight.requires_grad


def test_a_base_that_is_saved_too(on_base, tmp_path):
    """As asked for, or since the network is to be built anew."""
    for options in ({"frozen": True}, {"model": {"class_path": "somewhere.LoRA"}}):
        save_posterior(on_base, tmp_path, **options)
        loaded = load_posterior(tmp_path, lora(seed=1))
        x, _ = data("classification")
        assert torch.equal(loaded.output_distribution(x)[0], on_base.output_distribution(x)[0])
