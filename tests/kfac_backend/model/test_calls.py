"""Forward passes of ours: they leave the caller's inputs alone, and nothing keeps a network."""

import copy
import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from kfac_backend import corrected_factors, kronecker_factors
from kfac_backend.covariance.linearised import linearised_outputs
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from marglik.posterior.laplace_torch import KronLaplace
from tests.kfac_backend.covariance.posteriors import precision_of
from tests.kfac_backend.networks import OwnNorm
from tests.random_numbers import normal


@dataclass
class Pairs:
    """A user's object of examples, with fields of its own."""

    left: Tensor
    right: list[Tensor]

    def __len__(self):
        return len(self.left)

    def __getitem__(self, which):
        return Pairs(self.left[which], [t[which] for t in self.right])

    def to(self, device):
        return Pairs(self.left.to(device), [t.to(device) for t in self.right])


def tensors(x) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return list(x.values())
    return [x.left, *x.right]


INPUTS = {
    "tensor": lambda: normal(6, 5),
    "mapping": lambda: {"a": normal(6, 5), "b": normal(6, 5).flip(0)},
    "object": lambda: Pairs(normal(6, 5), [normal(6, 5).flip(0)]),
}
LABELS = torch.arange(6) % 3


class Normalised(nn.Module):
    """A network that normalises its inputs first: in place, or (the reference) not."""

    def __init__(self, in_place, unknown=False):
        super().__init__()
        torch.manual_seed(0)
        self.in_place = in_place
        norm = OwnNorm(4) if unknown else nn.LayerNorm(4)
        self.net = nn.Sequential(nn.Linear(5, 4), norm, nn.ReLU(inplace=True), nn.Linear(4, 3))
        self.double()

    def forward(self, x):
        normalised = [
            t.sub_(0.5).div_(0.25) if self.in_place else (t - 0.5) / 0.25 for t in tensors(x)
        ]
        return self.net(torch.stack(normalised).sum(0))


def covariance(model, x, factors):
    f, V = OutputCovariance(model, precision_of(factors))(x)
    return [f, V]


def joint(model, x, factors):
    return list(OutputCovariance(model, precision_of(factors)).joint(x[None]))


def predictive(model, x, factors):
    laplace = KronLaplace(model, "classification", prior_precision=0.3)
    laplace.fit([(x, LABELS)])
    return [laplace(x), laplace.predictive_samples(x, n_samples=3, generator=torch.Generator())]


WAYS = {
    "factors": lambda model, x, factors: [b.to_dense() for b in factors.blocks.values()],
    "again": lambda model, x, factors: [
        b.to_dense()
        for b in kronecker_factors(model, [(x, LABELS)], "classification").blocks.values()
    ],
    "corrected": lambda model, x, factors: [
        b.to_dense() for b in corrected_factors(factors, model, [(x, LABELS)]).blocks.values()
    ],
    "covariance": covariance,
    "linearised": lambda model, x, factors: [
        linearised_outputs(model, {"net.0.weight": normal(4, 5)[None]}, x)
    ],
}


def found(way, x, **options):
    """What a way returns, of a network in place and of one that leaves its inputs alone."""
    results, unknown = [], options.get("unsupported") == "diagonal"
    for in_place in (True, False):
        model = Normalised(in_place, unknown)
        own = copy.deepcopy(x)
        factors = kronecker_factors(model, [(own, LABELS)], "classification", **options)
        results.append(way(model, own, factors))
        for left, before in zip(tensors(own), tensors(x), strict=True):
            assert torch.equal(left, before)
    return results


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_may_change_its_inputs_in_place(way, kind):
    in_place, reference = found(WAYS[way], INPUTS[kind]())
    assert_close(in_place, reference)


def test_so_may_one_with_parameters_without_a_rule_and_one_with_a_predictive():
    x = INPUTS["tensor"]()
    assert_close(*found(WAYS["factors"], x, unsupported="diagonal"))
    assert_close(*found(covariance, x, unsupported="diagonal"))
    assert_close(*found(joint, x))
    assert_close(*found(predictive, x))


def losses(model, optimizer, x):
    """The losses of three steps, and what the last one left of its batch."""
    seen = []
    for _ in range(3):
        batch = x.clone()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), LABELS)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen, batch


def kfac(model, fisher="mc"):
    every_step = PreconditionerOptions(factor_every=1, update_every=1)
    return KFAC(model, "classification", 0.1, options=every_step, fisher=fisher)


@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
def test_training_under_kfac_sees_the_batch_as_plain_training_does(fisher):
    x, model, reference = INPUTS["tensor"](), Normalised(True), Normalised(False)
    first, batch = losses(model, kfac(model, fisher), x)
    expected, _ = losses(reference, kfac(reference, fisher), x)
    plain, left = losses(Normalised(True), torch.optim.SGD(Normalised(True).parameters()), x)
    assert first[0] == plain[0]  # the loss of the very first batch
    assert_close(first, expected)
    assert torch.equal(batch, left)  # changed once, by the training's own forward pass


def unreached(model, x):
    optimizer = kfac(model)
    model(x)
    optimizer.preconditioner.detach()


def refused(model, x):
    with pytest.raises(NotImplementedError):
        kronecker_factors(model, [(x, LABELS)], "classification")


USES = {
    "factors": lambda model, x: kronecker_factors(model, [(x, LABELS)], "classification"),
    "diagonal": lambda model, x: kronecker_factors(
        model, [(x, LABELS)], "classification", unsupported="diagonal"
    ),
    "corrected": lambda model, x: corrected_factors(
        kronecker_factors(model, [(x, LABELS)], "classification"), model, [(x, LABELS)]
    ),
    "covariance": lambda model, x: covariance(
        model, x, kronecker_factors(model, [(x, LABELS)], "classification")
    ),
    "joint": lambda model, x: joint(
        model, x, kronecker_factors(model, [(x, LABELS)], "classification")
    ),
    "predictive": lambda model, x: predictive(model, x, None),
    "refused": refused,
    "kfac": lambda model, x: losses(model, kfac(model), x),
    "kfac without a backward pass": unreached,
}


class Scaled(Normalised):
    """With a parameter that is followed operation by operation."""

    def __init__(self):
        super().__init__(False)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize("use", [*USES, "followed"])
def test_a_network_is_freed_with_its_last_user(use):
    model = Normalised(False, unknown=use in ("diagonal", "refused"))
    if use == "followed":
        use, model = "factors", Scaled()
    gone = weakref.ref(model), weakref.ref(model.net[0].weight)
    USES[use](model, INPUTS["tensor"]())
    del model
    gc.collect()
    assert [of_model() for of_model in gone] == [None, None]
