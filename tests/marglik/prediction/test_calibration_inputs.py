"""What calibration is given, and what can be done with the predictive that it returns."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from marglik import Posterior, PredictiveConfig, calibrate, load_posterior, save_posterior

pytestmark = pytest.mark.usefixtures("one_thread")


def data(number, seed):
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def fitted(model=None):
    posterior = Posterior(model or network(), "classification")
    x, y = data(60, 1)
    posterior.fit([(x[:40], y[:40]), (x[40:], y[40:])])
    return posterior


def test_the_data_of_the_fit_is_named_in_any_order(recwarn):
    x, y = data(60, 1)
    with pytest.warns(RuntimeWarning, match="is the training data.*not trained on"):
        calibrate(fitted(), [(x.flip(0), y.flip(0))])
    recwarn.clear()
    calibrate(fitted(), [data(60, 2)])  # negative control: as many others
    assert not [one for one in recwarn if "training data" in str(one.message)]


@pytest.mark.parametrize("method", ["probit", "mc", "linearised"])
@pytest.mark.parametrize("again", [deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_calibrated_predictive_is_copied_and_pickled(method, again):
    generator = torch.Generator().manual_seed(5)
    config = PredictiveConfig(method=method)
    predictive, (x, _) = calibrate(fitted(), [data(50, 2)], config, generator=generator), data(9, 3)
    copied = again(predictive)
    assert (
        copied.model is not predictive.model
        and copied.calibration_fit == predictive.calibration_fit
    )
    for one, other in ((predictive, copied), (predictive.uncalibrated, copied.uncalibrated)):
        assert torch.equal(one(x).mean, other(x).mean)
        assert torch.equal(one(x).epistemic, other(x).epistemic)


def test_batches_are_calibrated_with_or_named_in_one_line():
    x, y = data(50, 2)
    expected = calibrate(fitted(), [(x, y)]).calibration_fit
    posterior = fitted()
    with torch.inference_mode():
        assert calibrate(posterior, [(x.clone(), y.clone())]).calibration_fit == expected
    with pytest.raises(ValueError, match="held-out batch has no examples; leave it out"):
        calibrate(fitted(), [(x, y), (x[:0], y[:0])])
    mappings = [{"inputs": x, "labels": y}]
    for use in (lambda data: calibrate(fitted(), data), Posterior(network(), "classification").fit):
        with pytest.raises(TypeError, match="the keys inputs, labels.*dict_key_x"):
            use(mappings)
    posterior = Posterior(network(), "classification", dict_key_x="inputs")
    posterior.fit([{"inputs": x, "labels": y}])
    other = Posterior(network(), "classification")
    other.fit([(x, y)])
    assert torch.equal(posterior.log_marginal_likelihood(), other.log_marginal_likelihood())


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("saved", [nn.Identity(), compiled], ids=["plain", "compiled"])
@pytest.mark.parametrize("loaded", [nn.Identity(), compiled], ids=["plain", "compiled"])
def test_a_posterior_of_a_compiled_network_loads_into_the_plain_one(tmp_path, saved, loaded):
    posterior = fitted(saved(network()))
    save_posterior(posterior, tmp_path)
    model = network()
    with torch.no_grad():
        model[0].weight.zero_()
    again = load_posterior(tmp_path, loaded(model))
    assert torch.equal(again.mean, posterior.mean)
    assert torch.equal(again.log_marginal_likelihood(), posterior.log_marginal_likelihood())
