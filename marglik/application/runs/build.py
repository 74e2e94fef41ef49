"""Prepare devices, ranks and networks for the commands, and check that networks fit the data."""

import logging
import os
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from kfac_backend.blocks.block import decompose
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.curvature import CurvaturePass
from kfac_backend.engine.task import Task
from kfac_backend.extras import extra
from kfac_backend.layers.gram import Factor
from kfac_backend.likelihoods import Likelihood, likelihood_of
from marglik.application.data.splits import Splits, described, split_batches, tensors_in
from marglik.application.provenance import Provenance
from marglik.application.runs.config import Accelerator, CurvatureConfig, Precision
from marglik.augmentation import Affine, Color, Flip, LearnedAugmentation
from marglik.eval_mode import eval_mode
from marglik.models import Standardised
from marglik.prediction.predictive import PredictiveConfig

if TYPE_CHECKING:
    from lightning.fabric import Fabric

RANK_TIMEOUT = timedelta(minutes=10)
"""Maximum time for which a process waits for another process. All processes end afterwards."""


def device_of(accelerator: Accelerator) -> torch.device:
    """Return the device for ``--accelerator``. "auto" selects the first GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if accelerator == "cuda" and not has_gpu:
        raise ValueError(
            "--accelerator cuda is not available on this machine: torch finds no CUDA device. "
            "Pass auto or cpu."
        )
    return torch.device("cpu") if accelerator == "cpu" or not has_gpu else torch.device("cuda", 0)


def build_fabric(accelerator: Accelerator, precision: Precision = "32-true") -> "Fabric | None":
    """Return a launched Fabric with the device, the precision and the processes of torchrun.

    One process in full precision needs none, and importing Lightning takes seconds: None.
    """
    device = device_of(accelerator)
    by_torchrun = dist.is_available() and dist.is_torchelastic_launched()
    started = int(os.environ["WORLD_SIZE"]) if by_torchrun else 1
    if started == 1 and precision == "32-true":
        return None
    with extra("lightning"):
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy

    if started == 1:
        return Fabric(accelerator=device.type, devices=1, precision=precision)
    local_ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if device.type == "cuda" and local_ranks > gpus:
        raise ValueError(
            f"torchrun started {local_ranks} processes, but this machine has {gpus} GPU(s). Start "
            f"at most {gpus} processes (--nproc-per-node), or pass --accelerator cpu."
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    fabric = Fabric(
        accelerator=device.type,
        devices=local_ranks,
        num_nodes=started // local_ranks,
        strategy=DDPStrategy(process_group_backend=backend, timeout=RANK_TIMEOUT),
        precision=precision,
    )
    for name in ("lightning.fabric", "lightning.pytorch"):  # hide lines about the launch
        logging.getLogger(name).setLevel(logging.WARNING)
    fabric.launch()
    return fabric


def check_model(
    model: nn.Module,
    splits: Splits,
    curvature: CurvatureConfig | None,
    likelihood: Likelihood | str = "classification",
    predictive: PredictiveConfig | None = None,
) -> None:
    """Raise an error unless two training examples pass the network, a curvature pass, a prediction.

    The error says what does not fit: inputs, outputs, targets, or a layer.
    """
    likelihood = likelihood_of(likelihood)
    if splits.classes is not None and likelihood.kind == "continuous":
        raise ValueError(
            f"{splits.name} has {len(splits.classes)} classes, but likelihood '{likelihood}' needs "
            "numbers. If the target of a table is a number, pass --data.classes false."
        )
    x, y = next(iter(split_batches(splits, "train", 2)))
    parameter, name = next(model.parameters(), torch.empty(0)), type(model).__name__
    x, y = x.to(parameter.device), y.to(parameter.device)
    with eval_mode(model):
        # Create the curvature pass before the forward pass, so that an error about layers without a
        # rule comes first.
        options = None if curvature is None else curvature.options(splits.targets)
        of_factors = options and CurvaturePass(model, likelihood, options, process_group=None)
        try:
            with torch.no_grad():
                f: Any = model(deepcopy(x))  # a forward may change its input in place
        except (RuntimeError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{name} does not accept {described(x)}: {str(error).rstrip('.')}. Set the model's "
                "options for this data, or choose another model."
            ) from error
        task = Task(likelihood, splits.targets)
        y = task.targets(model, x, y)
        task.check(f, y)
        classes = splits.classes
        has_logits = likelihood.name == "classification"
        if classes is not None and has_logits and f.shape[-1] != len(classes):
            raise ValueError(
                f"{name} returns {f.shape[-1]} outputs, but {splits.name} has {len(classes)} "
                f"classes. Pass --model.num_classes {len(classes)}."
            )
        # Check the cost of the predictive, then run a pass, and the covariance of a single output.
        if predictive is not None:
            number = sum(p.numel() for p in model.parameters() if p.requires_grad)
            predictive = predictive.for_network(number, f.shape[-1])
            predictive.check_cost(f[0, ..., 0].numel(), f.shape[-1], likelihood)
        if of_factors is None:
            return
        of_factors.add(x, y)
        factors = _identities(of_factors.factors())
        if predictive is not None and predictive.method != "linearised":
            eigen = zip(factors.blocks, decompose(factors.blocks.values()), strict=True)
            precision = {name: (block, block.spectrum(1.0)) for name, block in eigen}
            # One position and two outputs are enough to find layers that hooks cannot follow.
            first = torch.zeros(f.shape[:-1], dtype=torch.bool)
            first.view(len(f), -1)[:, 0] = True
            first_outputs = torch.arange(min(2, f.shape[-1]))
            OutputCovariance(model, precision)(x, first, first_outputs)


def _identities(factors: KroneckerFactors) -> KroneckerFactors:
    """Return factors replaced by identities, which `decompose` recognises without a solver."""

    @cache  # one object if a weight and its bias share a factor
    def identity(factor: Factor) -> Factor:
        ones = torch.ones(factor.shape[:-1], dtype=factor.dtype, device=factor.device)
        return Factor(torch.diag_embed(ones))

    blocks = {
        name: block.replace(**{letter: identity(F) for letter, F in block.factors.items()})
        for name, block in factors.blocks.items()
    }
    return replace(factors, blocks=blocks)


def with_learned_augmentation(
    model: nn.Module, splits: Splits, provenance: Provenance
) -> tuple[LearnedAugmentation, Provenance]:
    """Return the network within a `LearnedAugmentation` for images, and its specification.

    Images are shifted, rotated, scaled and sheared. Colour images are also recoloured and mirrored.
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
    """Return the network of a table within a `Standardised`, and its specification."""
    if splits.table is None:
        return model, provenance
    x = tensors_in(splits.train)[0].double()  # sums of large numbers would overflow in float32
    std = torch.where((x == x[0]).all(0), 1.0, x.std(0, correction=0))
    scale: Any = {"mean": x.mean(0).tolist(), "std": std.tolist()}
    return Standardised(model, **scale), _around(provenance, "marglik.models.Standardised", **scale)


def _around(provenance: Provenance, path: str, **arguments: Any) -> Provenance:
    """Return the specification of a network that contains another, if this one has one."""
    if provenance.model is None:
        return provenance
    spec = {"class_path": path, "init_args": {"model": provenance.model, **arguments}}
    return replace(provenance, model=spec)


def sizes_of(splits: Splits, likelihood: str = "classification") -> dict[str, int]:
    """Return argument name -> size of a network for this data and likelihood."""
    x, *_, y = tensors_in(splits.train)
    sizes = {"in_features": x[0].numel(), "num_classes": _num_outputs(splits, likelihood)}
    of_images = {"in_channels": x.shape[1], "image_size": x.shape[-1]} if x.dim() == 4 else {}
    return sizes | of_images


def _num_outputs(splits: Splits, likelihood: str) -> int:
    """Return C: the number of classes (1 for ordinal), or the outputs that targets need."""
    distribution = likelihood_of(likelihood)
    if distribution.name == "ordinal":
        return 1
    if splits.classes is not None:
        return len(splits.classes)
    y, y_test = (tensors_in(part)[-1] for part in (splits.train, splits.test))
    if distribution.has_labels:
        return 1 + int(max(y.max(), y_test.max()))

    def width(outputs: int) -> int:
        """Return the length of the last axis of targets for this number of outputs."""
        try:
            return distribution.target_shape(torch.empty(1, outputs))[-1]
        except ValueError:
            return 0

    K = y.shape[-1] if y.dim() > 1 else 1
    return next((C for C in (K, 2 * K, K // 2, K - 1) if C and width(C) == K), K)
