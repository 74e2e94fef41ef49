"""The share of wrong labels is learned, from held-out labels or the training's own, and kept."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend.likelihoods import likelihood_of
from marglik import OnlineTraining, PriorLearner
from marglik.prediction.calibration import HeldOut, fit_sharpness
from marglik.prediction.ensemble import Ensemble
from marglik.storage.checkpoint import Checkpoints
from marglik.training import learned_numbers
from marglik.training.learned_numbers import learn_label_noise

pytestmark = pytest.mark.usefixtures("one_thread")

NOISY = "noisy_classification"


def data(N=300, wrong=0.2, seed=0):
    """Three clusters; a share of their labels is changed to another class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (N,), generator=generator)
    spread = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    x = 3 * nn.functional.one_hot(y, 3) + 0.5 * spread
    change = torch.rand(N, generator=generator) < wrong
    shift = torch.randint(1, 3, (N,), generator=generator)
    return x, torch.where(change, (y + shift) % 3, y)


OWN = object()
"""Held-out labels as wrong as those of training."""


def trained(wrong=0.2, on_record=None, checkpoints=None, likelihood=NOISY, every=4, held_out=OWN):
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    loader = DataLoader(TensorDataset(*data(wrong=wrong)), 50)
    learner = PriorLearner(likelihood, epochs=12, every=every, steps=2)
    held_out = [data(300, wrong, seed=1)] if held_out is OWN else held_out
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    training = OnlineTraining(
        model, optimizer, loader, learner, held_out=held_out, on_record=on_record
    )
    return training.run(checkpoints)


def test_noise_is_that_of_a_grid_and_near_the_truth():
    """Against all (τ, ε) of a grid, by hand, on the network's own held-out outputs."""
    result = trained()
    noise = result.laplace.likelihood.parameters["noise"].item()
    assert noise == pytest.approx(0.2 * 3 / 2, abs=0.08)
    x, y = data(300, seed=1)
    f = result.laplace.model(x).detach()
    p = torch.softmax(f / torch.logspace(-1, 1, 400).double()[:, None, None], -1)
    own = p.gather(-1, y.expand(400, -1)[..., None]).squeeze(-1)  # (400, N)
    shares = torch.linspace(0, 0.9, 91).double()
    log_q = torch.stack([((1 - e) * own + e / 3).log().sum(1).amax() for e in shares])
    assert noise == pytest.approx(shares[log_q.argmax()].item(), abs=0.03)
    # Negative control: right labels have none. To the bit they are trained as without noise, and so
    # with updates left out. Without τ there would be some.
    clean = trained(wrong=0.0, every=None)
    plain = trained(wrong=0.0, every=None, likelihood="classification")
    assert clean.laplace.likelihood.parameters["noise"] == 0
    assert plain.learner.state.measures.all_left_out
    assert_close(clean.laplace.mean, plain.laplace.mean, rtol=0, atol=0)
    assert_close(clean.laplace.prior_precision, plain.laplace.prior_precision, rtol=0, atol=0)
    blurred = HeldOut(
        likelihood_of("classification"), 0.2 * f, 0 * f[:, None], x.argmax(1), is_sampled=True
    )
    assert fit_sharpness(blurred, scale=0.0).label_noise == 0
    own = torch.softmax(0.2 * f, -1).gather(1, x.argmax(1)[:, None])
    assert ((1 - 0.05) * own + 0.05 / 3).log().sum() < own.log().sum()


def test_an_estimate_does_not_depend_on_the_noise_so_far():
    """The prior towards no noise applies to each."""
    learner, shares = trained().learner, []
    for noise in (0.0, 0.3):
        learner.state.likelihood = learner.state.likelihood.replace(noise=noise)
        held_out = learner.problem.held_out
        shares.append(learned_numbers._noise_of(learner.problem, learner.state, held_out))
    assert shares[0] == shares[1] > 0.1


def noise_of(entry):
    return float(likelihood_of(entry[2]).parameters["noise"])


@pytest.mark.parametrize("held_out", [OWN, None], ids=["held out", "training labels"])
def test_a_resumed_run_and_a_replay_have_the_same_noise(tmp_path, held_out):
    whole = trained(held_out=held_out)

    def stop(record):
        if record["kind"] == "epoch" and record["epoch"] == (6 if held_out is None else 10):
            raise KeyboardInterrupt

    for on_record in (stop, None):
        try:
            checkpoints = Checkpoints(tmp_path, minutes=0)
            resumed = trained(on_record=on_record, checkpoints=checkpoints, held_out=held_out)
        except KeyboardInterrupt:
            pass
    assert resumed.laplace.likelihood == whole.laplace.likelihood
    assert_close(resumed.laplace.mean, whole.laplace.mean, rtol=0, atol=0)
    if held_out is None:
        return
    state = whole.learner.state
    assert [epoch for epoch, _ in state.losses] == [4, 12]  # none in epoch 8, as labels are wrong
    history = state.decay_history
    shares = {text for *_, text in history.values()}
    assert len(shares) > 3  # it moved in the last third of the epochs, and a replay moves with it
    assert all((noise_of(entry) > 0) == (epoch >= 8) for epoch, entry in history.items())
    replayed = whole.learner.replay()
    assert replayed._replayed[0][10][2] == history[10][2]


def test_without_held_out_labels_the_training_labels_show_it(caplog):
    """The largest ε that three epochs in a row show, from the last third on; and a line says so."""
    result = trained(held_out=None)
    assert "without held-out labels" in caplog.text
    shown = [line for line in caplog.messages if "share of random labels of 0.2" in line]
    assert shown == caplog.messages[-1:]
    shown = result.learner.state.shown_noise
    assert len(shown) == 7  # before the last third begins
    noise = result.laplace.likelihood.parameters["noise"].item()
    assert noise == max(map(min, shown, shown[1:], shown[2:]))
    assert noise == pytest.approx(0.3, abs=0.08)
    history = result.learner.state.decay_history
    assert all((noise_of(entry) > 0) == (epoch >= 8) for epoch, entry in history.items())
    # Two epochs of odd errors, as before a network fits, are no sign.
    learner, state = result.learner, result.learner.state
    for shown, expected in (
        ([0.6, 0.6, 0.1, 0.2, 0.0, 0.3], 0.1),
        ([0.6, 0.6, 0.0], 0.0),
        ([0.6], 0.0),
    ):
        state.shown_noise = shown
        learn_label_noise(learner.problem, state)
        assert state.likelihood.parameters["noise"].item() == pytest.approx(expected)
    # Negative control: right labels are trained on as without noise, to the bit. No line says more.
    caplog.clear()
    clean, plain = (
        trained(0.0, likelihood=name, every=None, held_out=None)
        for name in (NOISY, "classification")
    )
    assert clean.laplace.likelihood.parameters["noise"] == 0
    assert_close(clean.laplace.mean, plain.laplace.mean, rtol=0, atol=0)
    trained()  # with held-out labels
    given = trained(likelihood="noisy_classification(noise=0.25)", held_out=None)
    assert "share of random labels" not in caplog.text
    assert given.laplace.likelihood.parameters["noise"] == 0.25


@pytest.mark.parametrize(
    ("shows", "expected"),
    [
        ({}, {}),
        ({8: 0.003, 10: 0.003, 11: 0.003}, {}),  # in no three epochs in a row
        ({7: 0.2, 8: 0.1, 9: 0.3, 10: 0.2, 12: 0.1}, {9: 0.3, 10: 0.2}),
        ({6: 0.2, 7: 0.1, 8: 0.3}, {8: 0.3}),
    ],
)
def test_held_out_labels_show_noise_in_three_epochs_in_a_row(monkeypatch, shows, expected):
    """Of twelve epochs, those from the eighth on are late. Without noise it trains as without."""
    epochs, noises = [], {}
    of_labels = learned_numbers._noise_of

    def noise_of(problem, state, batches):
        assert of_labels(problem, state, batches) >= 0  # draws what it draws
        epochs.append(state.epoch)
        return shows.get(state.epoch, 0.0)

    monkeypatch.setattr(learned_numbers, "_noise_of", noise_of)
    noisy = trained(wrong=0.0, every=None)
    for epoch, (*_, text) in noisy.learner.state.decay_history.items():
        if (noise := float(likelihood_of(text).parameters["noise"])) > 0:
            noises[epoch] = noise
    assert noises == expected and epochs == [*range(6, 13)]
    plain = trained(wrong=0.0, every=None, likelihood="classification")
    is_same = torch.equal(noisy.laplace.mean, plain.laplace.mean)
    assert is_same == (not expected)


class Shuffled:
    """A loader of a user's own, with a generator of its own."""

    def __init__(self, x, y):
        self.x, self.y, self.generator = x, y, torch.Generator().manual_seed(0)
        self.orders = []

    def __len__(self):
        return len(self.y) // 50

    def __iter__(self):
        order = torch.randperm(len(self.y), generator=self.generator)
        self.orders.append(order)
        return iter([(self.x[i], self.y[i]) for i in order.split(50)])


def test_looking_for_noise_does_not_move_a_loaders_own_random_numbers(monkeypatch):
    monkeypatch.setattr(learned_numbers, "MOST_LABELS", 100)  # so that a part of the data is read

    def orders(likelihood):
        torch.manual_seed(0)
        model, loader = nn.Linear(3, 3).double(), Shuffled(*data())
        learner = PriorLearner(likelihood, epochs=6, every=100)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        learner.start(model, optimizer, loader, 6)
        epochs = []
        for _ in range(6):
            for number, (x, y) in enumerate(loader):
                epochs += [] if number else [loader.orders[-1]]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        learner.detach()
        return torch.stack(epochs[:5])

    assert torch.equal(orders(NOISY), orders("classification"))


def test_held_out_labels_that_cannot_serve_are_named_before_the_first_step():
    model, loader = nn.Linear(3, 3).double(), DataLoader(TensorDataset(*data()), 50)
    x, y = data(20)
    cases = [
        (TypeError, "a list_iterator, which can be read only once", iter([(x, y)])),
        (ValueError, "no held-out targets.* there is no batch", []),
        (ValueError, "Label . is out of range", [(x, y + 3)]),
        (RuntimeError, "shapes cannot be multiplied", [(x[:, :2], y)]),
    ]
    for error, message, held_out in cases:
        learner, optimizer = PriorLearner(NOISY), torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(error, match=message):
            learner.start(model, optimizer, loader, 1, held_out=held_out)
    with pytest.raises(ValueError, match=r"would keep a share of .* 0,.*updates=0.*noise=0.2"):
        PriorLearner(NOISY, updates=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="3 epochs in a row.* has 2"):
        PriorLearner(NOISY).start(model, optimizer, loader, 5)
    learner = PriorLearner(NOISY)
    learner.start(model, optimizer, loader, 6, held_out=[(x, y)])
    state = learner.state_dict()
    learner.detach()
    resumed = PriorLearner(NOISY)
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="held-out labels"):  # it would go on with another noise
        resumed.start(model, optimizer, loader, 6)


def test_predictions_are_of_the_true_class_unless_observed_labels_are_asked_for():
    model, (x, y) = nn.Linear(3, 3).double(), data()
    ensemble = Ensemble([model], "noisy_classification(noise=0.3)")
    p, q = ensemble(x).mean, ensemble.predicting("observed")(x).mean
    assert_close(p, torch.softmax(model(x), -1).detach())
    assert_close(q, 0.7 * p + 0.1)
    log_q = likelihood_of("noisy_classification(noise=0.3)").losses(model(x).detach(), y)
    assert_close(-q.gather(1, y[:, None]).log(), log_q)
    learner, optimizer = PriorLearner(NOISY), torch.optim.SGD(model.parameters(), 0.1)
    learner.start(model, optimizer, [(x, y)], 1, held_out=[(x, y)])
    learn_label_noise(learner.problem, learner.state)
    plain = Ensemble([model], "classification")
    assert plain.calibrate([(x, y)]).label_noise == pytest.approx(
        learner.state.likelihood.parameters["noise"].item(), abs=1e-3
    )
