"""`Ensemble`: the mixture and its τ by brute force, its file, and members that share decays."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from marglik import Ensemble, PriorLearner
from marglik.application.cli import main
from marglik.models import MLP
from marglik.prediction.calibration import PRIOR_OF_SHARPNESS
from marglik.prediction.links import predict_from_outputs
from marglik.training.loop import OnlineTraining
from tests.marglik.application.runs.command_line import DATA, MODEL, TRAIN, results_of
from tests.marglik.plain_loop import learn

pytestmark = pytest.mark.usefixtures("one_thread")

LIKELIHOODS = ["classification", "bernoulli", "regression"]
SIGMA = 0.7


def problem(likelihood):
    """Five networks of one kind that disagree, and data of which they are too sure."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double() for _ in range(5)]
    x = 4 * torch.randn(60, 4).double()
    with torch.no_grad():
        f = sum(model.eval()(x) for model in models) / 5 + 3 * torch.randn(60, 3)
    y = {"classification": f.argmax(1), "bernoulli": (f > 0).double(), "regression": f}
    return models, x, y[likelihood]


def outputs(models, x):
    with torch.no_grad():
        return torch.stack([model.eval()(x) for model in models])


def log_mixture(f, y, likelihood, sharpness):
    """The log p(y|x) of each example by the definition, for τ, or σ of regression."""
    if likelihood == "regression":
        mean, variance = f.mean(0), f.var(0, correction=0) + sharpness**2
        return torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(1)
    if likelihood == "bernoulli":
        p = torch.sigmoid(f / sharpness).mean(0)
        return torch.distributions.Bernoulli(p).log_prob(y).sum(1)
    p = torch.softmax(f / sharpness, -1).mean(0)
    return p[torch.arange(len(y)), y].log()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_no_other_temperature_gives_the_mixture_a_lower_held_out_nll(likelihood):
    """But for the weak prior; and a τ that suits each member alone is another one."""
    models, x, y = problem(likelihood)
    own = SIGMA if likelihood == "regression" else 1.0

    def objective(f, sharpness):
        penalty = 0.5 * PRIOR_OF_SHARPNESS * (torch.tensor(sharpness / own).log()) ** 2 / len(y)
        return (penalty - log_mixture(f, y, likelihood, sharpness).mean()).item()

    def best(members):
        ensemble = Ensemble(members, likelihood, SIGMA)
        found = ensemble.calibrate([(x[:40], y[:40]), (x[40:], y[40:])])
        assert found == ensemble.calibration and found.covariance_scale == 1
        return found.sigma_noise or found.output_temperature, found.label_noise

    (found, noise), f = best(models), outputs(models, x)
    assert not noise
    at_found = objective(f, found)
    assert abs(found / own - 1) > 0.1
    for factor in [*torch.linspace(0.2, 5, 50).tolist(), 0.95, 0.99, 1.01, 1.05]:
        assert objective(f, found * factor) >= at_found - 1e-9
    # What a member is sure of and wrong about may be taken for wrong labels instead.
    alone = [temperature for temperature, noise in (best([m]) for m in models) if not noise]
    if likelihood != "regression":
        assert min(alone) > 1.1 * found  # the mixture is less sure than its members


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_prediction_is_the_mixtures_at_the_calibration(likelihood):
    models, x, y = problem(likelihood)
    ensemble = Ensemble(models, likelihood, SIGMA)
    fit = ensemble.calibrate([(x, y)])
    for model in models:
        model.train()
    found, f = ensemble(x), outputs(models, x) / fit.output_temperature
    expected = predict_from_outputs(f, likelihood, fit.sigma_noise or 1.0)
    assert_close(found.tensors(), expected.tensors())
    same = Ensemble([models[0], models[0]], likelihood)(x)  # negative control
    assert same.epistemic.abs().max() < 1e-12 < found.epistemic.max()


def test_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    models = [MLP(4, (3,), 3) for _ in range(3)]
    x, y = torch.randn(50, 4), torch.randint(3, (50,))
    ensemble = Ensemble(models, seconds=2.0)
    ensemble.calibrate([(x, y)])
    ensemble.save(tmp_path)
    loaded = Ensemble.load(tmp_path, MLP(4, (3,), 3))
    assert (loaded.calibration, loaded.seconds) == (ensemble.calibration, 2.0)
    assert torch.equal(loaded(x).mean, ensemble(x).mean)
    with pytest.raises(ValueError, match="to another network"):
        Ensemble.load(tmp_path, MLP(4, (5,), 3))
    with pytest.raises(ValueError, match="in torch.float32 there, but .* in torch.float16"):
        Ensemble.load(tmp_path, MLP(4, (3,), 3).half())
    with pytest.raises(FileNotFoundError, match="--members"):
        Ensemble.load(tmp_path / "nothing", MLP(4, (3,), 3))


def train(learner, steps=15):
    """A loop of one's own; returns the network and its parameters after each step."""
    torch.manual_seed(1)
    x = torch.randn(40, 4).double()
    y, seen = x[:, :3].argmax(1), []
    data = [(x[:20], y[:20]), (x[20:], y[20:])]  # of a single batch there is no average
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    learner.seen = []

    def look():
        seen.append([p.detach().clone() for p in model.parameters()])

    # Before the learner's own hook, which ends the epoch.
    optimizer.register_step_post_hook(lambda *_: learner.seen.append(learner.state.decays))
    learn(model, optimizer, learner, data, steps, after_step=look)
    return model, seen


def test_a_members_decays_take_the_course_of_the_firsts(monkeypatch):
    first = PriorLearner("classification", structure="per_type", steps=40)
    train(first)
    assert len({tuple(decays) for decays in first.seen}) > 5  # they were learned
    member = first.replay()
    monkeypatch.setattr("marglik.training.algorithm.update_prior", None)  # no pass, no update
    model, seen = train(member)
    # From the first epoch on: the decays that training ends with can keep a network from fitting.
    assert_close(member.seen, first.seen, rtol=1e-9, atol=0)
    assert_close(member.state.decays, first.state.decays, rtol=1e-9, atol=0)
    assert abs(member.seen[0][0] / first.state.decays[0] - 1) > 0.5  # negative control
    assert member.posterior is None and not member.evidences
    for i, p in enumerate(model.parameters()):
        average = seen[0][i]
        for t, at in enumerate(seen[1:], 2):
            average = average + 5 / (t + 4) * (at[i] - average)
        assert_close(p, average, rtol=1e-12, atol=0)
    initial, _ = train(PriorLearner("classification", updates=0))  # negative control
    assert (initial[3].weight - model[3].weight).abs().max() > 1e-3


OPTIONS = [*TRAIN, *DATA, *MODEL, "--members", "3", "--no_baseline"]


def test_a_finished_member_is_not_trained_again(tmp_path, monkeypatch):
    """Cut off in the last member; the result is that of the run that was not cut off."""
    assert main([*OPTIONS, "--output", str(tmp_path / "whole")]) == 0
    epoch, calls = OnlineTraining.train_epoch, []

    def counted(self):
        calls.append(self._epoch + 1)
        if len(calls) == 3 + 3 + 2:
            raise KeyboardInterrupt
        return epoch(self)

    monkeypatch.setattr(OnlineTraining, "train_epoch", counted)
    monkeypatch.setattr("marglik.storage.checkpoint.MINUTES", 0.0)
    command = [*OPTIONS, "--output", str(tmp_path / "run"), "--resume"]
    assert main(command) == 130
    assert len(calls) == 8
    assert main(command) == 0
    assert calls[8:] == [2, 3]
    whole, run = (results_of(tmp_path / name).scores for name in ("whole", "run"))
    assert run == whole
