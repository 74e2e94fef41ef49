"""Checks that network, data and options fit together, before any work is lost."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.covariance.output_covariance import OutputCovariance, PosteriorPrecision
from kfac_backend.curvature import CurvaturePass
from kfac_backend.eigenvalue_correction import CorrectionPass
from kfac_backend.loss import check_targets
from kfac_backend.model.batches import Targets
from kfac_backend.options import Likelihood
from marglik.data import ImageSplits, Splits
from marglik.data.batches import split_batches
from marglik.data.tensors import described
from marglik.eval_mode import eval_mode
from marglik.prediction.predictive import PredictiveConfig
from marglik.runs.config import CurvatureConfig, PostHocCurvatureConfig

__all__ = ["check_model"]


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
            unit = _unit_factors(curvature_pass.factors())
            if corrects:
                CorrectionPass(unit, model, of_pass, process_group=None).add(x, y)
            if predictive is not None and by_covariance:
                covariance = OutputCovariance(model, _unit_precision(unit))
                # One position and two outputs suffice to find uses that hooks cannot follow.
                first = torch.zeros(f.shape[:-1], dtype=torch.bool)
                first.view(len(f), -1)[:, 0] = True
                covariance(x, first, torch.arange(min(2, f.shape[-1])))


def _unit_factors(factors: KroneckerFactors) -> KroneckerFactors:
    """The same factors as identities, which `decompose` recognises and needs no solver for."""
    blocks = {
        name: replace(block, B=_unit(block.B), A=None if block.A is None else _unit(block.A))
        for name, block in factors.blocks.items()
    }
    return replace(factors, blocks=blocks)


def _unit(factor: Tensor) -> Tensor:
    return torch.diag_embed(torch.ones_like(factor[..., 0]))


def _unit_precision(factors: KroneckerFactors) -> PosteriorPrecision:
    """Name -> eigenvectors and eigenvalues of a precision with these factors and δ = 1."""
    eigen = {name: block.decompose() for name, block in factors.blocks.items()}
    return {name: (block, block.spectrum(1.0)) for name, block in eigen.items()}


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
