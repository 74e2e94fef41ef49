"""Batches as people have them: mappings with keys of their own, and any form by a function."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kfac_backend import kronecker_factors
from marglik import (
    Laplace,
    OnlineTraining,
    Posterior,
    PriorLearner,
    calibrate,
    laplace_predictive,
    marglik_training,
    predict_all,
)
from tests.random_numbers import normal

N = 12


class TwoInputs(nn.Module):
    """A network of two inputs; its layers see their product."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(self, image, scale):
        return self.layers(image * scale)


def parts():
    image, scale, label = normal(N, 3), normal(N, 1), torch.arange(N) % 2
    return image.double(), scale.double(), label


def mappings(*names):
    """Two batches, with these keys."""
    return [
        dict(zip(names, (t[half] for t in parts()), strict=True))
        for half in (slice(5), slice(5, N))
    ]


# Form -> batches, and the options that say what they are.
FORMS = {
    "keys": (
        mappings("image", "scale", "y"),
        {"dict_key_x": ("image", "scale"), "dict_key_y": "y"},
    ),
    "positions": (
        [tuple(b.values()) for b in mappings("a", "b", "y")],
        {"batch": lambda b: (b[:2], {}, b[2])},
    ),
    "keywords": (
        [[b] for b in mappings("i", "s", "y")],
        {"batch": lambda b: ((), {"scale": b[0]["s"], "image": b[0]["i"]}, b[0]["y"])},
    ),
    "both": (
        mappings("i", "s", "y"),
        {"batch": lambda b: ((b["i"],), {"scale": b["s"]}, b["y"])},
    ),
}


def fresh(two_inputs=True):
    torch.manual_seed(0)
    model = TwoInputs()
    return model if two_inputs else model.layers


def plain():
    """Two batches (x, y) in which the layers see the same."""
    image, scale, label = parts()
    return [((image * scale)[half], label[half]) for half in (slice(5), slice(5, N))]


def of_factors(model, batches, options):
    factors = kronecker_factors(model, batches, "classification", **options)
    return [f for block in factors.blocks.values() for f in (block.B, block.A) if f is not None]


def of_posterior(model, batches, options):
    posterior = Posterior(model, "classification", **options)
    posterior.fit(batches)
    predict = laplace_predictive(posterior)
    fit = calibrate(posterior, batches).calibration_fit
    prediction, y = predict_all(predict, batches)  # of the options of the fit
    return [posterior.log_marginal_likelihood(), fit.nll, prediction.mean, y]


def of_learner(model, batches, options):
    prior = PriorLearner("classification", epochs=3, every=1, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    OnlineTraining(model, optimizer, batches, prior).run()
    return [*prior.posterior.prior_precision, *model.parameters()]


def of_laplace(model, batches, options):
    values = []
    for structure in ("kron", "full"):
        la = Laplace(model, "classification", "all", structure, **options)
        la.fit(batches)
        values.append(la.log_marginal_likelihood())
    return values


@cache
def of_the_layers(use):
    """What the layers alone find."""
    return use(fresh(False), plain(), {})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("use", [of_factors, of_posterior, of_learner, of_laplace])
def test_every_entrance_takes_every_form(use, form):
    batches, options = FORMS[form]
    assert_close(use(fresh(), batches, options), of_the_layers(use))


def test_the_drop_in_takes_keys():
    batches = [{"image": x, "label": y} for x, y in plain()]
    model, of_pairs = fresh(False), fresh(False)
    keys = {"dict_key_x": "image", "dict_key_y": "label"}
    results = [
        marglik_training(m, data, "classification", n_epochs=2, marglik_frequency=1, **options)[2]
        for m, data, options in ((model, batches, keys), (of_pairs, plain(), {}))
    ]
    assert_close(*results)
    assert_close(list(model.parameters()), list(of_pairs.parameters()))


def test_what_is_wrong_is_named():
    (batch, _), options = FORMS["keys"]
    for changed, error, words in (
        ({"dict_key_x": "pixels"}, KeyError, "no 'pixels', but dict_key_x is.*image, scale, y"),
        ({"dict_key_y": "label"}, KeyError, "no 'label'.*dict_key_y is 'label'"),
        ({"batch": lambda b: b["y"]}, TypeError, r"return \(args, kwargs, y\).*ValueError"),
    ):
        with pytest.raises(error, match=words):
            kronecker_factors(fresh(), [batch], "classification", **options | changed)
    # Without a word about the keys the model gets the mapping, and says that it can't take it.
    with pytest.raises(KeyError, match="no 'labels'"):
        kronecker_factors(fresh(), [batch], "classification")
