"""The curvature pass and the evidence update on WRN-16-4 Fixup: ours, the peers, and the limit.

The limit of a batch is one forward pass and V backward passes to the inputs only, with frozen
weights in channels_last: V = 9 for the exact GGN of ten classes, V = 1 for one Monte Carlo sample.
All contenders take turns within one run and their medians are compared, so that ratios hold on a
noisy machine. All is in float32 with CIFAR-10 shapes and all 50 tensors; the peers have those that
they can take.

Each part is a JSON file in ``results/bench_curvature_DEVICE/``:

- batch_32, batch_128: every contender, and peak memory.
- growth: how the time of a batch grows with its size, and with the network's width, the images'
  size and the number of classes.
- evidence: eigenvalues and 100 steps on 50 precisions, ours against laplace-torch's.
- update_50000: our whole update with all of CIFAR-10's images, on a GPU.
- sizes: how a pass on a GPU depends on batch size, memory format and precision.

``python -m experiments.speed.bench_curvature`` runs the missing parts in half an hour on two cores.
"""

import statistics
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, get_args

import torch
from laplace import KronLaplace as LaplaceTorchKronLaplace
from laplace.curvature import CurvlinopsGGN
from laplace.utils import Kron
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from experiments.speed.contenders import (
    PEERS,
    Work,
    limit,
    network,
    one_batch_alone,
    ours,
    peer,
    training_step,
)
from experiments.studies import Result, markdown, study
from experiments.timing import interleaved, medians, peak_memory
from kfac_backend import kronecker_factors
from kfac_backend.laplace_torch.interface import KfacGGN
from kfac_backend.options import KfacApprox, Mode
from kfac_backend.precision import BackwardPrecision, backward_arithmetic, full_float32
from marglik import KronLaplace
from marglik.posterior.prior import Hyperparameters, PriorGroups, update_prior

MODES: tuple[Mode, ...] = get_args(Mode)
GROWTH = {
    "batch_size": ("batch size", (8, 32, 128, 256)),
    "width": ("width of the network", (1, 2, 4, 8)),
    "image_size": ("pixels a side", (16, 32, 48)),
    "num_classes": ("classes", (2, 10, 30)),
}


@dataclass(frozen=True)
class Config:
    """Sizes and number of the measurements."""

    batch_size: int = 32
    width: int = 4
    image_size: int = 32
    num_classes: int = 10
    repetitions: int = 7
    seed: int = 0
    device: str = "cpu"


class Batch:
    """A batch of noise, and networks for it."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.seed)
        self.config, self.device = config, torch.device(config.device)
        size = (config.image_size, config.image_size)
        self.x = torch.randn(config.batch_size, 3, *size, device=self.device)
        self.y = torch.randint(config.num_classes, (config.batch_size,), device=self.device)

    def network(self, channels_last: bool = False) -> torch.nn.Module:
        """A new network of the configuration."""
        return network(self.device, self.config.width, self.config.num_classes, channels_last)

    def limit(self, fisher: str) -> Work:
        """The limit for a kind of Fisher."""
        vectors = self.config.num_classes - 1 if fisher == "exact" else 1
        return limit(self.network(channels_last=True), self.x, vectors)

    def contender(self, make: Callable[..., Work], *args: Any, **options: Any) -> Work:
        """A contender on a new network."""
        return make(*args, self.network(), self.x, self.y, **options)


def run_batch(config: Config) -> dict[str, Any]:
    """Seconds of all contenders on one batch, their ratios to the limit, and peak memory."""
    batch = Batch(config)
    work: dict[str, Work] = {
        "training step": batch.contender(training_step),
        "limit, exact": batch.limit("exact"),
        "limit, mc": batch.limit("mc"),
    }
    for fisher, mode in product(("exact", "mc"), MODES):
        options, kind = {"kfac_approx": mode, "fisher": fisher}, f"{mode}, {fisher}"
        work[f"ours, {kind}"] = batch.contender(ours, **options)
        work[f"ours alone, {kind}"] = batch.contender(one_batch_alone, **options)
        work[f"KfacGGN, {kind}"] = batch.contender(peer, KfacGGN, **options)
        for name, backend in PEERS.items():
            if name != "asdl" or mode == "expand":
                work[f"{name}, {kind}"] = batch.contender(peer, backend, **options)
    fast = "bf16" if batch.device.type == "cpu" else "tf32"
    for mode in MODES:
        options = {"kfac_approx": mode, "backward_precision": fast}
        work[f"ours {fast}, {mode}, exact"] = batch.contender(ours, **options)
    result = _measured(config, work)
    watched = [n for n in work if n.startswith(("training step", "limit,", "ours alone", *PEERS))]
    result["peak_mebibytes"] = {n: peak_memory(work[n], batch.device) / 2**20 for n in watched}
    return result


def run_growth(config: Config) -> dict[str, Any]:
    """Seconds of a batch at each value of each axis of `GROWTH`; other values as configured."""
    growth: dict[str, list[dict[str, Any]]] = {axis: [] for axis in GROWTH}
    for axis, (_, values) in GROWTH.items():
        for value in values:
            batch = Batch(replace(config, **{axis: value}))
            work = {"limit, exact": batch.limit("exact")}
            for mode in MODES:
                options = {"kfac_approx": mode, "fisher": "exact"}
                work[f"ours, {mode}, exact"] = batch.contender(ours, **options)
                work[f"curvlinops, {mode}, exact"] = batch.contender(
                    peer, PEERS["curvlinops"], **options
                )
            seconds = _measured(batch.config, work)["median_seconds"]
            growth[axis].append({axis: value, "median_seconds": seconds})
    return {"growth": growth}


STEPS = 100


def evidence_work(model: nn.Module, kfac_approx: KfacApprox) -> tuple[Work, Work]:
    """An update of one precision per tensor at the same factors: ours, laplace-torch's."""
    device = next(model.parameters()).device
    data = [(torch.randn(32, 3, 32, 32, device=device), torch.randint(10, (32,), device=device))]
    fitted = KronLaplace(model, "classification", kfac_approx=kfac_approx)
    fitted.fit(data)
    assert fitted.factors is not None
    factors, state = fitted.factors, fitted.state_dict()

    def ours() -> None:
        # Blocks keep their eigenvalues: new ones, on the same factors.
        fitted.load_state_dict(state)
        groups = PriorGroups.from_model(model)
        Hyperparameters(groups, 1.0).update(fitted.evidence_terms, STEPS, 1.0)

    kfacs = [[F for F in (block.B, block.A) if F is not None] for block in factors.blocks.values()]

    def theirs() -> None:
        peer = LaplaceTorchKronLaplace(model, "classification", backend=CurvlinopsGGN)
        learned = [p for p in model.parameters() if p.requires_grad]
        peer.mean = parameters_to_vector(learned).detach()
        peer.loss, peer.n_outputs = factors.loss, factors.num_outputs
        peer.n_data = int(factors.num_data)
        peer.H_facs = Kron(kfacs)  # pyright: ignore
        peer.H = peer.H_facs.decompose()
        log_delta = torch.zeros(len(learned), device=device, requires_grad=True)
        optimizer = torch.optim.Adam([log_delta], lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            evidence: Tensor = peer.log_marginal_likelihood(log_delta.exp())
            (-evidence).backward()
            optimizer.step()

    return ours, theirs


def update(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], **options: Any
) -> dict[str, float]:
    """An update of one precision per tensor as in the online loop; returns seconds of its parts."""
    hyperparameters = Hyperparameters(PriorGroups.from_model(model), 1.0)
    laplace = KronLaplace(model, "classification", **options)
    num_data = sum(len(x) for x, _ in batches)
    _, record = update_prior(hyperparameters, laplace, batches, num_data, STEPS)
    return record["seconds"]


def run_evidence(config: Config) -> dict[str, Any]:
    """Seconds of eigenvalues and 100 hyperparameter steps, ours and laplace-torch's."""
    work = {}
    for mode in MODES:
        mine, theirs = evidence_work(network(torch.device(config.device)), mode)
        work[f"ours, {mode}"], work[f"laplace-torch, {mode}"] = mine, theirs
    return _measured(config, work)


def run_update(config: Config) -> dict[str, Any]:
    """Seconds of our updates for 50,000 images, and of their parts."""
    made = [Batch(replace(config, seed=i)) for i in range(50_000 // config.batch_size)]
    batches = [(batch.x, batch.y) for batch in made]
    parts: dict[str, list[dict[str, float]]] = {}
    work: dict[str, Work] = {}
    for mode, tf32 in product(MODES, (False, True)):
        name = f"ours, TF32, channels_last, {mode}" if tf32 else f"ours, {mode}"
        options: dict[str, Any] = {"kfac_approx": mode}
        if tf32:
            options["backend_kwargs"] = {"backward_precision": "tf32"}
        model = made[0].network(channels_last=tf32)
        # Proofs and the device's preparations belong only to the first update of a training.
        update(model, batches[:2], **options)
        parts[name] = []
        work[name] = lambda n=name, m=model, o=options: parts[n].append(update(m, batches, **o))
    return _measured(config, work) | {"seconds_of_parts": parts}


def run_sizes(config: Config) -> dict[str, Any]:
    """Seconds of 500 images of a pass, and peak memory, for several kinds of batches."""
    device = torch.device(config.device)
    seconds: dict[str, float] = {}
    peak: dict[str, float] = {}
    for N, last, precision, mode in product(
        (128, 500, 1000), (False, True), ("float32", "tf32"), MODES
    ):
        batch = Batch(replace(config, batch_size=N))
        x = batch.x.clone(memory_format=torch.channels_last) if last else batch.x
        options = {"kfac_approx": mode, "backward_precision": precision}
        work = ours(batch.network(channels_last=last), x, batch.y, **options)
        name = f"{N} images, {'channels_last' if last else 'contiguous'}, {precision}, {mode}"
        seconds[name] = medians(interleaved({name: work}, config.repetitions, device))[name]
        seconds[name] *= 500 / N
        peak[name] = peak_memory(work, device) / 2**20
    return {"seconds_of_500_images": seconds, "peak_mebibytes": peak}


PASS = 4096, (32, 128, 512, 2048)
"""Images of a pass, and its batches."""


def run_passes(config: Config) -> dict[str, Any]:
    """Seconds of a pass over noise by default options, in batches of several sizes.

    Beside the limit of the same batches, in float32 and in TF32 (on a GPU alone).
    """
    on_gpu = config.device == "cuda"
    precisions: tuple[BackwardPrecision, ...] = ("float32", "tf32") if on_gpu else ("float32",)
    rows: list[dict[str, Any]] = []
    for N, fisher in product(PASS[1], ("exact", "mc")):
        batch = Batch(replace(config, batch_size=N))
        data = [(batch.x, batch.y)] * (PASS[0] // N)
        one_limit = batch.limit(fisher)
        work: dict[str, Work] = {
            f"limit, {p}": partial(_repeated, one_limit, len(data), p) for p in precisions
        }
        for mode in MODES:
            model, options = batch.network(), {"kfac_approx": mode, "fisher": fisher}
            work[mode] = partial(kronecker_factors, model, data, "classification", **options)
        seconds = medians(interleaved(work, config.repetitions, batch.device))
        rows.append({"batch": N, "fisher": fisher, "seconds": seconds})
    return {"passes": rows}


def _repeated(work: Work, times: int, precision: BackwardPrecision) -> None:
    """Do it several times in a precision."""
    with full_float32(), backward_arithmetic(precision):
        for _ in range(times):
            work()


PARTS: dict[str, tuple[Callable[[Config], dict[str, Any]], dict[str, int]]] = {
    "batch_32": (run_batch, {}),
    "batch_128": (run_batch, {"batch_size": 128, "repetitions": 3}),
    "growth": (run_growth, {"repetitions": 2}),
    "evidence": (run_evidence, {}),
    "update_50000": (run_update, {"batch_size": 1000, "repetitions": 1}),
    "sizes": (run_sizes, {"repetitions": 3}),
    "passes": (run_passes, {"repetitions": 3}),
}
"""Name of a part -> its function, and changes of the configuration."""
ON_GPU = ("update_50000", "sizes", "passes")
"""Parts that are left out on a CPU."""


@dataclass(frozen=True)
class Part:
    """A part on a device."""

    name: str
    device: str


def run_part(part: Part) -> dict[str, Any]:
    """Measure a part."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module="laplace")
    function, differs = PARTS[part.name]
    config = replace(Config(device=part.device), **differs)
    return {"config": asdict(config), **function(config)}


def _measured(config: Config, work: dict[str, Work]) -> dict[str, Any]:
    device = torch.device(config.device)
    measured = interleaved(work, config.repetitions, device, warm_up=config.repetitions > 1)
    median = medians(measured)
    ratios = {
        name: value / median[f"limit, {fisher}"]
        for name, value in median.items()
        if f"limit, {(fisher := name.rsplit(', ')[-1])}" in median
    }
    return {"median_seconds": median, "times_the_limit": ratios, "seconds": measured}


# Tables and the figure, from JSON alone

LABELS = {
    "ours": "**marglik**",
    "ours bf16": "marglik, backward in bf16",
    "ours tf32": "marglik, backward in TF32",
    "ours alone": "marglik, factors of each batch",
    "KfacGGN": "laplace-torch + marglik's KfacGGN",
    "curvlinops": "laplace-torch + curvlinops",
    "asdl": "laplace-torch + ASDL",
}
STYLES = {
    "limit, exact": ("limit", "0.5", ":"),
    "ours, expand, exact": ("marglik, expand", "C0", "-"),
    "ours, reduce, exact": ("marglik, reduce", "C1", "-"),
    "curvlinops, expand, exact": ("curvlinops, expand", "C0", "--"),
    "curvlinops, reduce, exact": ("curvlinops, reduce", "C1", "--"),
}


def tables(results: list[Result]) -> str:
    """The finished parts as Markdown."""
    parts = {part["name"]: part for part in results}
    text = []
    for name in ("batch_32", "batch_128"):
        if name in parts:
            peak = parts[name]["peak_mebibytes"].items()
            memory = [["peak memory", "MiB"], *([work, f"{value:.0f}"] for work, value in peak)]
            text += [f"{name[6:]} images", batch_table(parts[name]), markdown(memory)]
    if "update_50000" in parts:
        text.append(_update(parts["update_50000"]))
    if "sizes" in parts:
        part = parts["sizes"]
        rows = [["500 images of a pass", "seconds", "peak, MiB"]]
        for name, value in part["seconds_of_500_images"].items():
            peak = part["peak_mebibytes"].get(name)
            rows.append([name, f"{value:.3f}", "" if peak is None else f"{peak:.0f}"])
        text.append(markdown(rows))
    if "passes" in parts:
        passes = parts["passes"]["passes"]
        names = list(passes[0]["seconds"])
        rows = [[f"{PASS[0]} images, by default, in batches of", *names]]
        for row in passes:
            seconds = [f"{row['seconds'][name]:.2f}" for name in names]
            rows.append([f"{row['batch']}, {row['fisher']}", *seconds])
        text.append(markdown(rows))
    if "evidence" in parts:
        seconds = parts["evidence"]["median_seconds"].items()
        rows = [["eigenvalues and 100 steps", "seconds"]]
        text.append(markdown([*rows, *([name, f"{value:.2f}"] for name, value in seconds)]))
    return "\n\n".join(text)


def batch_table(batch: Mapping[str, Any]) -> str:
    """A batch's medians as Markdown, one row for each contender and mode."""
    seconds, ratios = batch["median_seconds"], batch["times_the_limit"]
    rows = [["", "exact GGN", "times the limit", "1 MC sample", "times the limit"]]
    for (name, label), mode in product(LABELS.items(), MODES):
        kinds = [f"{name}, {mode}, {fisher}" for fisher in ("exact", "mc")]
        if any(kind in seconds for kind in kinds):
            cells = [
                [f"{seconds[kind]:.2f} s", f"{ratios[kind]:.2f}"] if kind in seconds else ["", ""]
                for kind in kinds
            ]
            rows.append([f"{label}, {mode}", *cells[0], *cells[1]])
    of_limit = [[f"{seconds[f'limit, {fisher}']:.2f} s", "1"] for fisher in ("exact", "mc")]
    return markdown([*rows, ["the limit", *of_limit[0], *of_limit[1]]])


def _update(part: Mapping[str, Any]) -> str:
    """Seconds of whole updates, and of their parts."""
    keys = ("pass", "eigenvalues", "steps")
    rows = [["update from 50,000 images, batches of 1000", "seconds", *keys]]
    for name, value in part["median_seconds"].items():
        own = part["seconds_of_parts"][name]
        cells = [f"{statistics.median(p[key] for p in own):.2f}" for key in keys]
        rows.append([name, f"{value:.2f}", *cells])
    return markdown(rows)


def figures(results: list[Result]) -> dict[str, Figure]:
    """Seconds of a batch over each axis of growth, on logarithmic axes."""
    growth = next((part["growth"] for part in results if part["name"] == "growth"), None)
    if growth is None:
        return {}
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    axes = figure.subplots(1, len(growth), sharey=True, squeeze=False)[0]
    for (axis, points), ax in zip(growth.items(), axes, strict=True):
        values = [point[axis] for point in points]
        for name, (label, color, style) in STYLES.items():
            seconds = [point["median_seconds"][name] for point in points]
            ax.loglog(values, seconds, style, color=color, marker="o", ms=3, label=label)
        ax.set_xticks(values, [str(value) for value in values])
        ax.minorticks_off()
        ax.set_xlabel(GROWTH[axis][0])
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("seconds a batch, exact GGN")
    ticks = (0.1, 0.3, 1, 3, 10, 30)
    axes[0].set_yticks(ticks, [str(tick) for tick in ticks])
    axes[0].legend(fontsize=8)
    return {"growth": figure}


main = study(
    "bench_curvature_{device}",
    __doc__,
    run_part,
    lambda options: [
        Part(name, options.device)
        for name in options.data
        if options.device != "cpu" or name not in ON_GPU
    ],
    tables,
    problems=PARTS,
    extra={"--device": {"default": "cpu", "help": "cpu or cuda; default: cpu"}},
    figures=figures,
    threads=None,
)

if __name__ == "__main__":
    sys.exit(main())
