"""Trainings by several optimisers: curves, the search for settings, seconds of a step.

Shared by the studies that train with K-FAC. Curves count steps. Their seconds come from
`seconds_of_steps`, which alternates the methods in one process, so that they meet the same load.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim import SGD, AdamW, Muon, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from experiments.studies import Result
from experiments.timing import interleaved
from kfac_backend.optimizer import KFAC, KfacPreconditioner, PreconditionerOptions
from kfac_backend.options import Mode
from marglik.application.data.splits import SplitName, Splits, split_batches
from marglik.eval_mode import eval_mode
from marglik.posterior.prior import parameter_kind

BaseName = Literal["nesterov", "adamw", "nadamw", "muon", "soap", "shampoo", "kfac"]


def categorical_loss(f: Tensor, y: Tensor) -> Tensor:
    """Mean over the labels that are not ignored; one label per example or per position."""
    return cross_entropy(f.flatten(0, -2), y.flatten())


def bernoulli_loss(f: Tensor, y: Tensor) -> Tensor:
    """Mean over all examples, which have one target each."""
    return binary_cross_entropy_with_logits(f[:, 0], y.to(f.dtype))


@dataclass(frozen=True)
class Problem:
    """Data, network and loss; seeds change initialisation and order, not the data."""

    title: str
    load: Callable[[], Splits]
    make_model: Callable[[], nn.Module]
    likelihood: str
    batch_size: int
    metric: str = "loss"
    """Metric of the target: "loss", "accuracy" or "average precision" on validation data."""
    scalar_lr_factor: float = 1.0
    """Factor on the learning rate of parameters with a single entry."""
    loss: Callable[[Tensor, Tensor], Tensor] = categorical_loss
    """Mean of −log p(y|f)."""


@dataclass(frozen=True)
class Method:
    """An optimiser with its fixed settings; `Candidate` has those that are searched."""

    title: str
    base: BaseName
    kfac_approx: Mode | None = None
    """Mode of K-FAC's preconditioner before this optimiser; None for no preconditioner."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the preconditioner, except its damping."""
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    pace: float = 1.0
    """Factor on the schedule's warm-up and steps."""
    max_norm: float | None = None
    """Norm to which the gradient of all parameters is clipped before K-FAC; None for no limit."""


@dataclass(frozen=True)
class Candidate:
    """Settings that are searched."""

    lr: float
    damping: float | None = None
    """Damping of K-FAC; None without it."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate over steps: a linear warm-up, then a decay to ``end`` times the highest."""

    steps: int
    warmup: int
    shape: Literal["cosine", "linear"] = "cosine"
    """Form of the decay; linear is AlgoPerf's polynomial of degree 1."""
    end: float = 0.0
    fall: float = 1.0
    """Share of the steps after the warm-up in which the rate decays; constant from then on."""

    def times(self, pace: float) -> "Schedule":
        """The schedule with warm-up and steps multiplied by a factor."""
        return replace(self, steps=round(pace * self.steps), warmup=round(pace * self.warmup))

    def factor(self, step: float) -> float:
        """Factor on the highest learning rate at a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        share = min(1.0, (step - self.warmup) / (self.fall * (self.steps - self.warmup)))
        left = (1 + math.cos(math.pi * share)) / 2 if self.shape == "cosine" else 1 - share
        return self.end + (1 - self.end) * left


# One training


class Training:
    """A network with its optimiser, and one step of both."""

    def __init__(
        self,
        problem: Problem,
        splits: Splits,
        method: Method,
        candidate: Candidate,
        seed: int,
        schedule: Schedule,
    ) -> None:
        torch.manual_seed(seed)
        self.model = problem.make_model()
        self.loss = problem.loss
        self.max_norm = method.max_norm
        groups = _groups(self.model, candidate.lr, problem.scalar_lr_factor)
        if method.base == "kfac":
            kfac = KFAC(self.model, problem.likelihood, candidate.lr, params=groups, seed=seed)
            self.optimizers: list[Optimizer] = [kfac]
        else:
            self.optimizers = _optimizers(method, self.model, groups, candidate.lr)
        self.preconditioner = None
        if method.kfac_approx is not None:
            assert candidate.damping is not None
            self.preconditioner = KfacPreconditioner(
                self.model,
                problem.likelihood,
                PreconditionerOptions(damping=candidate.damping, **method.options),
                kfac_approx=method.kfac_approx,
                seed=seed,
            )
        self.peak_lr = candidate.lr
        self.schedulers = [LambdaLR(o, schedule.factor) for o in self.optimizers]
        loader = split_batches(splits, "train", problem.batch_size, shuffle=True, seed=seed)
        self.batches = _full_batches(loader, problem.batch_size)

    def step(self) -> Tensor:
        """Take a step; returns the loss of the batch before it.

        Raises:
            FloatingPointError: if factors or gradients are not finite.
        """
        x, y = next(self.batches)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        if self.preconditioner is not None:
            self.preconditioner.step(lr=self.peak_lr)
        for optimizer in self.optimizers:
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # SOAP's first step has no update
            for scheduler in self.schedulers:
                scheduler.step()
        return loss.detach()


def curve(
    problem: Problem,
    splits: Splits,
    method: Method,
    candidate: Candidate,
    seed: int,
    schedule: Schedule,
    measure_every: int,
    validates: bool = True,
) -> Result:
    """Lists over measurements: step, train loss since the last, validation loss and metrics.

    A training that diverges ends early. Unless it ``validates``, only the last measurement is on
    validation data, too.
    """
    started = time.process_time()
    training = Training(problem, splits, method, candidate, seed, schedule)
    curves: dict[str, list[float]] = {"step": [], "train loss": []}
    losses: list[Tensor] = []
    diverged: str | None = None
    step = 0
    try:
        for step in range(1, schedule.steps + 1):
            losses.append(training.step())
            if step % measure_every and step != schedule.steps:
                continue
            mean = torch.stack(losses).mean().item()
            if not math.isfinite(mean):
                raise FloatingPointError(f"The loss is {mean}.")
            losses.clear()
            measured = {"step": step, "train loss": mean}
            if validates or step == schedule.steps:
                measured |= measure(problem, splits, training.model, "validation")
            if not math.isfinite(measured.get("loss", 0.0)):
                raise FloatingPointError(f"The validation loss is {measured['loss']}.")
            for key, value in measured.items():
                curves.setdefault(key, []).append(value)
    except (FloatingPointError, torch.linalg.LinAlgError) as error:
        diverged = f"step {step}: {error}"
    test = None if diverged else measure(problem, splits, training.model, "test")
    # Processor seconds, measurements included: the cost of the study, not a comparison.
    seconds = time.process_time() - started
    return {**curves, "test": test, "diverged": diverged, "processor_seconds": seconds}


def measure(
    problem: Problem, splits: Splits, model: nn.Module, split: SplitName
) -> dict[str, float]:
    """Mean loss (nats), and accuracy or average precision."""
    pairs = []
    with torch.no_grad(), eval_mode(model):
        for x, y in split_batches(splits, split, 256):
            pairs.append((model(x), y))
    f, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    metrics = {"loss": problem.loss(f, y).item()}
    if problem.likelihood == "classification":
        counted = y >= 0
        metrics["accuracy"] = (f.argmax(-1) == y)[counted].float().mean().item()
    elif problem.metric == "average precision" and torch.isfinite(f).all():
        metrics["average precision"] = float(average_precision_score(y.numpy(), f[:, 0].numpy()))
    return metrics


def _full_batches(loader: Any, size: int) -> Iterator[Any]:
    """Yield full batches without end; a smaller one at the end of the data is left out."""
    while True:
        for x, y in loader:
            if len(y) == size:
                yield x, y


def _groups(model: nn.Module, lr: float, scalar_lr_factor: float) -> list[dict[str, Any]]:
    scalars, others = [], []
    for p in model.parameters():
        is_scalar = scalar_lr_factor != 1 and parameter_kind(p) == "scalars"
        (scalars if is_scalar else others).append(p)
    rates = ((others, 1.0), (scalars, scalar_lr_factor))
    return [{"params": params, "lr": lr * factor} for params, factor in rates if params]


def _optimizers(
    method: Method, model: nn.Module, groups: list[dict[str, Any]], lr: float
) -> list[Optimizer]:
    decay = method.weight_decay
    if method.base == "nesterov":
        return [SGD(groups, lr, method.momentum, nesterov=True, weight_decay=decay)]
    if method.base == "adamw":
        return [AdamW(groups, lr, method.betas, weight_decay=decay)]
    if method.base == "nadamw":
        return [NAdam(groups, lr, method.betas, weight_decay=decay, decoupled_weight_decay=True)]
    if method.base == "muon":
        # For weight matrices; embeddings, biases, norms and scalars are AdamW's, as Muon's
        # documentation asks for.
        embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in model.parameters() if p.dim() > 1 and p not in embeddings]
        left = [{**g, "params": [p for p in g["params"] if p not in set(matrices)]} for g in groups]
        others = [group for group in left if group["params"]]
        return [
            MuonOfKernels(matrices, lr, decay),
            AdamW(others, lr, method.betas, weight_decay=decay),
        ]
    # Only these methods need it.
    import pytorch_optimizer  # pyright: ignore[reportMissingImports]

    if method.base == "soap":
        return [
            pytorch_optimizer.SOAP(
                groups, lr, method.betas, weight_decay=decay, precondition_frequency=10
            )
        ]
    # The norm of each layer's step is RMSProp's, as grafting in Anil et al. 2020 has it. The plain
    # Shampoo of the library has no such norm, and sums its statistics without forgetting.
    return [
        pytorch_optimizer.ScalableShampoo(
            groups,
            lr,
            method.betas,
            moving_average_for_momentum=True,
            weight_decay=decay,
            decoupled_weight_decay=True,
            start_preconditioning_step=10,
            preconditioning_compute_steps=10,
            graft_type=3,
        )
    ]


class MuonOfKernels(Muon):
    """torch's Muon, for which a kernel (C_out, C_in, h, w) is the matrix (C_out, C_in h w).

    As in Jordan's own code; torch's takes two axes alone. With adjust_lr_fn="match_rms_adamw" one
    learning rate serves Muon and AdamW.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        # parameter -> a matrix in the same memory
        self._matrices = {p: nn.Parameter(p.detach().flatten(1)) for p in parameters}
        matrices = list(self._matrices.values())
        super().__init__(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the model's parameters."""
        for p in self._matrices:
            p.grad = None

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A step on the matrices, by the gradients of the parameters."""
        for p, matrix in self._matrices.items():
            matrix.grad = None if p.grad is None else p.grad.flatten(1)
        super().step()


# Time


@dataclass(frozen=True)
class Timing:
    """Timing of methods' steps, which take turns."""

    study: str
    problem: str
    methods: tuple[str, ...]
    block: int
    """Steps timed in a row; a multiple of all intervals."""
    blocks: int = 7

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"{self.problem}_{self.methods[0]}_timing".replace(" ", "_")


def seconds_of_steps(
    problem: Problem, methods: Mapping[str, Method], config: Timing
) -> dict[str, dict[str, float]]:
    """Processor seconds of a step: median and quartiles over blocks; the methods take turns."""
    splits = problem.load()
    # The settings do not matter for time; small ones cannot diverge.
    candidate, schedule = Candidate(1e-6, 1.0), Schedule(10**6, 0)
    trainings = {
        name: Training(problem, splits, methods[name], candidate, 0, schedule)
        for name in config.methods
    }

    def block(training: Training) -> Callable[[], object]:
        return lambda: [training.step() for _ in range(config.block)]

    blocks = {name: block(training) for name, training in trainings.items()}
    measured = interleaved(blocks, config.blocks, torch.device("cpu"), "processor")
    quartiles = {
        name: statistics.quantiles([s / config.block for s in seconds], n=4)
        for name, seconds in measured.items()
    }
    keys = ("low", "median", "high")
    return {name: dict(zip(keys, q, strict=True)) for name, q in quartiles.items()}
