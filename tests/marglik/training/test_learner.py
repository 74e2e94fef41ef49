"""`PriorLearner`: the average of its steps, what it says, its state and its options."""

import warnings
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend.likelihoods import Classification
from marglik import (
    Hyperparameters,
    Posterior,
    PriorGroups,
    PriorLearner,
    update_prior,
)
from marglik.prediction.calibration import HeldOut, scaled_loss
from marglik.training import algorithm
from marglik.training import average as average_module
from marglik.training.state import WeightAverage
from tests.marglik.callbacks.online import (
    EPOCHS,
    LR,
    OPTIONS,
    dataset,
    loader,
    network,
    sgd,
)
from tests.marglik.plain_loop import learn
from tests.marglik.states import same

pytestmark = pytest.mark.usefixtures("one_thread")


def with_norm():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.3), nn.ReLU(), nn.Linear(6, 3)
    ).double()


def in_double(size=10):
    x, y = dataset().tensors
    return DataLoader(TensorDataset(x.double(), y), size)


def mean_of(steps):
    """The average of each parameter over its steps i = 1, 2, ..., with weights i(i+1)(i+2)(i+3)."""
    i = torch.arange(1, len(steps) + 1, dtype=torch.float64)
    weights = i * (i + 1) * (i + 2) * (i + 3)
    weights /= weights.sum()
    return [torch.tensordot(weights, torch.stack(p).double(), 1) for p in zip(*steps, strict=True)]


def test_training_ends_at_the_average_of_the_steps():
    """And with BatchNorm's statistics, posterior and evidence at it; by brute force."""
    model, steps, data = with_norm(), [], in_double()
    prior = PriorLearner("classification")

    def look():
        steps.append([p.detach().clone() for p in model.parameters()])

    learn(model, sgd(model), prior, data, 6, after_step=look)
    for i, (p, mean) in enumerate(zip(model.parameters(), mean_of(steps), strict=True)):
        assert_close(p, mean, rtol=1e-12, atol=1e-14)
        others = [steps[-1], *([at[i] for at in steps[k:]] for k in (0, 2 * len(steps) // 3))]
        # Negative controls: not the last step's, nor the mean of all or of the last third.
        assert (p - others[0][i]).abs().max() > 1e-4
        assert all((p - torch.stack(some).mean(0)).abs().max() > 1e-4 for some in others[1:])
    first = [model[0](x) for x, _ in data]
    norm = model[1]
    assert_close(norm.running_mean, torch.stack([a.mean(0) for a in first]).mean(0))
    assert_close(norm.running_var, torch.stack([a.var(0) for a in first]).mean(0))
    assert norm.momentum == 0.3
    posterior = prior.posterior
    assert torch.equal(
        posterior.mean, torch.cat([p.detach().flatten() for p in model.parameters()])
    )
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(prior.evidences[-1])


def test_the_average_of_parameters_in_bfloat16_is_in_float32():
    """There the sum would stand still: the factor goes to zero."""
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    average, sums, steps = WeightAverage([p]), torch.ones(3, dtype=torch.bfloat16), []
    for t in range(1, 2001):
        average.begin_step()
        p.data.fill_(1 + t / 2000)
        steps.append([p.detach().clone()])
        sums += 5 / (t + 4) * (p.detach() - sums)
    average.include_latest()
    (expected,) = mean_of(steps)
    assert_close(average.values[0].double(), expected, rtol=1e-5, atol=0)
    assert ((sums - expected).abs() > 0.02 * expected).all()  # negative control
    average.write()
    assert torch.equal(p, expected.to(torch.bfloat16))
    restored = WeightAverage([p])
    restored.load_state_dict(average.state_dict())
    assert same(restored.state_dict(), average.state_dict())


@pytest.mark.parametrize("options", [{"size": 30}, {"steps_per_epoch": 1}])
def test_a_full_batch_has_no_average(options):
    """It has no gradient noise, and an average lags behind."""
    model, data, prior = (
        with_norm(),
        in_double(options.pop("size", 10)),
        PriorLearner("classification"),
    )
    prior.start(model, optimizer := sgd(model), data, 6, **options)
    for _ in range(6):
        optimizer.zero_grad()
        for x, y in data:
            (cross_entropy(model(x), y) / len(data)).backward()
        optimizer.step()
    before = deepcopy(model.state_dict())
    with prior.averaged():
        assert same(model.state_dict(), before)
    prior.finish()
    assert same(model.state_dict(), before) and prior.state.epoch == 6


def test_statistics_that_training_left_alone_stay():
    """Of a frozen network's BatchNorm in eval mode, at the end and within the training."""
    torch.manual_seed(0)
    body, head = with_norm()[:3], nn.Linear(6, 3).double()
    body.eval().requires_grad_(False)
    model, data, prior = nn.Sequential(body, head), in_double(), PriorLearner("classification")
    own = nn.Sequential(body, nn.Sequential(head, nn.BatchNorm1d(3).double()))
    for network_, renewed in ((model, False), (own, True)):
        before = deepcopy(body[1].state_dict())
        optimizer = torch.optim.SGD([p for p in network_.parameters() if p.requires_grad], 0.1)
        prior.start(network_, optimizer, data, 3)
        for _ in range(3):
            for x, y in data:
                optimizer.zero_grad()
                cross_entropy(network_(x), y).backward()
                optimizer.step()
        trained = deepcopy(own[1][1].running_mean)
        with prior.averaged():
            assert same(body[1].state_dict(), before)
        prior.finish()
        assert same(body[1].state_dict(), before)
        assert torch.equal(own[1][1].running_mean, trained) != renewed


def test_the_average_so_far_is_validated_and_the_training_goes_on_as_without():
    """By brute force after each step, with BatchNorm's statistics; restored after errors, too."""
    ends = []
    for validates in (True, False):
        model, seen, prior = with_norm(), [], PriorLearner("classification")
        data = DataLoader(in_double().dataset, 10, shuffle=True)

        def look():
            seen.append([p.detach().clone() for p in model.parameters()])  # noqa: B023
            before = deepcopy(model.state_dict())  # noqa: B023
            with pytest.raises(KeyError), prior.averaged() as averaged:  # noqa: B023
                assert averaged is model  # noqa: B023
                with prior.averaged():  # noqa: B023  # within itself it changes nothing
                    pass
                for p, mean in zip(model.parameters(), mean_of(seen), strict=True):  # noqa: B023
                    assert_close(p, mean, rtol=1e-12, atol=1e-12)
                first = model[0](data.dataset.tensors[0]).mean(0)  # noqa: B023
                assert_close(model[1].running_mean, first)  # noqa: B023
                raise KeyError
            for name, value in model.state_dict().items():  # noqa: B023
                assert torch.equal(value, before[name]), name

        torch.manual_seed(5)
        learn(model, sgd(model), prior, data, 6, after_step=look if validates else lambda: None)
        ends.append((prior.weight_decays(), prior.evidences, [*model.parameters()]))
    assert_close(ends[0], ends[1], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Call start before averaged"):
        with PriorLearner("classification").averaged():
            pass


class Centred(nn.Module):
    """Subtracts a running mean, which it changes in place, or assigns."""

    def __init__(self, in_place):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.in_place = in_place

    def forward(self, x):
        if self.training:
            mean = self.mean.lerp(x.detach().mean(0), 0.1)
            self.mean = self.mean.copy_(mean) if self.in_place else mean
        return x - self.mean


def test_buffers_that_cannot_change_in_place_are_left_alone():
    model, prior, number = nn.Sequential(*with_norm()), PriorLearner("classification"), []
    model.register_buffer("expanded", torch.zeros(1, 1).expand(4, 3))
    with torch.inference_mode():
        model.register_buffer("of_inference", torch.zeros(2))

    def validate():
        with prior.averaged():
            number.append(1)

    learn(model, sgd(model), prior, in_double(), 2, after_step=validate)
    assert number
    assert model.expanded.stride() == (0, 0) and model.of_inference.is_inference()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_validation_leaves_all_buffers_as_they_were(in_place):
    ends = []
    for validates in (True, False):
        model, prior = nn.Sequential(*with_norm(), Centred(in_place)), PriorLearner("regression")
        model[-2] = nn.Linear(6, 6).double()
        data = [(x, torch.cat([x, x[:, :2]], 1)) for x, _ in in_double()]

        def look(validates=validates, prior=prior):
            if validates:
                with prior.averaged():
                    pass

        learn(model, sgd(model), prior, data, 3, loss=nn.functional.mse_loss, after_step=look)
        ends.append({**model.state_dict()})
    assert same(*ends)


def test_batch_norm_is_renewed_from_a_sample_within_the_training(monkeypatch):
    """And from all data at its end."""
    monkeypatch.setattr(average_module, "FEW_EXAMPLES", 12)
    model, data, prior = with_norm(), in_double(), PriorLearner("classification")
    prior.start(model, optimizer := sgd(model), data, 2)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad(), prior.averaged():
        first = model[0](data.dataset.tensors[0])
        of_sample = model[1].running_mean.clone()
        # The mean over some 12 of the 30 examples: near, but not theirs.
        assert 1e-3 < (of_sample - first.mean(0)).abs().max() < first.std(0).max()
    prior.finish()
    assert_close(model[1].running_mean, model[0](data.dataset.tensors[0]).mean(0).detach())


def test_early_stopping_ends_with_the_network_that_was_validated_best():
    """As docs/training-loops.md writes it; the loop ends by itself; finish keeps the network."""
    torch.manual_seed(0)
    x, y = torch.randn(80, 4).double(), torch.randint(3, (80,))
    y[:40] = x[:40, :3].argmax(1)
    data = DataLoader(TensorDataset(x[20:60], y[20:60]), 10, shuffle=True)
    held_out = [(x[:10], y[:10]), (x[10:20], y[10:20])]
    model, prior = with_norm(), PriorLearner("classification")
    prior.start(model, optimizer := sgd(model), data)
    losses, raw_losses, waited = [], [], 0
    while waited < 4:
        for x_batch, y_batch in data:
            optimizer.zero_grad()
            cross_entropy(model.train()(x_batch), y_batch).backward()
            optimizer.step()
        with prior.averaged(), torch.no_grad():
            losses.append(prior.validation_loss(held_out))
            f = model.eval()(x[:20])
            raw_losses.append(cross_entropy(f, y[:20]).item())
            waited = 0 if losses[-1] == min(losses) else waited + 1
            state = state if waited else deepcopy(model.state_dict())
        assert losses[-1] == prior.validation_loss(held_out)  # of the average, within it or not
        no_spread = torch.zeros_like(f)[:, None]
        data_of_average = HeldOut(Classification(), f, no_spread, y[:20], is_sampled=True)
        assert losses[-1] == pytest.approx(scaled_loss(data_of_average), abs=1e-6)
    assert len(losses) > 5 and losses.index(min(losses)) == len(losses) - 5
    assert raw_losses[-1] > losses[-1]
    model.load_state_dict(state)
    assert prior.finish()["averaged"] == 0
    assert same(model.state_dict(), state)
    assert prior.validation_loss(held_out) == min(losses)
    prior.posterior.check_weights()
    with pytest.raises(RuntimeError, match="Call start before validation_loss"):
        PriorLearner("classification").validation_loss(held_out)
    with pytest.raises(TypeError, match="list_iterator, which can be read only once"):
        prior.validation_loss(iter(held_out))


@pytest.mark.parametrize(("epochs", "fisher"), [(6, "random_signs"), (60, "exact")])
def test_updates_estimate_the_curvature_where_exact_passes_would_take_longer_than_the_training(
    epochs, fisher, monkeypatch
):
    """Twenty updates of V = 2 backward passes cost 100 epochs' thirds; there are 18, or 180."""
    model, fishers = network(), []
    real = algorithm.update_prior

    def noted(hyperparameters, posterior, *arguments, **keywords):
        fishers.append(posterior.options.fisher)
        return real(hyperparameters, posterior, *arguments, **keywords)

    monkeypatch.setattr(algorithm, "update_prior", noted)
    learn(model, sgd(model), PriorLearner("classification", updates=20), loader(), epochs)
    assert fishers[-1] == "exact"
    assert set(fishers[:-1]) == {fisher}


def test_the_end_repeats_an_estimated_update_exactly_and_counts_it_once():
    """At the same parameters it replaces curvature and evidence, and moves no decay."""
    model, prior = network(), PriorLearner("classification", every=1, average=None)
    prior.start(model, optimizer := sgd(model), loader())
    for x, y in [*loader()] * 3:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    decays, estimate = prior.weight_decays(), prior.evidences[-1]
    assert prior.posterior.options.fisher == "random_signs"
    prior.finish()
    assert prior.posterior.options.fisher == "exact" and torch.equal(prior.weight_decays(), decays)
    assert len(prior.evidences) == 3 and prior.evidences[-1] != estimate


def test_update_prior_by_hand():
    """Bounded steps from the evidence at the present parameters; the posterior gets the values."""
    model, data = network(), in_double()
    model.double()
    hyper = Hyperparameters(PriorGroups.from_model(model), 1.0)
    laplace = Posterior(model, "classification", prior_precision=1.0)
    evidences, record = update_prior(hyper, laplace, data, steps=4)
    assert len(evidences) == 5 and evidences[-1] > evidences[0] == record["evidence_before"]
    assert torch.equal(laplace.prior_precision, hyper.prior_precision)
    assert hyper.prior_precision.log().abs().max() < 0.4 + 1e-6
    assert record["weight_decay"]["0.weight"] == hyper.prior_precision[0] / 30
    with pytest.raises(ValueError, match="read 30 examples, but the loader's length promises 31"):
        update_prior(hyper, laplace, data, 31)


# --- what it says ---


def test_weights_before_a_normalisation_are_named_once(caplog):
    caplog.set_level("INFO", "marglik.training")
    model, plain = with_norm(), network()
    learn(plain, sgd(plain), PriorLearner("classification"), loader(), EPOCHS)
    assert "the length of" not in caplog.text
    learn(model, sgd(model), PriorLearner("classification"), in_double(), EPOCHS)
    assert caplog.text.count("the length of 0.weight, because") == 1


def test_training_limits_the_decay_of_weights_before_a_normalisation():
    """Of those alone, and only of decays that were learned."""
    for norm in (nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Identity()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 3)).double()
        prior = PriorLearner("classification", weight_decay=0.4, steps=1)
        prior.start(model, optimizer := sgd(model), in_double(), 9)
        used = []
        for _ in range(6):
            for x, y in in_double():
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
            used.append(prior.state.decays[0])
        learned = prior.weight_decays()[0].item()
        assert learned > 0.2 and used[0] > 0.2  # three steps are not enough to know
        assert used[-1] == (learned if isinstance(norm, nn.Identity) else 0.1)
        assert prior.state.decays[-2] == prior.weight_decays()[-2].item()


def test_an_evidence_that_fell_is_named():
    """Not of a training that went well, until the network is another than it was."""

    def warnings_of(run):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        texts = [str(warning.message) for warning in caught]
        return [text for text in texts if "per example fell" in text]

    model, prior = network(), PriorLearner("classification")
    assert warnings_of(lambda: learn(model, sgd(model), prior, loader(), 90)) == []
    with torch.no_grad():
        model[-1].weight.neg_()
    (text,) = warnings_of(prior.finish)
    best, last = (e / prior.problem.num_data for e in (max(prior.evidences), prior.evidences[-1]))
    assert last < best - 0.02 and f"evidence per example fell from {best:.3f} to {last:.3f}" in text


# --- its state ---


def test_a_state_that_is_not_whole_or_of_another_precision_is_refused():
    """One error that says what is missing, or what differs."""
    model = network()
    first = PriorLearner("classification", average="last")
    learn(model, sgd(model), first, loader(), EPOCHS)
    state = first.state_dict()
    second = PriorLearner("classification", average="last")
    with pytest.raises(ValueError, match="PriorLearner lacks 'identity', 'part', 'hyper"):
        second.load_state_dict({})
    for key in state:
        with pytest.raises(ValueError, match=f"PriorLearner lacks '{key}'"):
            second.load_state_dict({name: of for name, of in state.items() if name != key})
    # A state that an earlier version wrote, without a measurement that it did not have.
    earlier = {name: of for name, of in state["measures"].items() if name != "log_factor"}
    with pytest.raises(ValueError, match=r"measures lacks 'log_factor'\. Another version wrote it"):
        second.load_state_dict(state | {"measures": earlier})
    second.load_state_dict(state)  # the control
    second.start(model, sgd(model), loader(), EPOCHS)

    other = PriorLearner("classification", average="last", hessian_structure="full")
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="hessian_structure is 'kron' there"):
        other.start(model, sgd(model), loader(), EPOCHS)

    third = PriorLearner("classification", average="last")
    third.load_state_dict(state)
    double, (x, y) = network().double(), dataset().tensors
    with pytest.raises(ValueError, match=r"'0.weight' is .*float32' there and .*float64' h"):
        third.start(double, sgd(double), DataLoader(TensorDataset(x.double(), y), 8), EPOCHS)
    doubles = [p.detach().double() for p in model.parameters()]
    cast = {"values": doubles, "count": 1, "has_latest": True}
    third.load_state_dict({**state, "averages": [cast]})
    with pytest.raises(ValueError, match=r"averages are in torch.float64, but .* in torch.float32"):
        third.start(model, sgd(model), loader(), EPOCHS)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"method": "mackay"}, "method is 'adam' there and 'mackay' here"),
        ({"structure": "scalar"}, "groups"),
        ({"temperature": 0.5}, "temperature is 1.0 there and 0.5 here"),
        ({"average": None}, "average is 'last' there and None here"),
    ],
)
def test_a_state_of_other_options_is_refused(options, word):
    model = network()
    first = PriorLearner("classification", average="last")
    learn(model, sgd(model), first, loader(), EPOCHS)
    second = PriorLearner("classification", **options)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=word):
        second.start(model, sgd(model), loader(), EPOCHS)
    third = PriorLearner("classification")
    third.load_state_dict(first.state_dict())
    third.start(model, sgd(model), loader(), EPOCHS + 1)  # more epochs are no other run
    assert torch.equal(third.weight_decays(), first.weight_decays())


# --- several loss terms ---

R = 3
"""Loss terms of each example."""


def decays_of_a_tagger(lr, loss_of_terms, loss_scale=1.0):
    """Weight decays that are learned where each example has R labels."""
    x = torch.randn(24, R, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, x[..., :3].argmax(-1)), 8)
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    options = {**OPTIONS, "weight_decay": 1.0, "loss_mean_over": "terms", "loss_scale": loss_scale}
    prior = PriorLearner("classification", **options)

    def loss(f, y):
        return loss_of_terms(cross_entropy(f.flatten(0, 1), y.flatten(), reduction="none"))

    return learn(model, optimizer, prior, data, EPOCHS, loss=loss).weight_decays()


def test_a_sum_over_terms_has_the_decays_of_their_mean():
    """Its gradients are R times those of the mean, the prior's too, if loss_scale says so."""
    expected = decays_of_a_tagger(LR, torch.mean)
    assert_close(decays_of_a_tagger(LR / R, lambda terms: terms.sum() / 8, R), expected)
    # Negative control: the scale left out.
    wrong = decays_of_a_tagger(LR / R, lambda terms: terms.sum() / 8)
    assert ((wrong - expected).abs() > 0.1 * expected).any()


def test_a_mean_over_terms_divides_the_priors_gradient_by_their_number():
    x = torch.randn(24, R, 4)
    data = DataLoader(TensorDataset(x, x[..., :3].argmax(-1)), 8)
    model, prior = (
        network(),
        PriorLearner("classification", weight_decay=0.6, loss_mean_over="terms"),
    )
    prior.start(model, sgd(model), data, 2, hooks="none")
    algorithm.penalty(prior.problem, prior.state)
    for p in model.parameters():
        assert_close(p.grad, 0.6 / R * p)


def test_several_terms_are_asked_for_before_anything_is_done():
    x = torch.randn(24, R, 4)
    data = DataLoader(TensorDataset(x, x[..., :3].argmax(-1)), 8)
    model = network()
    with pytest.raises(ValueError, match="3 loss terms each.*loss_mean_over='terms'"):
        PriorLearner("classification").start(model, sgd(model), data)
    with pytest.raises(ValueError, match="loss_mean_over='batch' is not supported"):
        PriorLearner("classification", loss_mean_over="batch")
    with pytest.raises(ValueError, match="learn_sigma_noise=True needs likelihood 'regression'"):
        PriorLearner("classification", learn_sigma_noise=True)


@pytest.mark.parametrize(
    ("options", "expected", "learns"),
    [
        ({}, 0.1, True),
        ({"sigma_noise": 0.3}, 0.3, False),
        ({"learn_sigma_noise": False}, 1.0, False),
        ({"learn_sigma_noise": True, "sigma_noise": 0.3}, 0.3, True),
        ({"updates": 0}, 1.0, False),
        ({"burn_in": 9, "epochs": 5}, 1.0, False),
    ],
)
def test_the_noise_of_regression_is_learned_unless_it_is_given(options, expected, learns):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :1] + 0.1 * torch.randn(60, 1, generator=torch.Generator().manual_seed(1))
    model, prior = nn.Linear(4, 1), PriorLearner("regression", **options)
    prior.start(model, sgd(model), [(x, y)], 5)
    assert float(prior.state.hyperparameters.sigma_noise) == pytest.approx(expected)
    assert prior.state.hyperparameters.learn_sigma_noise == learns


def test_keywords_are_options_of_the_schedule_or_the_curvature():
    x, y = dataset().tensors
    model, data = network(), [{"input": x, "target": y}]
    prior = PriorLearner("classification", dict_key_y="target", kfac_approx="reduce", every=1)
    assert prior.options.curvature.kfac_approx == "reduce" and prior.options.schedule.every == 1
    prior.start(model := ByKey(model), sgd(model), data, 2)
    assert prior.problem.num_data == len(x)
    with pytest.raises(TypeError, match="'dict_key' is not an option.*every.*dict_key_y"):
        PriorLearner("classification", dict_key="target")
    with pytest.raises(ValueError, match="kfac_approx='both'"):
        PriorLearner("classification", kfac_approx="both")


class ByKey(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, batch):
        return self.net(batch["input"])


START = {
    "SGD": ({}, 1e-2),
    "Adam": ({"optimizer": torch.optim.Adam}, 5e-4),
    "your own decay": ({"weight_decay": 1e-3}, 1e-3),
    "no update": ({"updates": 0}, 5e-4),
    "one decay for all": ({"structure": "scalar"}, 5e-4),
    "long until the first update": ({"every": 500}, 0.5 / (500 * 5 * 0.1)),
    "very long": ({"every": 3000}, 5e-4),
}


@pytest.mark.parametrize("name", START)
def test_decays_come_down_from_a_high_start(name):
    """Those of weights whose length matters, where updates come soon enough."""
    options, expected = dict(START[name][0]), START[name][1]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)
    )  # fmt: skip
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    prior = PriorLearner("classification", **options)
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]
    prior.start(model, optimizer, batches, 4000 if "long" in name else 20, hooks="none")
    for step in range(10):
        assert prior.weight_decays().max() <= max(5e-4, options.get("weight_decay", 0)) + 1e-12
        optimizer.zero_grad()
        cross_entropy(model(batches[step % 5][0]), batches[step % 5][1]).backward()
        algorithm.penalty(prior.problem, prior.state)
        optimizer.step()
    groups = prior.state.hyperparameters.groups
    found = dict(zip(groups.names, prior.weight_decays().tolist(), strict=True))
    assert found.get("3.weight", found.get("all")) == pytest.approx(expected)
    for other in found.keys() - {"3.weight"}:  # invariant to scale, or a vector
        assert found[other] == pytest.approx(options.get("weight_decay", 5e-4))
