"""Table 1 of Eschenhagen et al. 2023: seconds of one K-FAC step on WRN-16-4, by batch size.

The paper (V100, batch 128, 256, 512, 1024, 2048; factors and inverses in each step, one Monte Carlo
sample): expand .24, .38, .75, 1.36 s, out of memory; reduce .17, .24, .43, .63, 1.17 s.

Here the network is WRN-16-4 Fixup on noise of CIFAR-10's shape, in float32 with contiguous images.
The contenders are a step of plain SGD, our K-FAC steps in both modes and the peers'.
Further kinds of steps give the cost of factors every 10 and inverses every 50 steps. All contenders
of a batch size take turns in one run. A ratio is the median over rounds of a contender's seconds
divided by those of the SGD step of the same round.

Each contender takes a model, a WideResNetFixup (`contenders.network`), and a batch, and returns a
function that makes one step. The peers have no block for its scalars, which keep their plain
gradients; ours has a block for each.

``python -m experiments.speed.update_step_timing`` measures the missing batch sizes, an hour on an
idle machine.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.speed.contenders import Work, network, training_step
from experiments.studies import Result, markdown, study
from experiments.timing import interleaved, median_ratios, medians
from kfac_backend.optimizer import KfacPreconditioner, PreconditionerOptions
from kfac_backend.options import Mode

Contender = Callable[[nn.Module, Tensor, Tensor], Work]

DAMPING = 1e-2

MODES: tuple[Mode, ...] = get_args(Mode)
NEVER = 10**9
"""An interval so long that only the first step is due."""


def sgd(model: nn.Module, x: Tensor, y: Tensor) -> Work:
    """A step with Nesterov momentum, which all contenders take after the preconditioning."""
    return training_step(model, x, y, _nesterov(model.parameters()))


def marglik(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    kfac_approx: Mode,
    fisher: str = "mc",
    factor_every: int = 1,
    update_every: int = 1,
    counts_anew: bool = False,
) -> Work:
    """K-FAC, with new factors and a new preconditioner in each step unless said otherwise.

    ``counts_anew`` begins each step as the first, in which inverses are made for later ones, too.
    """
    options = PreconditionerOptions(
        damping=DAMPING,
        factor_every=factor_every,
        update_every=update_every,
        ema_decay=0.0,
        kl_clip=None,
    )
    preconditioner = KfacPreconditioner(
        model, "classification", options, kfac_approx=kfac_approx, fisher=fisher
    )

    def precondition() -> None:
        preconditioner.step()
        if counts_anew:
            preconditioner._step = 0

    return training_step(model, x, y, _nesterov(model.parameters()), precondition)


def asdl(model: nn.Module, x: Tensor, y: Tensor) -> Work:
    """ASDL's K-FAC, expand only, one Monte Carlo sample: `KfacGradientMaker`."""
    from asdl import FISHER_MC, KfacGradientMaker, PreconditioningConfig  # pyright: ignore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of each scalar that it does not support
        config = PreconditioningConfig(damping=DAMPING, data_size=len(x))
        maker = KfacGradientMaker(model, config, FISHER_MC)
    optimizer = _nesterov(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        f = maker.setup_model_call(model, x)
        maker.setup_loss_call(F.cross_entropy, f, y)
        maker.forward_and_backward()
        optimizer.step()

    return step


def curvlinops(model: nn.Module, x: Tensor, y: Tensor, kfac_approx: str) -> Work:
    """K-FAC of curvlinops and its inverse, one Monte Carlo sample, after a plain backward pass."""
    from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

    parameters = _without_scalars(model)

    def precondition() -> None:
        kfac = KFACLinearOperator(
            model,
            nn.CrossEntropyLoss(),
            parameters,
            [(x, y)],
            kfac_approx=kfac_approx,
            check_deterministic=False,
            num_per_example_loss_terms=1,
            num_data=len(x),
        )
        inverse = KFACInverseLinearOperator(kfac, damping=DAMPING, use_heuristic_damping=True)
        gradients = [p.grad for p in parameters if p.grad is not None]
        natural: Any = inverse @ gradients
        for p, gradient in zip(parameters, natural, strict=True):
            p.grad = gradient

    return training_step(model, x, y, _nesterov(model.parameters()), precondition)


def singd(model: nn.Module, x: Tensor, y: Tensor, kfac_approx: str) -> Work:
    """Inverse-free K-FAC (Lin et al. 2023): dense factors, empirical Fisher, an update each step.

    It takes no sample and no backward pass of its own; it has its own step with momentum.
    """
    from singd.optim.optimizer import SINGD  # pyright: ignore[reportMissingImports]

    parameters = _without_scalars(model)
    natural = SINGD(
        model, parameters, lr=1e-4, damping=DAMPING, T=1, lr_cov=1e-4, kfac_approx=kfac_approx
    )
    preconditioned = set(parameters)
    plain = _nesterov(p for p in model.parameters() if p not in preconditioned)

    def step() -> None:
        natural.zero_grad()
        plain.zero_grad()
        F.cross_entropy(model(x), y).backward()
        natural.step()
        plain.step()

    return step


def _without_scalars(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of convolutions and linear layers, for which the peers have blocks."""
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return [p for layer in layers for p in layer.parameters()]


OURS: dict[str, Contender] = {
    **{f"marglik, {mode}": partial(marglik, kfac_approx=mode) for mode in MODES},
    **{
        f"marglik, {mode}, empirical": partial(marglik, kfac_approx=mode, fisher="empirical")
        for mode in MODES
    },
}
"""New factors and a new preconditioner in each step; one Monte Carlo sample unless empirical."""


old_inverses = partial(marglik, factor_every=NEVER, update_every=NEVER)
new_factors = partial(marglik, factor_every=1, update_every=NEVER)
new_inverses = partial(marglik, factor_every=1, update_every=2, counts_anew=True)
PARTS: dict[str, Contender] = {
    "old inverses": partial(old_inverses, kfac_approx="reduce"),
    **{f"new factors, {mode}": partial(new_factors, kfac_approx=mode) for mode in MODES},
    **{f"new inverses, {mode}": partial(new_inverses, kfac_approx=mode) for mode in MODES},
}
"""Kinds of steps of a run that renews factors and inverses less often than each step."""


def _peers() -> dict[str, Contender]:
    peers: dict[str, Contender] = {}
    if find_spec("asdl"):
        peers["ASDL, expand"] = asdl
    for name, contender in (("curvlinops", curvlinops), ("singd", singd)):
        if find_spec(name):
            peers |= {f"{name}, {mode}": partial(contender, kfac_approx=mode) for mode in MODES}
    return peers


PEERS = _peers()
"""The installed peers. kfac-pytorch (KAISA) is left out: no package index has it."""


def _nesterov(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # The step is so small that the network hardly changes over the repetitions.
    return torch.optim.SGD(parameters, 1e-4, momentum=0.9, nesterov=True)


# The study

BATCHES = {"cpu": (128, 512), "cuda": (128, 256, 512, 1024, 2048)}
CONTENDERS: dict[str, Contender] = {"SGD": sgd, **OURS, **PARTS, **PEERS}
PAPER = {
    "expand": {128: 0.24, 256: 0.38, 512: 0.75, 1024: 1.36},
    "reduce": {128: 0.17, 256: 0.24, 512: 0.43, 1024: 0.63, 2048: 1.17},
}
"""Seconds of a step on a V100."""


@dataclass(frozen=True)
class Config:
    """Sizes and number of the measurements."""

    batch_size: int
    device: str = "cpu"
    repetitions: int = 5
    width: int = 4


def run(config: Config) -> Result:
    """Seconds of a step of each contender, and their ratios to the SGD step."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    device, N = torch.device(config.device), config.batch_size
    torch.manual_seed(0)
    x = torch.randn(N, 3, 32, 32, device=device)
    y = torch.randint(10, (N,), device=device)
    work, left_out = {}, {}
    for name, contender in CONTENDERS.items():
        step = contender(network(device, config.width), x, y)
        try:
            step()  # warms up, too
            work[name] = step
        except Exception as error:  # a peer may not take this model, or run out of memory
            if name not in PEERS:
                raise
            left_out[name] = f"{type(error).__name__}: {error}"
    measured = interleaved(work, config.repetitions, device, warm_up=False)
    ratios = median_ratios(measured, "SGD")
    return {
        "times_sgd": ratios,
        "amortised_times_sgd": {mode: amortised(ratios, mode) for mode in MODES},
        "median_seconds": medians(measured),
        "seconds": measured,
        "left_out": left_out,
    }


def amortised(ratios: Mapping[str, float], mode: str) -> float:
    """Mean ratio over the 50 steps from one inverse to the next; factors are new in every tenth."""
    total = 45 * ratios["old inverses"]
    total += 4 * ratios[f"new factors, {mode}"] + ratios[f"new inverses, {mode}"]
    return total / 50


def table(results: list[Result]) -> str:
    """Times divided by an SGD step's, and seconds beside the paper's; a column for each batch."""
    sizes = {part["config"]["batch_size"]: part for part in results}
    sizes = dict(sorted(sizes.items()))
    names = list(dict.fromkeys(name for part in results for name in part["times_sgd"]))

    def row(label: str, kind: str, name: str) -> list[str]:
        values = [part[kind] for part in sizes.values()]
        return [label, *(f"{v[name]:.2f}" if name in v else "" for v in values)]

    batches = [f"{N}" for N in sizes]
    every = "factors every 10 and inverses every 50 steps"
    rows = [["times an SGD step, batch", *batches]]
    rows += [row(f"marglik, {mode}, {every}", "amortised_times_sgd", mode) for mode in MODES]
    rows += [row(name, "times_sgd", name) for name in names if name != "SGD"]
    seconds = [["seconds, batch", *batches]]
    seconds += [row(name, "median_seconds", name) for name in ("SGD", *names[1:3])]
    for mode, of_paper in PAPER.items():
        cells = [f"{of_paper[N]:.2f}" if N in of_paper else "" for N in sizes]
        seconds.append([f"the paper (V100), {mode}", *cells])
    left_out = {name: why for part in sizes.values() for name, why in part["left_out"].items()}
    missing = [f"{name}: left out ({why})." for name, why in left_out.items()]
    return "\n\n".join([markdown(rows), markdown(seconds), *missing])


main = study(
    "update_step_timing_{device}",
    __doc__,
    run,
    lambda options: [Config(size, options.device) for size in BATCHES[options.device]],
    table,
    extra={"--device": {"choices": BATCHES, "default": "cpu"}},
    threads=None,
)

if __name__ == "__main__":
    sys.exit(main())
