"""What commands share before their work: device, ranks, networks, and the check that all fits."""

import json
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from torch import Tensor, nn
from torch import distributed as dist

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.curvature import CurvaturePass
from kfac_backend.eigenvalue_correction import CorrectionPass
from kfac_backend.loss import check_targets
from kfac_backend.model.batches import Targets
from kfac_backend.options import Likelihood
from kfac_backend.ranks import RankError, Ranks
from marglik.augmentation import Transform
from marglik.data import DataSource, ImageSplits, Splits
from marglik.data.batches import split_batches
from marglik.data.tensors import described
from marglik.eval_mode import eval_mode
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import precision_to_weight_decay
from marglik.prediction.predictive import PredictiveConfig
from marglik.runs.config import Accelerator, CurvatureConfig, PostHocCurvatureConfig, Precision
from marglik.storage.checkpoint import differences
from marglik.storage.provenance import Provenance

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = [
    "another_network",
    "build_fabric",
    "build_from_spec",
    "calibration_results",
    "check_model",
    "check_same_on_ranks",
    "join_ranks",
    "posterior_results",
]

TRUSTED = ("marglik", "torchvision")
"""Packages whose classes a file may name."""
RANK_TIMEOUT = timedelta(minutes=10)
"""How long a process waits for another, before all end."""


def device_of(accelerator: Accelerator) -> torch.device:
    """The device that ``--accelerator`` names; "auto" takes the first GPU, if there is one.

    Raises:
        ValueError: a device that this machine does not have.
    """
    has_gpu = torch.cuda.is_available()
    if accelerator == "cuda" and not has_gpu:
        raise ValueError(
            "--accelerator cuda is not available on this machine: torch finds no CUDA device. "
            "Pass auto or cpu."
        )
    return torch.device("cpu") if accelerator == "cpu" or not has_gpu else torch.device("cuda", 0)


def build_fabric(accelerator: Accelerator, precision: Precision = "32-true") -> "Fabric":
    """A launched Fabric: device and precision of training steps, and torchrun's processes, if any.

    Commands that do not train use `join_ranks`, which imports Lightning only for several processes.

    Raises:
        ValueError: a device that this machine does not have, or more processes than GPUs.
    """
    device, started = device_of(accelerator), _started()
    from lightning.fabric import Fabric  # here, since importing Lightning takes seconds
    from lightning.fabric.strategies import DDPStrategy

    if started == 1:
        return Fabric(accelerator=device.type, devices=1, precision=precision)
    here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if device.type == "cuda" and here > gpus:
        raise ValueError(
            f"torchrun has started {here} processes, and this machine has {gpus} GPU(s). Start "
            f"{gpus} or less (--nproc-per-node), or pass --accelerator cpu."
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    fabric = Fabric(
        accelerator=device.type,
        devices=here,
        num_nodes=started // here,
        strategy=DDPStrategy(process_group_backend=backend, timeout=RANK_TIMEOUT),
        precision=precision,
    )
    for name in ("lightning.fabric", "lightning.pytorch"):  # no lines about the launch
        logging.getLogger(name).setLevel(logging.WARNING)
    fabric.launch()
    return fabric


def join_ranks(accelerator: Accelerator) -> tuple[torch.device, Ranks]:
    """The device of this process, and the ranks that it shares the work with, once it joined them.

    Raises:
        ValueError: as for `build_fabric`.
    """
    if _started() == 1:
        return device_of(accelerator), Ranks(None)
    return build_fabric(accelerator).device, Ranks()


def _started() -> int:
    """The number of processes that torchrun has started; 1 without torchrun."""
    by_torchrun = dist.is_available() and dist.is_torchelastic_launched()
    return int(os.environ["WORLD_SIZE"]) if by_torchrun else 1


def check_same_on_ranks(identity: dict[str, Any], ranks: Ranks) -> None:
    """Raise a RankError that names what differs, on all ranks, unless all run the same run."""
    first, *others = ranks.gather(json.loads(json.dumps(identity)), "the start")
    for rank, other in enumerate(others, 1):
        for name, here, there in differences(first, other):
            raise RankError(
                f"The processes were started differently: {name} is {here} on rank 0, {there} on "
                f"rank {rank}. Start all with the same command, data and versions."
            )


def build_from_spec(kind: type | tuple[type, ...], spec: Any, named: Collection[str] = ()) -> Any:
    """The object that ``{"class_path": ..., "init_args": {...}}`` describes.

    A specification comes from a file, perhaps a downloaded one, and importing a class runs code.
    So it may name networks and data sources of marglik and torchvision, and else what the user
    named. Arguments are plain values or specifications in turn; nothing in them is imported.

    Args:
        kind: the class, or alternative classes, that it must be an instance of.
        spec: the path of its class (or of a function that returns such an object, as torchvision
            has), and the arguments.
        named: paths of classes that the user named on the command line.

    Raises:
        ValueError: a class that may not or cannot be imported, or arguments that it does not take.
    """
    path = spec.get("class_path") if isinstance(spec, dict) else None
    try:
        found = _built(spec, named)
        if not isinstance(found, kind):
            raise TypeError("another kind of object is needed")
    except Exception as error:  # a class raises whatever its arguments lead to
        raise ValueError(f"{path} could not be built from its saved arguments: {error}.") from error
    return found


def _built(value: Any, named: Collection[str]) -> Any:
    if isinstance(value, list):
        return [_built(item, named) for item in value]
    if not isinstance(value, dict):
        return value
    if "class_path" not in value:
        return {key: _built(item, named) for key, item in value.items()}
    arguments = (value.get("init_args") or {}) | (value.get("dict_kwargs") or {})
    make = _maker(str(value["class_path"]), named)
    return make(**{name: _built(item, named) for name, item in arguments.items()})


def _maker(path: str, named: Collection[str]) -> Callable[..., Any]:
    """The class or function of that path, if it may be imported and makes networks or data."""
    package = path.partition(".")[0]
    if package not in TRUSTED and path not in named:
        raise ValueError(
            f"a file may only name classes of {' and '.join(TRUSTED)}, as importing others runs "
            f"their code. If you trust {path}, name it on the command line: --model {path} (or "
            "--data)"
        )
    module, _, name = path.rpartition(".")
    found = getattr(import_module(module), name)
    made = found if isinstance(found, type) else get_type_hints(found).get("return")
    if not (isinstance(made, type) and issubclass(made, (nn.Module, DataSource, Transform))):
        raise ValueError(f"{path} is no class of networks, data or transforms")
    return found


def another_network(provenance: Provenance) -> nn.Module:
    """A network of the same class and options as the first one, with other initial parameters."""

    def named(spec: Any) -> list[str]:
        """All classes that a specification names; the user did, on the command line."""
        inner = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else []
        own = [spec["class_path"]] if isinstance(spec, dict) and "class_path" in spec else []
        return own + [path for value in inner for path in named(value)]

    return build_from_spec(nn.Module, provenance.model, named=named(provenance.model))


def posterior_results(laplace: Posterior, initial: float) -> dict[str, Any]:
    """What a posterior says in the results of a run: noise, and each tensor's weight decay.

    Args:
        laplace: the posterior.
        initial: the weight decay that all groups started with.
    """
    gamma = laplace.effective_parameters()
    trainable = {n: p for n, p in laplace.model.named_parameters() if p.requires_grad}
    delta = laplace.prior_precision.expand(len(trainable))
    learned = precision_to_weight_decay(delta, laplace.n_data, laplace.temperature)
    is_regression = laplace.likelihood == "regression"
    return {
        "num_data": laplace.n_data,
        "sigma_noise": float(laplace.sigma_noise) if is_regression else None,
        "weight_decay": {
            name: {
                "initial": initial,
                "learned": learned[i].item(),
                "effective_parameters": gamma[i].item(),
                "parameters": p.numel(),
            }
            for i, (name, p) in enumerate(trainable.items())
        },
    }


def calibration_results(laplace: Posterior, config: PredictiveConfig) -> dict[str, Any] | None:
    """What calibration found for a predictive, with its name; None if it is not calibrated."""
    found = laplace.calibrations.get(config.label)
    return None if found is None else {"predictive": config.label} | found


def check_model(
    model: nn.Module,
    splits: Splits,
    curvature: CurvatureConfig | None,
    likelihood: Likelihood = "classification",
    predictive: PredictiveConfig | None = None,
) -> None:
    """Run two training examples through the network, the curvature pass and the predictive.

    Raises:
        ValueError: a network that cannot take the inputs, or does not return (N, C) with one output
            per class, or (N, R, C) for class labels (N, R); targets that do not fit the likelihood;
            a predictive that does not support such outputs.
        TypeError: class labels that are not integers.
        NotImplementedError: a layer without a K-FAC rule, or one that cannot predict.
    """
    x, y = next(iter(split_batches(splits, "train", 2)))
    parameter = next(model.parameters(), torch.empty(0))
    x, y = x.to(parameter.device), y.to(parameter.device)
    with eval_mode(model):
        # Before the forward pass, so that its error about layers without a rule comes first.
        curvature_pass = of_pass = None
        if curvature is not None:
            of_pass = curvature.options(splits.targets)
            curvature_pass = CurvaturePass(model, likelihood, of_pass, process_group=None)
        try:
            with torch.no_grad():
                f: Any = model(x.clone())  # a forward may change its input in place
        except (RuntimeError, IndexError, TypeError, AttributeError) as error:
            inputs = described(x)
            if isinstance(x, Tensor):
                inputs = f"inputs of shape {tuple(x.shape[1:])}"
            reason = str(error).rstrip(".")
            raise ValueError(
                f"{type(model).__name__} cannot take {inputs}: {reason}. Set the model's options "
                "to fit the data, or choose another model."
            ) from error
        _check_output(model, f, splits, y, likelihood)
        targets = Targets(likelihood, splits.targets)
        y = targets(model, x, y)
        check_targets(f, y, likelihood, may_ignore=targets.may_ignore)
        if predictive is not None:
            predictive.check_cost(f[0, ..., 0].numel(), f.shape[-1], likelihood)
        if curvature_pass is not None:
            curvature_pass.add(x, y)
            corrects = isinstance(curvature, PostHocCurvatureConfig) and curvature.corrected
            by_covariance = predictive is not None and predictive.method != "linearised"
            if not (corrects or by_covariance):
                return
            unit = _identities(curvature_pass.factors())
            if corrects:
                CorrectionPass(unit, model, of_pass, process_group=None).add(x, y)
            if predictive is not None and by_covariance:
                eigen = {name: block.decompose() for name, block in unit.blocks.items()}
                precision = {name: (block, block.spectrum(1.0)) for name, block in eigen.items()}
                covariance = OutputCovariance(model, precision)
                # One position and two outputs suffice to find uses that hooks cannot follow.
                first = torch.zeros(f.shape[:-1], dtype=torch.bool)
                first.view(len(f), -1)[:, 0] = True
                covariance(x, first, torch.arange(min(2, f.shape[-1])))


def _identities(factors: KroneckerFactors) -> KroneckerFactors:
    """The same factors as identities, which `decompose` recognises and needs no solver for."""

    def one(factor: Tensor) -> Tensor:
        return torch.diag_embed(torch.ones_like(factor[..., 0]))

    blocks = {
        name: replace(block, B=one(block.B), A=block.A if block.A is None else one(block.A))
        for name, block in factors.blocks.items()
    }
    return replace(factors, blocks=blocks)


def _check_output(
    model: nn.Module, f: Any, splits: Splits, y: Tensor, likelihood: Likelihood
) -> None:
    name, examples = type(model).__name__, len(y)
    if not isinstance(f, Tensor):
        raise ValueError(f"{name} returns {type(f).__name__}; logits are needed, a tensor.")
    shape = f"{name} returns shape {tuple(f.shape)} for {examples} examples"
    if isinstance(splits, ImageSplits):
        if f.shape != (examples, splits.num_classes):
            raise ValueError(
                f"{shape}, but {splits.name} has {splits.num_classes} classes; set "
                f"--model.num_classes {splits.num_classes}."
            )
        return
    # Sequences: one loss term for each position.
    several = likelihood == "classification" and y.dim() > 1
    if f.dim() != (y.dim() + 1 if several else 2) or len(f) != examples:
        needed = "(N, R, C) is needed for labels (N, R)" if several else "(N, C) is needed"
        if f.dim() == 1:
            needed += ", (N, 1) for one output: leave out squeeze(-1)"
        raise ValueError(f"{shape}; {needed}.")
    if splits.classes is not None and f.shape[-1] != len(splits.classes):
        raise ValueError(
            f"{shape}, but {splits.name} has {len(splits.classes)} classes; give the model "
            f"{len(splits.classes)} outputs."
        )
