"""What calibration is given, and what can be done with the predictive that it returns."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from marglik import (
    Laplace,
    Posterior,
    PredictiveConfig,
    calibrate,
    load_posterior,
    save_posterior,
)

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


class Tokens(nn.Module):
    """A classifier of tokens that a mask may hide, as of transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 5), nn.Linear(5, 3)

    def forward(self, input_ids, attention_mask):
        a = self.table(input_ids) * attention_mask[..., None]
        return self.head(a.sum(1) / attention_mask.sum(1, keepdim=True))


def sentences(number, seed, length=9, padding=3):
    """A mapping of sentences of 4 to 8 tokens, padded by a token to a length."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (number, 8), generator=g)
    lengths = torch.randint(4, 9, (number, 1), generator=g)
    mask = (torch.arange(length) < lengths).long()
    tokens = nn.functional.pad(tokens, (0, length - 8)) * mask + padding * (1 - mask)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens[:, 0] % 3}


class Lazy(torch.utils.data.Dataset):
    """Examples that are made when they are read."""

    def __init__(self, indices, augments=False):
        self.indices, self.augments = indices, augments

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, i):
        x, y = (value[0] for value in data(1, self.indices[i]))
        return x + 0.1 * torch.randn(4) if self.augments else x, y


def lazily(*args):
    return torch.utils.data.DataLoader(Lazy(*args), 16)


def parts(make):
    """The fit's data, a part of it among other data, and other data alone."""
    return [make(60, 1)], [make(60, 1), make(30, 2)], [make(90, 3)]


OF_FITS = {
    # Name: the network; the fit's data; validation data with a part of it, and without; the part.
    "tensors": (network, *parts(data), 60),
    "tokens": (
        Tokens, [sentences(60, 1)], [sentences(60, 1, 12), sentences(30, 2)], [sentences(90, 3)], 60
    ),
    "a small part": (network, [data(90, 1)], [data(90, 4), [v[:3] for v in data(90, 1)]],
                     [data(90, 4)], 3),
    "read lazily": (network, lazily(range(60)), lazily(range(50, 99)), lazily(range(60, 99)), 10),
}  # fmt: skip


def warnings_of(posterior, batches, recwarn):
    recwarn.clear()
    calibrate(posterior, batches)
    return [str(w.message) for w in recwarn if "are training data" in str(w.message)]


@pytest.mark.parametrize("name", OF_FITS)
@pytest.mark.parametrize("way", ["fitted", "saved", "state"])
def test_a_part_of_the_fits_data_is_counted(name, way, tmp_path, recwarn):
    make, of_fit, overlapping, apart, number = OF_FITS[name]
    posterior = Laplace(make(), "classification", subset_of_weights="all") if way == "state" else (
        Posterior(make(), "classification"))  # fmt: skip
    posterior.fit(of_fit)
    if way == "saved":
        save_posterior(posterior, tmp_path)
        posterior = load_posterior(tmp_path, make())
    elif way == "state":
        other = Laplace(make(), "classification", subset_of_weights="all")
        other.load_state_dict(posterior.state_dict())
        posterior = other
    (message,) = warnings_of(posterior, overlapping, recwarn)
    assert message.startswith(f"{number} of the ")
    assert not warnings_of(posterior, apart, recwarn)  # negative control


def test_equal_inputs_and_augmented_ones_are_no_training_data(recwarn):
    """A table of few categories has the same rows everywhere; random inputs are other ones."""

    def categories(seed):
        g = torch.Generator().manual_seed(seed)
        return torch.randint(2, (200, 4), generator=g).float(), torch.randint(3, (200,))

    posterior = Posterior(network(), "classification")
    posterior.fit([categories(1)])
    assert not warnings_of(posterior, [categories(2)], recwarn)
    x, y = data(60, 1)
    posterior.fit([categories(1), (x, y)])
    # Of other rows than the fit's most have no equal.
    assert warnings_of(posterior, [(x, y)], recwarn)
    posterior = Posterior(network(), "classification")
    augmented = lazily(range(60), True)
    posterior.fit(augmented)
    assert not warnings_of(posterior, augmented, recwarn)  # which is documented
    posterior.fit(lazily(range(60)), override=False)
    assert warnings_of(posterior, lazily(range(30)), recwarn)[0].startswith("30 of the 30")


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
    with pytest.raises(ValueError, match="held-out batch has no examples. Omit"):
        calibrate(fitted(), [(x, y), (x[:0], y[:0])])
    for use in (lambda data: calibrate(fitted(), data), Posterior(network(), "classification").fit):
        with pytest.raises(TypeError, match="the keys inputs, labels.*dict_key_x"):
            use([{"inputs": x, "labels": y}])


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
