"""The paper's trainings at its size: figures 3 to 5 with MLCommons AlgoPerf's settings.

We have never run these trainings at this size. The tests run them on a few made-up molecules and
images. `steps_to_target` has the same studies at a size for two cores, and the paper's numbers.

- molpcba, figure 3: a graph network on ogbg-molpcba, which the package ogb downloads. Target: a
  mean average precision of .28098. One GPU; 60,000 steps of 512 molecules.
- imagenet, figure 4: ViT-S/16 on ImageNet, from a folder train/CLASS/IMAGE and val/CLASS/IMAGE.
  Target: an accuracy of .77309. Four GPUs; 140,000 steps of 1,024 images.
- imagenet_every_step, figure 5: the same with factors at each step. The paper gives the learning
  rate as about 2e-3, and no warm-up; here it is 5 % of the steps.

One command is one training. It ends at the target or after the last step, and continues from its
checkpoint if it is called again, with any number of ranks::

    python -m experiments.optimizers.paper_scale --workload molpcba --method reduce --seed 1
    torchrun --nproc-per-node 4 -m experiments.optimizers.paper_scale --workload imagenet \
        --method expand --seed 1 --data /data/imagenet --workers 12

Learning rate and damping are those of the paper. ``--trial K`` takes point K of the paper's search
instead (log-uniform, 15 trials); the control, the reference with the shorter schedule, needs it.
``--report`` makes the table of all trainings in the folder.

Differences to the paper: its search is random, and ours quasi-random. PyTorch's own operations
augment the images. A batch has 512 molecules, where AlgoPerf packs about as many into a fixed
number of nodes. The preconditioner is ours, and the paper's is ASDL's.
"""

import argparse
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, distributed, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset

from experiments.data.algoperf import ImageData, molpcba
from experiments.models.algoperf import ImageTransformer, MoleculeNetwork
from experiments.optimizers.steps_to_target import STUDIES, quasi_random_search
from experiments.optimizers.training import Candidate, Method, Schedule
from experiments.studies import Result, markdown, mean_with_error
from kfac_backend.atomic_files import write_file
from kfac_backend.optimizer import KfacPreconditioner, PreconditionerOptions
from marglik.eval_mode import eval_mode
from marglik.storage.environment import environment
from marglik.storage.record_files import write_json

NEVER_RUN = "We have never run this training at the paper's size."


# Losses and metrics


def property_loss(f: Tensor, y: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """Σ −log p(y|f) over the known properties, and their number."""
    losses = binary_cross_entropy_with_logits(f, y, reduction="none")
    return (losses * x.known).sum(), x.known.sum()


def image_loss(f: Tensor, y: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """Σ −log p(y|f) over images with shares y (N, C) of the classes, and their number."""
    return -(y * f.log_softmax(-1)).sum(), f.new_tensor(len(f))


def mean_average_precision(f: Tensor, y: Tensor, known: Tensor) -> float:
    """Mean over the properties that have both values, of the molecules where they are known."""
    precisions = [
        average_precision_score(y[k, c].numpy(), f[k, c].numpy())
        for c, k in enumerate(known.unbind(1))
        if 0 < y[k, c].sum() < k.sum()
    ]
    return float(np.mean(precisions))


def accuracy(f: Tensor, y: Tensor, known: Tensor) -> float:
    """Share of images whose class has the largest output."""
    return (f.argmax(-1) == y.argmax(-1)).float().mean().item()


# The workloads


@dataclass(frozen=True)
class Workload:
    """A training of AlgoPerf, with the paper's settings."""

    study: str
    """The study of `steps_to_target` that has its methods."""
    load: Callable[[str], Any]
    """From a folder to data as in `experiments.data.algoperf`."""
    make_model: Callable[[], nn.Module]
    likelihood: str
    loss: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
    """From outputs, targets and inputs to the sum of the losses and the number of terms."""
    metric: Callable[[Tensor, Tensor, Tensor], float]
    target: float
    batch_size: int
    schedule: Schedule
    measure_every: int
    """Steps between measurements of the validation data."""
    candidates: Mapping[str, Candidate]
    """The paper's learning rate and damping by method."""
    lr: tuple[float, float]
    """Range of learning rates of the search."""
    damping: tuple[float, float]

    @property
    def methods(self) -> Mapping[str, Method]:
        """The methods; the first is the reference."""
        return STUDIES[self.study].methods


IMAGENET = Workload(
    "vision_transformer_training", ImageData, ImageTransformer, "classification", image_loss,
    accuracy, 0.77309, 1024, Schedule(140_000, 6_999), 2_000,
    {
        "nadamw": Candidate(0.0008445074561975979),
        "expand": Candidate(0.0012662938340704357, 0.00016524019235426572),
        "reduce": Candidate(0.0012662938340704357, 0.00016524019235426572),
    },
    lr=(1e-4, 1e-2),
    damping=(1e-4, 1e-2),
)  # fmt: skip
EVERY_STEP = {"expand": Candidate(2e-3, 1e-5), "reduce": Candidate(2e-3, 1e-5)}
WORKLOADS = {
    "molpcba": Workload(
        "graph_network_loss", molpcba, MoleculeNetwork, "bernoulli", property_loss,
        mean_average_precision, 0.28098, 512,
        Schedule(60_000, 3_000, "linear", end=1e-3, fall=0.861509027839639), 500,
        {
            "nesterov": Candidate(2.4917728606918423),
            "expand": Candidate(9.96871902194967, 0.7881965339190345),
            "reduce": Candidate(0.5885756514016359, 0.0579230193904011),
        },
        lr=(0.1, 10.0),
        damping=(1e-3, 1.0),
    ),
    "imagenet": IMAGENET,
    "imagenet_every_step": replace(
        IMAGENET,
        study="vision_transformer_every_step",
        schedule=Schedule(140_000, 7_000),
        candidates={"nadamw": Candidate(2e-3), **EVERY_STEP},
    ),
}  # fmt: skip
TRIALS = 15


@dataclass(frozen=True)
class Config:
    """One training."""

    workload: str
    method: str
    candidate: Candidate
    seed: int
    trial: int | None = None
    steps: int | None = None
    """Steps of the schedule before the method's pace; None for the paper's."""
    workers: int = 0

    @property
    def name(self) -> str:
        """The name of its files, without their endings."""
        kind = f"seed{self.seed}" if self.trial is None else f"trial{self.trial}_seed{self.seed}"
        return f"{self.workload}_{self.method}_{kind}".replace(" ", "_")

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree in."""
        return {k: v for k, v in asdict(self).items() if k != "workers"}


class NAdamW(Optimizer):
    """Adam with Nesterov's momentum and decoupled weight decay, as AlgoPerf has it.

    torch's NAdam raises its momentum over the steps, and this one doesn't. With g at step t,
    m ← β₁m + (1 − β₁)g and v ← β₂v + (1 − β₂)g², a step is θ ← θ − η (m̂ / (√v̂ + ε) + wd θ) with
    m̂ = (β₁m + (1 − β₁)g) / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ). Source: Dozat 2016.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step."""
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["t"] += 1
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].lerp_(p.grad.square(), 1 - b2)
                m = state["m"].lerp(p.grad, 1 - b1) / (1 - b1 ** state["t"])
                v = state["v"] / (1 - b2 ** state["t"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * m / (v.sqrt() + 1e-8))


# One training


class Steps(Dataset[Any]):
    """A rank's part of the batch of each step; what is random depends on seed and step alone."""

    def __init__(self, data: Any, size: int, seed: int, rank: int, ranks: int) -> None:
        self._data, self._size, self._seed = data, size, seed
        self._part = slice(size * rank // ranks, size * (rank + 1) // ranks)
        self._rank, self._ranks = rank, ranks

    def __getitem__(self, step: int) -> Any:
        per_epoch = self._data.sizes[0] // self._size
        epoch, number = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(self._seed * 100_003 + epoch)
        order = torch.randperm(self._data.sizes[0], generator=generator)
        indices = order[number * self._size :][: self._size][self._part]
        seed = (self._seed * 10_000_019 + step) * self._ranks + self._rank
        return self._data.batch(indices, seed % 2**31)


def sum_of_ranks(value: Tensor, ranks: int) -> Tensor:
    """The sum over ranks of a number."""
    if ranks > 1:
        distributed.all_reduce(value)
    return value


@torch.no_grad()
def measure(
    model: nn.Module, workload: Workload, data: Any, rank: int, ranks: int, size: int = 512
) -> float:
    """The metric on the validation data, of which each rank runs a part."""
    outputs, number = [], data.sizes[1]
    device = next(model.parameters()).device
    with eval_mode(model):
        for indices in torch.arange(number).tensor_split(ranks)[rank].split(size):
            x, y = data.validation(indices)
            known = getattr(x, "known", torch.ones_like(y, dtype=torch.bool))
            outputs.append((model(x.to(device)).cpu(), y, known))
    of_ranks: list[Any] = [outputs]
    if ranks > 1:
        of_ranks = [None] * ranks
        distributed.all_gather_object(of_ranks, outputs)
    parts = zip(*(one for of_rank in of_ranks for one in of_rank), strict=True)
    return workload.metric(*(torch.cat(part) for part in parts))


def run(config: Config, folder: Path, data: str, checkpoint_every: int = 1_000) -> Result | None:
    """Train, or continue, until the target or the last step; the first rank writes the result.

    Returns:
        The result; None on other ranks.

    Raises:
        ValueError: the checkpoint belongs to a training with other settings, or the ranks do not
            divide the batch.
    """
    workload = WORKLOADS[config.workload]
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if workload.batch_size % ranks:
        raise ValueError(
            f"A batch of {workload.batch_size} cannot be divided by {ranks} ranks. Choose a "
            "number of ranks that divides it."
        )
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if has_gpu else 0)
    device = device if has_gpu else torch.device("cpu")
    if ranks > 1 and not distributed.is_initialized():
        distributed.init_process_group("nccl" if has_gpu else "gloo")
    # The first rank downloads and prepares the data, and the others read what it left.
    source: Any = workload.load(data) if rank == 0 else None
    if ranks > 1:
        distributed.barrier()
    source = workload.load(data) if source is None else source
    method, schedule = workload.methods[config.method], workload.schedule
    if config.steps is not None:
        share = config.steps / schedule.steps
        schedule = replace(schedule, steps=config.steps, warmup=round(share * schedule.warmup))
    schedule = schedule.times(method.pace)
    torch.manual_seed(config.seed)
    model = workload.make_model().to(device)
    shared: nn.Module = DistributedDataParallel(model) if ranks > 1 else model
    lr, damping = config.candidate.lr, config.candidate.damping
    if method.base == "nesterov":
        optimizer: Optimizer = SGD(
            model.parameters(), lr, method.momentum, nesterov=True,
            weight_decay=method.weight_decay,
        )  # fmt: skip
    else:
        optimizer = NAdamW(model.parameters(), lr, method.betas, method.weight_decay)
    preconditioner = None
    if method.kfac_approx is not None:
        assert damping is not None
        preconditioner = KfacPreconditioner(
            model, workload.likelihood, PreconditionerOptions(damping=damping, **method.options),
            kfac_approx=method.kfac_approx, seed=config.seed,
        )  # fmt: skip
    checkpoint = folder / f"{config.name}.pt"
    start, seconds, curve = 0, 0.0, list[dict[str, float]]()
    if checkpoint.exists():
        state = torch.load(checkpoint, device, weights_only=True)
        if state["identity"] != config.identity:
            raise ValueError(
                f"'{checkpoint}' belongs to a training with the settings {state['identity']}, not "
                f"{config.identity}. Choose another folder, or delete it."
            )
        start, seconds, curve = state["step"], state["seconds"], state["curve"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if preconditioner is not None:
            preconditioner.load_state_dict(state["preconditioner"])
    batches = DataLoader(
        Steps(source, workload.batch_size, config.seed, rank, ranks),
        batch_size=None,
        sampler=range(start, schedule.steps),  # pyright: ignore[reportArgumentType]
        num_workers=config.workers,
    )
    clock = time.perf_counter()
    reached = any(one["metric"] >= workload.target for one in curve)
    for step, (x, y) in enumerate(batches, start) if not reached else ():
        # Dropout, too, depends on the step alone, so that a resumed training goes on as it would.
        torch.manual_seed((config.seed * 1_000_003 + step) * ranks + rank)
        loss = _step(workload, shared, optimizer, preconditioner, method, config.candidate,
                     schedule.factor(step), x.to(device), y.to(device), ranks)  # fmt: skip
        is_last = step + 1 == schedule.steps
        if (step + 1) % workload.measure_every == 0 or is_last:
            if not torch.isfinite(loss):
                raise FloatingPointError(f"The loss is {loss.item()} at step {step + 1}.")
            seconds += time.perf_counter() - clock
            metric = measure(model, workload, source, rank, ranks)
            curve.append({"step": step + 1, "metric": metric, "seconds": seconds})
            reached = metric >= workload.target
            if rank == 0:
                print(f"step {step + 1:,}: {metric:.5f}, {seconds:.0f} s", flush=True)
            clock = time.perf_counter()
        if (step + 1) % checkpoint_every == 0 or is_last or reached:
            seconds += time.perf_counter() - clock
            of_kfac = None if preconditioner is None else preconditioner.state_dict()
            state = {
                "identity": config.identity, "step": step + 1, "seconds": seconds, "curve": curve,
                "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "preconditioner": of_kfac,
            }  # fmt: skip
            if rank == 0:
                content = io.BytesIO()
                torch.save(state, content)
                write_file(checkpoint, content.getvalue())
            clock = time.perf_counter()
        if reached:
            break
    if rank:
        return None
    result = {
        "config": asdict(config), **environment(device), "method": asdict(method), "ranks": ranks,
        "target": workload.target, "reached_at": curve[-1] if reached else None, "curve": curve,
    }  # fmt: skip
    write_json(folder / f"{config.name}.json", result)
    return result


def _step(
    workload: Workload,
    model: nn.Module,
    optimizer: Optimizer,
    preconditioner: KfacPreconditioner | None,
    method: Method,
    candidate: Candidate,
    factor: float,
    x: Any,
    y: Tensor,
    ranks: int,
) -> Tensor:
    """A step with ``factor`` times the highest learning rate; returns the batch's loss of a rank.

    AlgoPerf's loss is a mean over the T terms, such as the known properties of all molecules, and
    the curvature of the preconditioner is that of a mean over the N examples. With F the latter,
    (N/T F + λ)⁻¹ of the gradient of the one is (F + T/N λ)⁻¹ of the gradient of the other.
    """
    optimizer.zero_grad()
    total, terms = workload.loss(model(x), y, x)
    T = sum_of_ranks(terms.detach().to(total), ranks)
    number = T if preconditioner is None else T.new_tensor(workload.batch_size)
    # DDP takes the mean over ranks.
    loss = total * ranks / number
    loss.backward()
    if method.max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), method.max_norm)
    if preconditioner is not None:
        assert candidate.damping is not None
        preconditioner.damping = candidate.damping * float(T / number)
        preconditioner.step()
    for group in optimizer.param_groups:
        group["lr"] = factor * candidate.lr
    optimizer.step()
    return loss.detach()


# The table and the command


def table(results: Sequence[Result]) -> str:
    """Steps and hours to the target by workload and method, over the seeds that reach it."""
    text = [NEVER_RUN.replace("this training", "these trainings at the time of writing")]
    for name, workload in WORKLOADS.items():
        rows = [["", "reached by", "steps", "hours", "steps, %", "time, %", "paper: steps", "%"]]
        base: dict[str, float] = {}
        for method, settings in workload.methods.items():
            seeds = [
                r for r in results
                if (r["config"]["workload"], r["config"]["method"]) == (name, method)
                and r["config"]["trial"] is None
            ]  # fmt: skip
            if not seeds:
                continue
            ends = [r["reached_at"] for r in seeds if r["reached_at"]]
            cells = ["–", "–", "–", "–"]
            if ends:
                means = {k: statistics.fmean(e[k] for e in ends) for k in ("step", "seconds")}
                base = base or (means if method == next(iter(workload.methods)) else {})
                shares = [f"{100 * means[k] / base[k]:.0f}" if base else "–" for k in means]
                cells = [
                    mean_with_error([e["step"] for e in ends], "{:,.0f}"),
                    mean_with_error([e["seconds"] / 3600 for e in ends], "{:.2f}"),
                    *shares,
                ]
            paper = STUDIES[workload.study].paper[method][:2]
            rows.append([settings.title, f"{len(ends)} of {len(seeds)}", *cells, *paper])
        if len(rows) > 1:
            text += [f"## {name}", f"Target: {workload.target}.", markdown(rows)]
    return "\n\n".join(text)


def candidate_of(options: argparse.Namespace, workload: Workload) -> Candidate:
    """The paper's settings, those of a trial, or those that the options give.

    Raises:
        ValueError: the paper has none for this method.
    """
    is_kfac = workload.methods[options.method].kfac_approx is not None
    candidate = workload.candidates.get(options.method)
    if options.trial is not None:
        candidate = quasi_random_search(workload.lr, workload.damping, TRIALS)[options.trial]
    lr = options.lr or (candidate and candidate.lr)
    damping = (options.damping or (candidate and candidate.damping)) if is_kfac else None
    if lr is None or (is_kfac and damping is None):
        raise ValueError(
            f"The paper has no settings for '{options.method}' of {options.workload}. Pass "
            "--trial, or --lr and --damping."
        )
    return Candidate(lr, damping)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one training, or make the table."""
    parser = argparse.ArgumentParser(
        description=f"{(__doc__ or '').splitlines()[0]} {NEVER_RUN} See the top of the file."
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="molpcba")
    parser.add_argument("--method", default="reduce", help="expand, reduce, or the reference")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--trial", type=int, choices=range(TRIALS), metavar="K", help=f"0 to {TRIALS - 1}"
    )
    parser.add_argument("--lr", type=float, help="default: the paper's")
    parser.add_argument("--damping", type=float, help="default: the paper's")
    parser.add_argument("--steps", type=int, help="shorter schedule; default: the paper's")
    parser.add_argument("--data", default="data", metavar="FOLDER", help="default: data")
    parser.add_argument("--workers", type=int, default=0, help="processes that prepare batches")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/paper_scale"), metavar="FOLDER",
        help="for checkpoints and results; default: runs/paper_scale",
    )  # fmt: skip
    parser.add_argument("--report", action="store_true", help="make the table from the results")
    options = parser.parse_args(arguments)
    if options.report:
        paths = sorted(options.output.glob("*.json"))
        text = table([json.loads(path.read_text("utf-8")) for path in paths])
        write_file(options.output / "table.md", f"{text}\n".encode())
        print(text)
        return 0
    workload = WORKLOADS[options.workload]
    if options.method not in workload.methods:
        parser.error(f"--method: choose one of {', '.join(workload.methods)}")
    try:
        candidate = candidate_of(options, workload)
    except ValueError as error:
        parser.error(str(error))
    config = Config(
        options.workload, options.method, candidate, options.seed, options.trial, options.steps,
        options.workers,
    )  # fmt: skip
    run(config, options.output, options.data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
