"""A posterior comes back from its folder to the bit, and damage to it is found."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

from kfac_backend.options import CurvatureOptions
from marglik import KronLaplace
from marglik.posterior import posterior_file
from marglik.posterior.posterior import Posterior
from marglik.posterior.posterior_file import load_posterior, save_posterior
from marglik.storage import record_file
from marglik.storage.record_file import read_posterior, write_record
from marglik.storage.run_files import POSTERIOR
from tests.marglik.posteriors import CASES, data, fitted, network, predictions

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = (POSTERIOR, "posterior.safetensors", "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    save_posterior(fitted(), tmp_path, model={"class_path": "torch.nn.Linear"}, data={"name": "d"})
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    laplace = fitted(**CASES[case])
    save_posterior(laplace, tmp_path / "run", frozen=True)
    model = network(next(laplace.model.parameters()).dtype, seed=5)  # other parameters
    loaded = load_posterior(tmp_path / "run", model)

    x, _ = data(laplace.likelihood, laplace.mean.dtype)
    after = predictions(loaded, x)
    for method, prediction in predictions(laplace, x).items():
        for part in ("mean", "aleatoric", "epistemic"):
            assert torch.equal(getattr(prediction, part), getattr(after[method], part)), method
    assert torch.equal(loaded.log_marginal_likelihood(), laplace.log_marginal_likelihood())
    assert torch.equal(loaded.log_likelihood, laplace.log_likelihood)
    assert torch.equal(loaded.effective_parameters(), laplace.effective_parameters())
    assert torch.equal(loaded.mean, laplace.mean)
    tensors = len(laplace.factors.blocks)
    assert torch.equal(loaded.prior_precision, laplace.prior_precision.expand(tensors))
    for name in ("likelihood", "sigma_noise", "prior_mean", "temperature", "damping", "n_data"):
        assert getattr(loaded, name) == getattr(laplace, name), name
    for name in ("options", "num_loss_terms", "loss"):
        assert getattr(loaded.factors, name) == getattr(laplace.factors, name), name
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in laplace.model.parameters()
    ]


@pytest.mark.parametrize("case", [case for case in CASES if case != "classification"])
def test_every_case_predicts_otherwise(case):
    """Negative control of the round trip: none of the cases' options could get lost unnoticed."""
    options = CASES[case]
    laplace = fitted(**options)
    x, _ = data(laplace.likelihood, laplace.mean.dtype)
    plain = fitted(laplace.likelihood) if len(options) > 1 else fitted()
    before, after = (predictions(la, x.to(la.mean))["mc"] for la in (plain, laplace))
    if case == "prior mean":  # it moves the evidence alone
        assert plain.log_marginal_likelihood() != laplace.log_marginal_likelihood()
        return
    assert not all(
        torch.equal(getattr(before, part), getattr(after, part).float())
        for part in ("mean", "aleatoric", "epistemic")
    )


def test_a_loaded_posterior_can_be_saved_and_adapted(folder, tmp_path):
    first = load_posterior(folder, network())
    save_posterior(first, tmp_path / "again")
    second = load_posterior(tmp_path / "again", network())
    for laplace in (first, second):
        laplace.prior_precision = 40.0
    assert torch.equal(first.log_marginal_likelihood(), second.log_marginal_likelihood())
    second.fit([data("classification")], override=False)
    assert second.n_data == 2 * first.n_data


@pytest.mark.parametrize("case", ["expand", "empirical Fisher", "Monte Carlo Fisher", "rank"])
def test_a_loaded_posterior_is_fitted_anew_as_before(case, tmp_path):
    rank = {"backend_kwargs": {"rank_tolerance": 0.6}}
    laplace = fitted(**(rank if case == "rank" else CASES[case]))
    save_posterior(laplace, tmp_path)
    loaded = load_posterior(tmp_path, network())
    torch.manual_seed(2)
    loaded.fit([data("classification")])
    assert torch.equal(loaded.log_marginal_likelihood(), laplace.log_marginal_likelihood())
    torch.manual_seed(2)
    plain = fitted()  # Negative control: the options matter.
    assert loaded.log_marginal_likelihood() != plain.log_marginal_likelihood()


OPTIONS = {
    "kfac_approx": {"0": "expand", "*": "reduce"},
    "rank_tolerance": 0.6,
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
    for name in ("kfac_approx", "rank_tolerance"):
        other, _ = with_options(**{k: v for k, v in OPTIONS.items() if k != name})
        assert other.log_marginal_likelihood() != laplace.log_marginal_likelihood()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("likelihood", None),
        ("likelihood", "poisson"),
        ("damping", "yes"),
        ("sigma_noise", "one"),
        ("temperature", math.nan),
        ("prior_mean", math.nan),
        ("prior_mean", None),
        ("prior_precision", {"0.weight": math.nan}),
        ("prior_precision", [1.0]),
        ("curvature", {"kfac_approx": "both"}),
        ("curvature", {"mode": "expand"}),
        ("calibrations", {"Laplace, probit": {}}),
    ],
)
def test_records_whose_sums_are_right_but_not_their_values(name, value, folder):
    """One clear error, and the network is as it was."""
    record = read_posterior(folder)
    sums = {file: record["sha256"][file] for file in FILES[1:]}
    wrong = {key: v for key, v in record.items() if (key, value) != (name, None)}
    wrong |= {} if value is None else {name: value}
    write_record(folder / POSTERIOR, wrong, sums)
    model = network(seed=5)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"posterior\.json in .* is damaged: .*Fit again"):
        load_posterior(folder, model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    write_record(folder / POSTERIOR, record, sums)  # the control
    load_posterior(folder, model)


def test_the_record_says_what_a_reader_needs(folder):
    record = read_posterior(folder)
    laplace = fitted()
    assert record["likelihood"] == "classification"
    assert (record["num_data"], record["num_outputs"]) == (10, 3)
    assert record["parameters"] == {n: p.numel() for n, p in laplace.model.named_parameters()}
    assert record["evidence"] == pytest.approx(float(laplace.log_marginal_likelihood()))
    assert sum(record["effective_parameters"].values()) == pytest.approx(
        float(laplace.effective_parameters().sum())
    )
    assert record["model"] == {"class_path": "torch.nn.Linear"}
    assert record["data"] == {"name": "d"}
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 7, -1])
def test_truncated_files(name, size, folder):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:size])
    if name == POSTERIOR and size == -1:  # the last byte is a line's end
        (folder / name).write_bytes(content[:-2])
    with pytest.raises(ValueError, match=f"{name} is not .*altered"):
        load_posterior(folder, network())


@pytest.mark.parametrize("name", FILES)
def test_any_byte_that_is_altered(name, folder):
    content, record, unnoticed = (folder / name).read_bytes(), read_posterior(folder), 0
    step = 3 if name == POSTERIOR else len(content) // 40
    for position in range(0, len(content), step):
        altered = bytearray(content)
        altered[position] ^= 1
        (folder / name).write_bytes(altered)
        try:
            # The last of a number's digits may stand for the same float64.
            assert read_posterior(folder) == record
            unnoticed += 1
        except ValueError as error:
            assert any(way in str(error) for way in ("Fit again", "update", "make one with"))
    assert unnoticed <= (5 if name == POSTERIOR else 0)


@pytest.mark.parametrize("name", FILES)
def test_missing_files(name, folder):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_posterior(folder, network())


def test_files_of_another_run(folder, tmp_path):
    save_posterior(fitted(prior_precision=2.0, temperature=0.5), tmp_path / "other")
    torch.manual_seed(9)
    other = tmp_path / "other" / "model.safetensors"
    other.replace(folder / "model.safetensors")
    load_posterior(folder, network())  # the same network: nothing is wrong
    save_posterior(fitted("regression"), tmp_path / "other")
    (tmp_path / "other" / "posterior.safetensors").replace(folder / "posterior.safetensors")
    with pytest.raises(ValueError, match="posterior.safetensors is not the one .*from another run"):
        load_posterior(folder, network())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "marglik.posterior", "version": 2}', "version 2, this release reads up to 1;"),
        ('{"format": "marglik.posterior", "version": 1}', "was altered"),
        ('{"format": "marglik.evaluation", "version": 1}', "describes no posterior"),
        ('{"format": ', "is not JSON"),
    ],
)
def test_other_json(content, message, folder):
    """What is no JSON at all is looked at in the tests of checkpoints."""
    (folder / POSTERIOR).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_posterior(folder)


class Bigger(nn.Sequential):
    def __init__(self):
        super().__init__(*network(), nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "it lacks '1.weight', which Sequential"),
        (network()[:4].append(nn.Linear(12, 4)), "'4.weight' has shape \\(3, 12\\), Sequential"),
        (Bigger(), "it lacks '5.weight', which Bigger has"),
        (network()[:1], "Sequential has no '4.bias'"),
        (
            network(torch.float64),
            "in torch.float32, .* in torch.float64; pass .*to\\(torch.float32",
        ),
    ],
)
def test_another_network(model, message, folder):
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        load_posterior(folder, model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("stage", ["factors", "model", "record"])
@pytest.mark.parametrize("old", [False, True])
def test_an_interrupted_save_is_no_posterior(stage, old, tmp_path, monkeypatch):
    if old:
        save_posterior(fitted(), tmp_path)
    laplace = fitted("regression")

    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if stage == "factors":
            patched.setattr("kfac_backend.blocks.kronecker.write_tensors", interrupted)
        elif stage == "model":
            patched.setattr(posterior_file, "write_tensors", interrupted)
        else:
            patched.setattr(record_file, "write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_posterior(laplace, tmp_path)
    assert not (tmp_path / POSTERIOR).exists()
    assert {path.name for path in tmp_path.iterdir()} <= set(FILES)  # nothing half-written
    with pytest.raises(FileNotFoundError, match="No posterior in"):
        load_posterior(tmp_path, network())
    save_posterior(laplace, tmp_path)
    assert load_posterior(tmp_path, network()).likelihood == "regression"


def not_fitted():
    return KronLaplace(network(), "classification")


def vector_mean():
    return fitted(prior_mean=torch.zeros(69))


def trained_on():
    laplace = fitted()
    with torch.no_grad():
        laplace.model[0].bias[0] += 1e-3
    return laplace


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        pass


def extra_state():
    laplace = KronLaplace(nn.Sequential(nn.Flatten(), WithExtraState(16, 3)), "classification")
    laplace.fit([data("classification")])
    return laplace


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (extra_state, ValueError, "'1._extra_state' in the state dict of Sequential is a dict"),
        (not_fitted, AttributeError, "call fit\\(\\) first"),
        (vector_mean, ValueError, "has 69 entries; a saved posterior has one number"),
        (trained_on, ValueError, "no longer those that the posterior was fitted at"),
    ],
)
def test_what_cannot_be_saved_leaves_the_old_posterior(make, error, message, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(error, match=message):
        save_posterior(make(), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_json_does_not_know_leaves_the_old_posterior(folder):
    with pytest.raises(TypeError, match="JSON"):
        save_posterior(fitted("regression"), folder, data={"path": folder})
    assert load_posterior(folder, network()).likelihood == "classification"


def test_a_device_is_taken(folder):
    loaded = load_posterior(str(folder), network(), "cpu")
    assert loaded.mean.device == torch.device("cpu")
    assert_close(loaded.mean, fitted().mean)
    assert json.loads((folder / POSTERIOR).read_text())["device"].startswith("cpu")


def lora(rank=2, seed=0):
    """A frozen base, some of it tied, under small trainable layers; one buffer."""
    torch.manual_seed(seed)

    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(16, 16).requires_grad_(False)
            self.again = self.base
            self.down, self.up = nn.Linear(16, rank, bias=False), nn.Linear(rank, 16, bias=False)
            self.head = nn.Linear(16, 3)
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, x):
            x = x.flatten(1)
            return self.head(self.again(x) + self.scale * self.up(self.down(x)))

    return LoRA()


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
    loaded = load_posterior(tmp_path, model)
    x, _ = data("classification")
    for method, prediction in predictions(on_base, x).items():
        assert torch.equal(predictions(loaded, x, [method])[method].mean, prediction.mean)
    assert torch.equal(loaded.log_marginal_likelihood(), on_base.log_marginal_likelihood())
    assert not model.base.weight.requires_grad and model.down.weight.requires_grad


@pytest.mark.parametrize("change", ["another", "one bit", "dtype"])
def test_another_base_is_refused_and_the_network_not_touched(change, on_base, tmp_path):
    save_posterior(on_base, tmp_path)
    model = lora(seed=1)
    if change != "another":
        model.base.load_state_dict(on_base.model.base.state_dict())
    if change == "one bit":
        model.base.weight.data.view(torch.int32)[3, 4] ^= 1
    if change == "dtype":
        model.base.double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="Load the same pretrained parameters first"):
        load_posterior(tmp_path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_base_that_is_saved_too(on_base, tmp_path):
    """As asked for, or since the network is to be built anew."""
    for options in ({"frozen": True}, {"model": {"class_path": "somewhere.LoRA"}}):
        save_posterior(on_base, tmp_path, **options)
        loaded = load_posterior(tmp_path, lora(seed=1))
        x, _ = data("classification")
        assert torch.equal(loaded.output_distribution(x)[0], on_base.output_distribution(x)[0])


def test_a_network_of_other_adapters(on_base, tmp_path):
    save_posterior(on_base, tmp_path)
    with pytest.raises(ValueError, match="'down.weight' has shape \\(2, 16\\)"):
        load_posterior(tmp_path, lora(rank=3))
    with pytest.raises(ValueError, match="of another network: Sequential has no 'down.weight'"):
        load_posterior(tmp_path, network())
