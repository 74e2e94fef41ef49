"""Rivals of the Laplace predictive for classification, each a function that returns a predictive.

All get the same `Task`: network, data, epochs, and held-out data for their choices.
A `Rival` is called like `marglik.map_predictive`'s result and also tells what it cost.

- `map_network`: one network with a default or a chosen weight decay; most others start from it.
- `temperature_scaled`: any of them with its outputs divided by τ (Guo et al. 2017).
- `deep_ensemble`: five networks (Lakshminarayanan et al. 2017, arXiv:1612.01474).
- `mc_dropout`: dropout that stays on (Gal & Ghahramani 2016, arXiv:1506.02142).
- `laplace_torch`: laplace-torch as it comes, all layers or the last.

Seconds are CPU time of the process, which other programs on the machine hardly change. Seconds of
candidates that were not chosen are counted apart ("search").
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kfac_backend.model.calls import call_with
from kfac_backend.options import Likelihood
from marglik.data.batches import Batches
from marglik.eval_mode import in_eval_mode
from marglik.prediction.evaluation import predict_all
from marglik.prediction.links import Prediction, predict_from_outputs
from marglik.prediction.metrics import compute_metrics
from marglik.prediction.predictive import Predictive, map_predictive
from marglik.training.optimizers import OptimizerConfig, build_optimizer

__all__ = [
    "Rival",
    "Task",
    "best_temperature",
    "deep_ensemble",
    "laplace_torch",
    "map_network",
    "mc_dropout",
    "mixture_predictive",
    "temper",
    "tempered",
    "temperature_scaled",
    "with_dropout",
]

TEMPERATURES = (0.02, 50.0)
"""Range in which τ is searched. Held-out data without a single error would give τ = 0."""


@dataclass(frozen=True)
class Task:
    """The task that every rival is given.

    Args:
        make_model: makes a new network, whose initial parameters follow torch's global seed.
        make_loader: makes training batches in the random order of a seed.
        held_out: batches for all choices and temperatures; no network is trained on them.
        epochs: number in one training.
        optimizer: of one training; the learning rate falls by a cosine.
        weight_decay: where it is not chosen; coupled, so that the objective is the mean loss plus
            ½ weight_decay ‖θ‖².
        samples: networks in MC dropout.
        seed: of everything.
    """

    make_model: Callable[[], nn.Module]
    make_loader: Callable[[int], Batches]
    held_out: Iterable[Any]
    epochs: int
    optimizer: OptimizerConfig = OptimizerConfig()  # noqa: RUF009
    weight_decay: float = 5e-4
    samples: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Rival:
    """A predictive, the choices made for it on held-out data, and its cost."""

    predict: Predictive
    model: nn.Module
    training_seconds: float
    """Seconds of the training with the chosen hyperparameters, including that of its start."""
    search_seconds: float = 0.0
    """Seconds of all other candidates, including the held-out evaluations."""
    chosen: Mapping[str, float] = field(default_factory=dict)
    likelihood: Likelihood = "classification"

    def __call__(self, x: Any) -> Prediction:
        """The prediction for a batch of inputs."""
        return self.predict(x)


# Temperature


def best_temperature(prediction: Prediction, targets: Tensor) -> float:
    """τ at which the probabilities ∝ p^(1/τ) have the lowest NLL.

    For one network p^(1/τ) is the softmax of its logits over τ. The NLL is convex in 1/τ.

    Args:
        prediction: class probabilities of held-out data.
        targets: its labels.
    """
    from scipy.optimize import minimize_scalar

    log_p = _log(prediction.mean.double())
    low, high = map(math.log, TEMPERATURES)
    found: Any = minimize_scalar(
        lambda log_tau: cross_entropy(log_p / math.exp(log_tau), targets).item(),
        bounds=(low, high),
        method="bounded",
        options={"xatol": 1e-4},
    )
    return math.exp(found.x)


def temper(prediction: Prediction, temperature: float) -> Prediction:
    """The class probabilities raised to 1/τ, and normalised.

    The uncertainty is the new probabilities' entropy, divided in the same shares as before.
    """
    mean = torch.softmax(_log(prediction.mean) / temperature, -1)
    entropy, before = torch.special.entr(mean).sum(-1), prediction.total
    share = torch.where(before > 0, prediction.epistemic / before, torch.zeros_like(entropy))
    return Prediction(mean, (1 - share) * entropy, share * entropy)


def tempered(
    predict: Predictive, batches: Iterable[Any], temperature: float | None = None
) -> Rival:
    """A predictive whose predictions are tempered, see `temper`.

    Args:
        predict: any classification predictive of ours or of this module.
        batches: held-out data, on which τ is chosen.
        temperature: τ; None chooses it.

    Raises:
        ValueError: if the likelihood is not classification.
    """
    likelihood = getattr(predict, "likelihood", "classification")
    if likelihood != "classification":
        raise ValueError(f"tempered is for classification, not {likelihood!r}; scale σ instead.")
    started = time.process_time()
    tau = temperature or best_temperature(*predict_all(predict, batches))

    def scaled(x: Any) -> Prediction:
        return temper(predict(x), tau)

    if not isinstance(predict, Rival):
        predict = Rival(predict, getattr(predict, "model", nn.Identity()), 0.0)
    search = predict.search_seconds + time.process_time() - started
    chosen = {**predict.chosen, "temperature": tau}
    return replace(predict, predict=scaled, search_seconds=search, chosen=chosen)


def temperature_scaled(task: Task, start: Rival) -> Rival:
    """Temperature scaling (Guo et al. 2017, arXiv:1706.04599, sec. 4.2) of a trained network."""
    return tempered(start, task.held_out)


# One network and several


def map_network(task: Task, weight_decays: Sequence[float] | None = None) -> Rival:
    """One network at its MAP, with the task's weight decay, or the best of several."""
    if weight_decays is None:
        return _network(task, task.weight_decay, task.seed)
    return _best(
        task,
        [(lambda w=w: _network(task, w, task.seed), {"weight_decay": w}) for w in weight_decays],
    )


def deep_ensemble(task: Task, start: Rival, members: int = 5) -> Rival:
    """The mean of the probabilities of networks that differ in their seeds.

    ``start`` is the first of them; the others have its weight decay.
    """
    weight_decay = start.chosen.get("weight_decay", task.weight_decay)
    others = [_network(task, weight_decay, task.seed + 1000 * i) for i in range(1, members)]
    networks = [_state(rival.model) for rival in (start, *others)]
    return Rival(
        mixture_predictive(start.model, networks),
        start.model,
        start.training_seconds + sum(other.training_seconds for other in others),
        start.search_seconds,
        start.chosen,
    )


def mixture_predictive(model: nn.Module, networks: Sequence[Mapping[str, Tensor]]) -> Predictive:
    """Networks of equal weight, of one architecture, given by their parameters and buffers."""

    @torch.no_grad()
    def predict(x: Any) -> Prediction:
        outputs = torch.stack([call_with(model, dict(network), x) for network in networks])
        return predict_from_outputs(outputs, "classification")

    return in_eval_mode(model, predict)


# Dropout


def with_dropout(model: nn.Module, p: float) -> nn.Module:
    """The network with dropout before every linear and convolutional layer but the first.

    Changes it in place. Source of the places: Gal & Ghahramani 2016, sec. 3 (every weight layer;
    the first is left out, so that no input is hidden).
    """
    found = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    ]
    if len(found) < 2:
        raise ValueError(f"{type(model).__name__} has no second linear or convolutional layer.")
    for parent, name, layer in found[1:]:
        setattr(parent, name, nn.Sequential(nn.Dropout(p), layer))
    return model


def mc_dropout(
    task: Task,
    start: Rival,
    probabilities: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.4),
) -> Rival:
    """Dropout that stays on: the mean over random masks. p is chosen, the weight decay ``start``'s.

    The masks follow a seed, and so, unlike with the other rivals, the batches.
    """
    weight_decay = start.chosen.get("weight_decay", task.weight_decay)

    def fit(p: float) -> Rival:
        variant = replace(task, make_model=lambda: with_dropout(task.make_model(), p))
        network = _network(variant, weight_decay, task.seed)
        model = network.model
        layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]

        @torch.no_grad()
        def predict(x: Any) -> Prediction:
            for layer in layers:
                layer.train()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(task.seed)
                outputs = torch.stack([model(x) for _ in range(task.samples)])
            return predict_from_outputs(outputs, "classification")

        return replace(network, predict=in_eval_mode(model, predict))

    candidates = [(lambda p=p: fit(p), {"dropout": p}) for p in probabilities]
    return _with_search(_best(task, candidates), start)


# laplace-torch


def laplace_torch(
    task: Task, start: Rival, subset_of_weights: Literal["all", "last_layer"] = "all"
) -> Rival:
    """laplace-torch as it comes: Kronecker factors by its own backend, its prior, link probit.

    It has one prior precision by its marginal likelihood, post hoc. It does not divide the
    uncertainty, so all of it counts as aleatoric.
    """
    from kfac_backend.laplace_torch.kron import laplace as package  # which takes seconds

    started = time.process_time()
    model = copy.deepcopy(start.model)
    with warnings.catch_warnings():
        # The link is given with each call.
        warnings.filterwarnings("ignore", "By default `link_approx`")
        laplace: Any = package.Laplace(model, "classification", subset_of_weights, "kron")
        laplace.fit(task.make_loader(task.seed))
        laplace.optimize_prior_precision(method="marglik")

    def predict(x: Any) -> Prediction:
        mean = laplace(x, link_approx="probit")
        entropy = torch.special.entr(mean).sum(-1)
        return Prediction(mean.detach(), entropy.detach(), torch.zeros_like(entropy))

    return Rival(
        in_eval_mode(model, predict),
        model,
        start.training_seconds + time.process_time() - started,
        start.search_seconds,
        {**start.chosen, "prior_precision": float(laplace.prior_precision.mean())},
    )


# What the rivals share


def _network(task: Task, weight_decay: float, seed: int) -> Rival:
    """Train a network from scratch; the seed is for its start, its order of data, its dropout."""
    started = time.process_time()
    torch.manual_seed(seed)
    model = task.make_model()
    loader = task.make_loader(seed)
    optimizer, scheduler = build_optimizer(model, task.optimizer, task.epochs * len(loader))
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    for _ in range(task.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            for p in parameters:
                assert p.grad is not None
                # Coupled, also for Adam: that is the MAP.
                p.grad.add_(p.detach(), alpha=weight_decay)
            optimizer.step()
            scheduler.step()
    seconds = time.process_time() - started
    return Rival(map_predictive(model), model, seconds, chosen={"weight_decay": weight_decay})


def _best(
    task: Task,
    candidates: Sequence[tuple[Callable[[], Rival], Mapping[str, float]]],
) -> Rival:
    """The candidate with the lowest held-out NLL; its search has the others' seconds.

    Args:
        task: has the held-out data.
        candidates: functions that make them, with the choices that they stand for.
    """
    started = time.process_time()
    best, lowest = None, math.inf
    for make, chosen in candidates:
        rival = make()
        prediction, y = predict_all(rival, task.held_out)
        if not prediction.mean.isfinite().all():
            continue  # diverged
        nll = compute_metrics(prediction, y, "classification")["cls/NLL"]
        if nll < lowest:
            best, lowest = replace(rival, chosen={**rival.chosen, **chosen}), nll
    if best is None:
        raise FloatingPointError("Every candidate diverged; lower the learning rate.")
    search = time.process_time() - started - best.training_seconds
    return replace(best, search_seconds=search)


def _with_search(rival: Rival, start: Rival) -> Rival:
    """The rival with the search and the choices of its start added."""
    return replace(
        rival,
        search_seconds=rival.search_seconds + start.search_seconds,
        chosen={**start.chosen, **rival.chosen},
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
