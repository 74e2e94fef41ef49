"""Tasks of the attribution study: data, a network with learned decays, and retrained networks.

A task trains its network with `OnlineTraining` and its default options. Retrained networks see a
random half of the training data. They use the same optimiser, number of epochs, and average of the
parameters. Their prior precisions δ and σ are fixed at the learned values, so that only examples
are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from sklearn.datasets import load_diabetes, make_friedman1
from torch import Tensor, nn

from experiments.attribution.peers import Pair
from experiments.data.dart import DART
from experiments.data.uci import UCI
from experiments.models import GPT
from experiments.weight_decay.training import (
    Residual,
    averaged_model,
    convolutions,
    digits,
    mlp,
    no_norm,
    small_images,
    with_wrong_labels,
)
from kfac_backend import CurvatureOptions
from kfac_backend.likelihoods import IGNORED, likelihood_of, loss_sum
from marglik import OnlineTraining, Posterior, PriorLearner
from marglik.data import Batches
from marglik.models import MLP

Data = Callable[[int], tuple[Pair, Pair]]
"""Training and test data of a seed."""


def resnet9(classes: int, width: int = 16) -> nn.Module:
    """The shape of ResNet-9 for images of 16×16: eight convolutions, of which four are residual.

    It has no normalisation; the other networks that are compared have none either.
    """

    def block(d_in: int, d_out: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(d_in, d_out, 3, stride, 1), nn.ReLU()]

    a, b, c = width, 2 * width, 4 * width
    return nn.Sequential(
        *block(3, a), *block(a, b, 2), Residual(*block(b, b), *block(b, b)),
        *block(b, c, 2), Residual(*block(c, c), *block(c, c)), *block(c, c),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * c, classes),
    )  # fmt: skip


def _digits(examples: int, wrong: float = 0.0) -> Data:
    def data(seed: int) -> tuple[Pair, Pair]:
        train, _, test = with_wrong_labels(*digits(), examples, 0, wrong, seed)
        return train, test

    return data


def _two_classes(examples: int) -> Data:
    """Small images of the first two classes of CIFAR-10, airplanes and automobiles."""

    def data(seed: int) -> tuple[Pair, Pair]:
        x, y = small_images()
        train, _, test = with_wrong_labels(x[y < 2], y[y < 2], examples, 0, 0.0, seed)
        return train, test

    return data


def _table(load: Callable[[int], Any], examples: int) -> Data:
    """Columns and target, standardised by the training part."""

    def data(seed: int) -> tuple[Pair, Pair]:
        x, y = (torch.from_numpy(part).float() for part in load(seed))
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        x, y = x[order], y[order][:, None]
        x, y = ((t - t[:examples].mean(0)) / t[:examples].std(0) for t in (x, y))
        return (x[:examples], y[:examples]), (x[examples:], y[examples:])

    return data


def _uci(name: str) -> Data:
    def data(seed: int) -> tuple[Pair, Pair]:
        splits = UCI(name, seed).load()
        return splits.train, splits.test  # pyright: ignore

    return data


def _dart(seed: int) -> tuple[Pair, Pair]:
    splits = DART(context=32, num_train=400, num_test=100, seed=seed).load()
    return splits.train, splits.test  # pyright: ignore


@dataclass(frozen=True)
class Task:
    """Data, a network and its training.

    Args:
        data: training and test data of a seed.
        make: returns a new network.
        epochs: number of epochs, also of retrained networks.
        likelihood: "classification" or "regression".
        optimizer: "sgd" with Nesterov's momentum, or "adam".
        lr: learning rate, constant.
        batch_size: examples in a batch.
        repeats: retrained networks for each half. The study averages their losses.
        fisher: "exact", or "mc" with one sampled label for each position.
        queries: number of test examples that are queries.
        halves: number of random halves of the training data.
        ignore_index: label of positions that do not count.
    """

    data: Data
    make: Callable[[], nn.Module]
    epochs: int
    likelihood: Literal["classification", "regression"] = "classification"
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.05
    batch_size: int = 25
    repeats: int = 1
    fisher: Literal["exact", "mc"] = "exact"
    queries: int = 100
    halves: int = 50
    ignore_index: int | None = None

    def train(self, data: Pair, seed: int) -> Posterior:
        """Train with learned decays, and return the posterior."""
        torch.manual_seed(seed)
        model = self.make()
        loader = Batches(*data, self.batch_size, shuffle=True, seed=seed)
        learner = PriorLearner(
            self.likelihood,
            CurvatureOptions(fisher=self.fisher, ignore_index=self.ignore_index),
            epochs=self.epochs,
            learn_sigma_noise=self.likelihood == "regression",
        )
        optimizer = self._optimizer([*model.parameters()])
        posterior = OnlineTraining(model, optimizer, loader, learner).run().laplace
        model.eval()
        return posterior

    def retrain(self, posterior: Posterior, data: Pair, seed: int) -> nn.Module:
        """Train another network with the learned δ and σ, on some of the training data."""
        torch.manual_seed(seed)
        model = self.make()
        names = posterior.fitted_factors().blocks
        delta = posterior.prior_precision.expand(len(names)).tolist()
        of_name = dict(zip(names, delta, strict=True))
        # The optimiser's loss is σ² times the mean objective: decay = σ² δ / M.
        scale = float(posterior.sigma_noise) ** 2 / len(data[1])
        groups = [
            {"params": [p], "weight_decay": scale * of_name[name]}
            for name, p in model.named_parameters()
        ]
        optimizer, average = self._optimizer(groups), averaged_model(model)
        loader = Batches(*data, self.batch_size, shuffle=True, seed=seed)
        likelihood = likelihood_of(self.likelihood)
        for _ in range(self.epochs):
            for x, y in loader:
                assert isinstance(x, Tensor)
                optimizer.zero_grad()
                (loss_sum(model(x), y, likelihood) / len(y)).backward()
                optimizer.step()
                average.update_parameters(model)
        return average.module.eval()

    def _optimizer(self, groups: list[Any]) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(groups, self.lr)
        return torch.optim.SGD(groups, self.lr, momentum=0.9, nesterov=True)


def _tanh(columns: int) -> Callable[[], nn.Module]:
    return lambda: MLP(columns, (50,), 1, "tanh")


def _small(head: str) -> Callable[[], nn.Module]:
    return lambda: convolutions(no_norm, head)


def _digits_mlp() -> nn.Module:
    return mlp(64, 10, no_norm)


def _regression(data: Data, columns: int, epochs: int, repeats: int) -> Task:
    return Task(
        data, _tanh(columns), epochs, "regression", "adam", 0.01, batch_size=50, repeats=repeats
    )


TASKS = {
    "digits, MLP": Task(_digits(600), _digits_mlp, 20, batch_size=50),
    "digits, convolutions": Task(_digits(500), _small("flattened"), 30),
    "digits, convolutions, 20 % wrong": Task(_digits(500, 0.2), _small("flattened"), 30),
    "CIFAR-2 (JPEG), ResNet-9": Task(_two_classes(1000), lambda: resnet9(2), 20, lr=0.02),
    "UCI concrete": _regression(_uci("concrete"), 8, 40, 1),
    "diabetes": _regression(
        _table(lambda seed: load_diabetes(return_X_y=True), 342), 10, 40, 2
    ),
    "Friedman": _regression(
        _table(lambda seed: make_friedman1(600, random_state=seed), 400), 10, 60, 2
    ),
    "DART, GPT": Task(
        _dart, lambda: GPT(256, 32, 32, 2, 2, tied=False), 20, optimizer="adam", lr=0.003,
        fisher="mc", ignore_index=IGNORED,
    ),
}  # fmt: skip
"""All tasks; see `linear_datamodeling.MEASURED`."""
