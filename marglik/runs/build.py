"""What commands share before their work: device, ranks, networks, and the check that all fits."""

import json
import logging
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from torch import Tensor, nn
from torch import distributed as dist

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.curvature import CurvaturePass
from kfac_backend.engine.task import Task
from kfac_backend.extras import extra
from kfac_backend.likelihoods import Likelihood, likelihood_of
from marglik.augmentation import Affine, Color, Flip, LearnedAugmentation, Transform
from marglik.data.batches import split_batches
from marglik.data.splits import DataSource, Splits, described, tensors_in
from marglik.eval_mode import eval_mode
from marglik.models import Standardised
from marglik.prediction.predictive import PredictiveConfig
from marglik.runs.config import Accelerator, CurvatureConfig, Precision
from marglik.storage.provenance import Provenance
from marglik.training.loop import OneDevice

if TYPE_CHECKING:
    from lightning.fabric import Fabric

OURS = ("marglik.augmentation", "marglik.data", "marglik.models")
"""Modules whose public classes a file may name, as it may name the networks of torchvision.models.
"""
MAY_BE_BUILT = (nn.Module, DataSource, Transform)
OF_PATHS = ("path", "root")
"""Arguments of our classes that are paths."""
OF_DOWNLOADS = ("download", "pretrained", "weights")
"""How arguments begin by which classes of ours and of torchvision download files."""
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


def build_fabric(
    accelerator: Accelerator, precision: Precision = "32-true"
) -> "Fabric | OneDevice":
    """A launched Fabric: device and precision of training steps, and torchrun's processes, if any.

    For one process in full precision, what does the same without Lightning.

    Raises:
        ValueError: a device that this machine does not have, or more processes than GPUs.
    """
    device, by_torchrun = (
        device_of(accelerator),
        dist.is_available() and dist.is_torchelastic_launched(),
    )
    started = int(os.environ["WORLD_SIZE"]) if by_torchrun else 1
    if started == 1 and precision == "32-true":
        return OneDevice(device)
    with extra("lightning"):
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


def build_from_spec(
    kind: type | tuple[type, ...],
    spec: Any,
    named: Collection[str] | None = (),
    folder: Path | None = None,
) -> Any:
    """The object that ``{"class_path": ..., "init_args": {...}}`` describes.

    A specification comes from a file, perhaps a downloaded one, and building an object runs code,
    reads files and may fetch some. So a file may ask for little: the public classes of `OURS`, the
    networks of torchvision.models, and classes that the user named; for files in its own folder
    alone; and for no download. What else it asks for, the user has to pass. Arguments are plain
    values or specifications in turn; nothing in them is imported.

    Args:
        kind: the class, or alternative classes, that it must be an instance of.
        spec: the path of its class (or of a function that returns such an object, as torchvision
            has), and the arguments.
        named: paths of classes that the user named on the command line; None if the whole
            specification is the user's, and may ask for anything.
        folder: the folder of the file.

    Raises:
        ValueError: a class that may not or cannot be imported, or arguments that it does not take
            or a file may not ask for.
    """

    def made(value: Any) -> Any:
        if isinstance(value, list):
            return [made(item) for item in value]
        if not isinstance(value, dict) or "class_path" not in value:
            is_nested = isinstance(value, dict)
            return {key: made(item) for key, item in value.items()} if is_nested else value
        path = str(value["class_path"])
        is_named = named is None or path in named
        if not is_named and not _is_known(path):
            raise ValueError(
                f"a file may only name classes of {', '.join(OURS)} and torchvision.models, as "
                f"importing others runs their code. If you trust {path}, name it on the command "
                f"line: --model {path} (or --data)"
            )
        module, _, name = path.rpartition(".")
        make = getattr(import_module(module), name)
        returns = make if isinstance(make, type) else get_type_hints(make).get("return")
        if not (isinstance(returns, type) and issubclass(returns, MAY_BE_BUILT)):
            raise ValueError(f"{path} is no class of networks, data or transforms")
        arguments = (value.get("init_args") or {}) | (value.get("dict_kwargs") or {})
        if named is not None and (asked := _asked_for(path, make, arguments, is_named, folder)):
            typed = _as_options("--model" if kind is nn.Module else "--data", spec)
            raise ValueError(
                f"{asked}, for which a file may not ask. If you trust it, pass the class with its "
                f"options: {typed}"
            )
        return make(**{name: made(item) for name, item in arguments.items()})

    path = spec.get("class_path") if isinstance(spec, dict) else None
    try:
        found = made(spec)
        if not isinstance(found, kind):
            raise TypeError("another kind of object is needed")
    except Exception as error:  # a class raises whatever its arguments lead to
        raise ValueError(f"{path} could not be built from its saved arguments: {error}.") from error
    return found


def _is_known(path: str) -> bool:
    """Whether a class is one that any file may name."""
    module, _, name = path.rpartition(".")
    if module in OURS:
        return name in import_module(module).__all__
    if module != "torchvision.models":
        return False
    with extra("images"):
        from torchvision import models

    # Not those of its other functions that return networks: detectors fetch a backbone unasked.
    return isinstance(getattr(models, name, None), type) or name in models.list_models(models)


def _asked_for(
    path: str,
    make: Callable[..., Any],
    arguments: Mapping[str, Any],
    is_named: bool,
    folder: Path | None,
) -> str | None:
    """The first argument that asks for a file outside of the folder, or for a download.

    What a class that the user named does by default is the user's wish.
    """
    is_ours, defaults = _is_known(path), _defaults(make)
    for name, value in (arguments if is_named else defaults | dict(arguments)).items():
        if value is Parameter.empty or (is_named and name in defaults and value == defaults[name]):
            continue
        for text in _texts(value):
            is_path = name in OF_PATHS or (not is_ours and (os.sep in text or text[:1] == "~"))
            if is_path and not (folder and _is_inside(text, folder)):
                return f"{name}={text!r} is outside of the saved folder"
        if value and name.startswith(OF_DOWNLOADS) and (is_ours or isinstance(value, bool | str)):
            return f"{name}={value!r} is a download"
    return None


def _defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of a class's or a function's arguments; `Parameter.empty` of those without."""
    return {name: p.default for name, p in signature(make).parameters.items()}


def _texts(value: Any) -> Iterator[str]:
    """A text, or all texts in nested lists and dicts, but for specifications."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, dict):
        yield from _texts([*value.values()] if "class_path" not in value else [])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _is_inside(path: str, folder: Path) -> bool:
    """Whether a path, with all links followed, lies in a folder."""
    return Path(path).expanduser().resolve().is_relative_to(folder.resolve())


def _as_options(option: str, spec: dict[str, Any]) -> str:
    """A specification as one types it."""
    path = str(spec["class_path"])
    arguments = (spec.get("init_args") or {}) | (spec.get("dict_kwargs") or {})
    defaults = _defaults(resolve_name(path)) if _is_known(path) else {}
    words = [option, shlex.quote(path)]
    for name, value in arguments.items():
        if isinstance(value, dict) and "class_path" in value:
            words.append(_as_options(f"{option}.{name}", value))
        elif value is not None and value != defaults.get(name, Parameter.empty):
            text = value if isinstance(value, str) else json.dumps(value)
            words += [shlex.quote(f"{option}.{name}"), shlex.quote(text)]
    return " ".join(words)


def check_model(
    model: nn.Module,
    splits: Splits,
    curvature: CurvatureConfig | None,
    likelihood: Likelihood | str = "classification",
    predictive: PredictiveConfig | None = None,
) -> None:
    """Run two training examples through the network, the curvature pass and the predictive.

    Raises:
        ValueError: a network that cannot take the inputs, or does not return (N, C) with one output
            per class, or (N, R, C) for class labels (N, R); targets that do not fit the likelihood;
            a predictive that does not support such outputs.
        TypeError: outputs that are no tensor, class labels that are not integers.
        NotImplementedError: a layer without a K-FAC rule, or one that cannot predict.
    """
    likelihood = likelihood_of(likelihood)
    if splits.classes is not None and likelihood.kind == "continuous":
        raise ValueError(
            f"{splits.name} has {len(splits.classes)} classes, but likelihood '{likelihood}' is "
            "for numbers. If the target of a table is a number, pass --data.classes false."
        )
    x, y = next(iter(split_batches(splits, "train", 2)))
    parameter, name = next(model.parameters(), torch.empty(0)), type(model).__name__
    x, y = x.to(parameter.device), y.to(parameter.device)
    with eval_mode(model):
        # Made before the forward pass: its error about layers without a rule comes first.
        options = None if curvature is None else curvature.options(splits.targets)
        of_factors = options and CurvaturePass(model, likelihood, options, process_group=None)
        try:
            with torch.no_grad():
                f: Any = model(deepcopy(x))  # a forward may change its input in place
        except (RuntimeError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{name} cannot take {described(x)}: {str(error).rstrip('.')}. Set the model's "
                "options to fit the data, or choose another model."
            ) from error
        task = Task(likelihood, splits.targets)
        y = task.targets(model, x, y)
        task.check(f, y)
        classes = splits.classes
        has_logits = likelihood.name == "classification"
        if classes is not None and has_logits and f.shape[-1] != len(classes):
            raise ValueError(
                f"{name} returns {f.shape[-1]} outputs, but {splits.name} has {len(classes)} "
                f"classes; set --model.num_classes {len(classes)}."
            )
        # What the predictive would cost, then a pass, and the covariance of a single output.
        if predictive is not None:
            predictive.check_cost(f[0, ..., 0].numel(), f.shape[-1], likelihood)
        if of_factors is None:
            return
        of_factors.add(x, y)
        factors = _identities(of_factors.factors())
        if predictive is not None and predictive.method != "linearised":
            eigen = {name: block.decompose() for name, block in factors.blocks.items()}
            precision = {name: (block, block.spectrum(1.0)) for name, block in eigen.items()}
            # One position and two outputs suffice to find uses that hooks cannot follow.
            first = torch.zeros(f.shape[:-1], dtype=torch.bool)
            first.view(len(f), -1)[:, 0] = True
            few = torch.arange(min(2, f.shape[-1]))
            OutputCovariance(model, precision)(x, first, few)


def _identities(factors: KroneckerFactors) -> KroneckerFactors:
    """The same factors as identities, which `decompose` recognises and needs no solver for."""

    def one(factor: Tensor) -> Tensor:
        return torch.diag_embed(torch.ones_like(factor[..., 0]))

    blocks = {
        name: replace(block, B=one(block.B), A=block.A if block.A is None else one(block.A))
        for name, block in factors.blocks.items()
    }
    return replace(factors, blocks=blocks)


def with_learned_augmentation(
    model: nn.Module, splits: Splits, provenance: Provenance
) -> tuple[LearnedAugmentation, Provenance]:
    """The network in a `LearnedAugmentation` for images, and how both are built again.

    All images are moved, turned, scaled and sheared, those with colours also recoloured and
    mirrored.
    """
    has_colours = splits.image_shape[0] == 3
    kinds = [Affine, Color, Flip] if has_colours else [Affine]
    of_kinds = [{"class_path": f"marglik.augmentation.{kind.__name__}"} for kind in kinds]
    learned = LearnedAugmentation(model, [kind() for kind in kinds])
    around = _around(provenance, "marglik.augmentation.LearnedAugmentation", transforms=of_kinds)
    return learned.to(next(model.parameters()).device), around


def with_standardised_columns(
    model: nn.Module, splits: Splits, provenance: Provenance
) -> tuple[nn.Module, Provenance]:
    """For a table, the network in a `Standardised` by the training part, and how it is built."""
    if splits.columns is None:
        return model, provenance
    x = tensors_in(splits.train)[0].double()  # in float32, sums of large numbers overflow
    std = torch.where((x == x[0]).all(0), 1.0, x.std(0, correction=0))
    scale: Any = {"mean": x.mean(0).tolist(), "std": std.tolist()}
    return Standardised(model, **scale), _around(provenance, "marglik.models.Standardised", **scale)


def _around(provenance: Provenance, path: str, **arguments: Any) -> Provenance:
    """How a network inside of another is built, if it is known how the inner one is."""
    if provenance.model is None:
        return provenance
    spec = {"class_path": path, "init_args": {"model": provenance.model, **arguments}}
    return replace(provenance, model=spec)


def sizes_of(splits: Splits) -> dict[str, int]:
    """The sizes of a network for this data, by the names of its arguments."""
    x, *_, y = tensors_in(splits.train)
    if splits.classes is not None:
        outputs = len(splits.classes)
    elif y.is_floating_point():
        outputs = y.shape[-1]
    else:
        outputs = 1 + max(int(labels.max()) for labels in (y, tensors_in(splits.test)[-1]))
    sizes = {"in_features": x[0].numel(), "num_classes": outputs}
    of_images = {"in_channels": x.shape[1], "image_size": x.shape[-1]} if x.dim() == 4 else {}
    return sizes | of_images
