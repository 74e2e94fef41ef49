"""`LearnedAugmentation`: its copies, its evidence and the gradient of that, and learning."""

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import kronecker_factors
from kfac_backend.options import CurvatureOptions
from marglik import Posterior, PriorLearner
from marglik.augmentation import Affine, Color, Flip, LearnedAugmentation, Noise, TimeShift
from marglik.augmentation.ranges import _random_parts, evidence_gradient
from marglik.augmentation.transforms import Transform
from tests.kfac_backend.block_checks import with_statistics
from tests.marglik.plain_loop import learn
from tests.oracles import ggn_blocks
from tests.random_numbers import error, normal

NETWORKS = {
    "affine": ([Affine()], (4, 2, 5, 5)),
    "color": ([Color()], (4, 3, 4, 4)),
    "flip": ([Flip(), Affine("rotate")], (4, 2, 4, 4)),
    "noise": ([Noise()], (4, 5)),
    "time": ([TimeShift()], (4, 2, 6)),
    "batch norm": ([Affine()], (4, 2, 5, 5)),
}


def network(shape: tuple[int, ...], *norm: nn.Module) -> nn.Module:
    """Small, with convolutions where there are axes for them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    if len(shape) == 4:
        layers = [nn.Conv2d(shape[1], 3, 3, padding=1), *norm, nn.Tanh()]
    elif len(shape) == 3:
        layers = [nn.Conv1d(shape[1], 3, 3), nn.Tanh()]
    else:
        layers = [nn.Linear(shape[1], 4), nn.Tanh()]
    features = nn.Sequential(*layers)(torch.zeros(shape))[0].numel()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3)).double()
    with_statistics(model)
    return model


def augmented(name: str) -> tuple[LearnedAugmentation, list[tuple[Tensor, Tensor]]]:
    transforms, shape = NETWORKS[name]
    norm = [nn.BatchNorm2d(3)] if name == "batch norm" else []
    model = LearnedAugmentation(network(shape, *norm), transforms).eval().double()
    with torch.no_grad():
        model.ranges.mul_(4.0)  # 0.2 of the largest
    return model, [(normal(*shape), torch.arange(shape[0]) % 3)]


@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_of_the_evidence(name):
    """In one of the modes; `test_factor_derivatives` has both. Training has left train mode."""
    model, data = augmented(name)
    model.train()
    mode = ("expand", "reduce")[len(name) % 2]
    options = CurvatureOptions(kfac_approx=mode)

    def fitted() -> Posterior:
        laplace = Posterior(model, "classification", options, prior_precision=0.5, temperature=0.8)
        laplace.fit(data)
        return laplace

    ((found,),) = evidence_gradient(fitted(), [data], [model.ranges])
    assert not model.ranges.requires_grad and all(module.training for module in model.modules())
    expected, h = [], 1e-4
    for k in range(len(model.ranges)):
        values = []
        for step in (h, -h, 2 * h, -2 * h):
            model.ranges[k] += step
            values.append(fitted().log_marginal_likelihood().item())
            model.ranges[k] -= step
        expected.append((8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * h))
    assert error(found, torch.tensor(expected)) < 1e-6


@pytest.mark.parametrize("transforms", [[Affine("rotate", "move x")], [Flip(), Affine("shear")]])
def test_reduce_is_exact_over_copies_in_a_deep_linear_network(transforms):
    layers = [nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 2)]
    model = LearnedAugmentation(nn.Sequential(*layers), transforms).double().eval()
    with torch.no_grad():
        model.ranges.mul_(5.0)
    x = normal(3, 1, 5, 5)
    exact = ggn_blocks(model, lambda run: run(x), "regression")
    for mode, is_exact in (("reduce", True), ("expand", False)):
        factors = kronecker_factors(model, [(x, normal(3, 2))], "regression", kfac_approx=mode)
        name = "model.2.weight"
        assert (error(factors.to_dense(name), exact[name]) < 1e-10) == is_exact
    # Without the weights of the copies, the mean of inputs would be another.
    if isinstance(transforms[0], Flip):
        model.ranges[0] = 0.1
        first = kronecker_factors(model, [(x, normal(3, 2))], "regression", kfac_approx="reduce")
        model.ranges[0] = 0.4
        other = kronecker_factors(model, [(x, normal(3, 2))], "regression", kfac_approx="reduce")
        assert error(other.to_dense(name), first.to_dense(name)) > 0.01


def test_copies():
    model = LearnedAugmentation(nn.Flatten(), [Affine("rotate")], copies=4, ranges={"rotate": 1.0})
    x = torch.randn(5, 1, 4, 4)
    model.eval()
    assert_close(model(x), model(x), rtol=0.0, atol=0.0)
    angles = sorted(model._numbers(5, 1, x, 0)[:4, 0].tolist())
    assert angles == pytest.approx([-0.75, -0.25, 0.25, 0.75])
    assert_close(model.transformed(x)[2], model.transformed(x[2:3])[0])  # the same for all
    model.train()
    assert not torch.allclose(model(x), model(x))
    drawn = model._numbers(1000, 1, x, 0).view(1000, 4)
    assert ((drawn.sort(1).values + 1) * 2).floor().eq(torch.arange(4)).all()  # one in each quarter
    assert drawn.mean().abs() < 0.01


def test_copies_of_several_transforms_vary_apart():
    seen = []

    class Recorded(Transform):
        limits = {"first": 1.0, "second": 1.0}

        def __call__(self, x, eta, u):
            seen.append(u[:, 0])
            return x

    transforms = [Recorded("first"), Recorded("second")]
    LearnedAugmentation(nn.Flatten(), transforms, copies=8).eval()(torch.zeros(1, 2))
    first, second = seen
    assert_close(first.sort().values, second.sort().values)
    assert abs(torch.corrcoef(torch.stack(seen))[0, 1]) < 0.8  # it was 1: one order for both


def test_ranges_are_saved_and_no_parameters():
    model = LearnedAugmentation(nn.Flatten(), [Affine("rotate"), Flip()], ranges={"flip": 0.5})
    assert list(model.parameters()) == []
    assert_close(model.state_dict()["ranges"], torch.tensor([0.05 * torch.pi, 0.5]))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([],), "ranges"),
        (([Affine("rotate"), Affine("rotate", "shear")],), "different names"),
        (([Affine("rotate")], 0), "copies=0"),
        (([Flip()], 3), "even number of copies"),
        (([Affine("rotate")], 4, {"shear": 0.1}), "rotate from 0 to 3.142"),
        (([Affine("rotate")], 4, {"rotate": 4.0}), "rotate from 0 to 3.142"),
    ],
)
def test_wrong_arguments_are_named(arguments, word):
    with pytest.raises(ValueError, match=word):
        LearnedAugmentation(nn.Flatten(), *arguments)
    with pytest.raises(ValueError, match="'shear'"):
        Affine("turn")


def test_what_cannot_be_transformed_or_learned_is_named():
    model = LearnedAugmentation(nn.Flatten(), [Affine("rotate")])
    with pytest.raises(TypeError, match="not dict"):
        model({"x": torch.zeros(1, 1, 4, 4)})


@pytest.mark.parametrize("options", [{}, {"updates": 0}])
def test_ranges_that_stay_need_no_pass_at_the_start(options):
    def passes(learns: bool) -> int:
        model = LearnedAugmentation(network((4, 5)), [Noise()], learns=learns).double()
        calls: list[Any] = []
        model.register_forward_hook(lambda *_: calls.append(0))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        learner = PriorLearner("classification", **options)
        learner.start(model, optimizer, [(normal(4, 5), torch.arange(4) % 3)], 2)
        return len(calls)

    assert passes(learns=False) == 2  # which look at the first batch
    assert (passes(learns=True) > 2) == (not options)


def test_random_parts_of_the_data():
    def parts(total: int, share: float) -> list[list[int]]:
        return list(_random_parts(list(range(total)), share))

    found = parts(20, 0.15)
    assert [len(part) for part in found] == [3, 3] and len({*found[0], *found[1]}) == 6
    assert parts(1, 0.5) == [[0]]
    assert sorted(sum(parts(2, 1.0), [])) == [0, 1]
    assert sorted(sum(parts(5, 1.0), [])) != list(range(5))  # two of each


def learned_angle(largest: float, epochs: int = 12) -> float:
    """The range of angles that is found for 200 digits that are turned by up to ``largest``."""
    torch.manual_seed(0)
    found: Any = load_digits()
    x = torch.tensor(found.images[:200], dtype=torch.float32)[:, None] / 8 - 1
    x = Affine("rotate")(x, torch.tensor([largest]), 2 * torch.rand(200, 1) - 1)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    )
    model = LearnedAugmentation(network, [Affine("rotate")], ranges={"rotate": 0.4})
    labels = torch.tensor(found.target[:200])
    loader = DataLoader(TensorDataset(x, labels), 25, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    learner = PriorLearner("classification", CurvatureOptions(kfac_approx="reduce"))
    learn(model, optimizer, learner, loader, epochs)
    return model.ranges.item()


def test_a_network_with_batch_norm_learns_its_ranges():
    x, y = normal(24, 2, 5, 5), torch.arange(24) % 3
    model = LearnedAugmentation(network((4, 2, 5, 5), nn.BatchNorm2d(3)), [Affine("rotate")])
    before = model.double().ranges.clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    learn(model, optimizer, PriorLearner("classification"), [(x[:12], y[:12]), (x[12:], y[12:])], 2)
    assert not torch.equal(model.ranges, before)


def test_range_follows_the_data():
    assert learned_angle(1.0) > learned_angle(0.0) + 0.5
