"""`marglik_training`: the function of laplace-torch, with marglik's loop and curvature."""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.options import CurvatureOptions, check_positive
from marglik.laplace import Laplace, ParametricLaplace, fisher_of_backend
from marglik.loaders import count_on_ranks
from marglik.posterior.jacobian_ggn import Structure
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import precision_to_weight_decay
from marglik.training.learner import PriorLearner
from marglik.training.loop import OnlineTraining, ranks_of
from marglik.training.options import (
    WEIGHT_DECAY,
    Average,
    CurvatureFrom,
    Keep,
    Schedule,
)

if TYPE_CHECKING:
    from lightning.fabric import Fabric  # importing Lightning takes seconds


class MarglikTraining(NamedTuple):
    """Result of `marglik_training`. It unpacks like the tuple of laplace-torch."""

    laplace: ParametricLaplace
    """The fitted Laplace approximation, with one prior precision or one per parameter tensor."""
    model: nn.Module
    """The trained network."""
    negative_evidences: list[float]
    """Negative evidence (nats) at every hyperparameter step."""
    losses: list[float]
    """Mean objective (nats) of every epoch."""


def marglik_training(
    model: nn.Module,
    train_loader: DataLoader[Any],
    likelihood: Likelihood | str = "classification",
    hessian_structure: Structure = "kron",
    backend: type | None = None,
    optimizer_cls: type[Optimizer] = Adam,
    optimizer_kwargs: dict[str, Any] | None = None,
    scheduler_cls: type[LRScheduler] | None = None,
    scheduler_kwargs: dict[str, Any] | None = None,
    n_epochs: int = 300,
    lr_hyp: float = 1e-1,
    prior_structure: str = "layerwise",
    n_epochs_burnin: int = 0,
    n_hypersteps: int = 10,
    marglik_frequency: int | None = None,
    prior_prec_init: float | None = None,
    sigma_noise_init: float = 0.1,
    temperature: float = 1.0,
    fix_sigma_noise: bool = False,
    progress_bar: bool = False,
    enable_backprop: bool = False,
    dict_key_x: str | tuple[str, ...] | None = None,
    dict_key_y: str = "labels",
    fabric: "Fabric | None" = None,
    keep: Keep = "last",
    average: Average | None = "last",
    held_out: Iterable[Any] | None = None,
    curvature_from: CurvatureFrom = "auto",
    **options: Any,
) -> MarglikTraining:
    """Train a network and its hyperparameters together, with the interface of laplace-torch.

    There are four differences from laplace-torch. N is the number of examples that were read, also
    with ``drop_last`` or a sampler. Loss, evidence and posterior share one temperature T.
    laplace-torch divides the prior by T in the loss, and multiplies the initial precision by T.
    ``losses`` are epoch means of the objective of `OnlineTraining`. The defaults are the defaults
    of `PriorLearner`; laplace-torch has marglik_frequency=1, keep="best", prior_prec_init=1.0 and
    sigma_noise_init=1.0.

    Args:
        model: the network; returns logits, or means in regression.
        train_loader: batches (x, y), or mappings.
        likelihood: "classification", "regression", "bernoulli", or another of
            `kfac_backend.likelihoods`.
        hessian_structure: "kron", or from Jacobians "full", "diag" or "lowrank".
        backend: `KfacGGN` (the default), `KfacEF`, or a backend of laplace-torch for the same
            matrices.
        optimizer_cls: class of the network's optimiser.
        optimizer_kwargs: keywords of the optimiser. A weight decay is set to 0 with a warning.
        scheduler_cls: class of a learning-rate schedule, stepped after every batch. None keeps the
            learning rate constant; the average then removes the noise of the steps. For a
            regression with little noise the rate falls at the end, see `OnlineTraining`.
        scheduler_kwargs: keywords of the schedule.
        n_epochs: number of epochs.
        lr_hyp: Adam's step size on the log hyperparameters.
        prior_structure: "layerwise" for one precision per parameter tensor, or "scalar" for one.
        n_epochs_burnin: no update before the end of this epoch.
        n_hypersteps: number of hyperparameter steps per update.
        marglik_frequency: epochs between updates. None spreads twenty updates over the epochs.
        prior_prec_init: initial prior precision δ, which includes N. None corresponds to a weight
            decay of 5e-4.
        sigma_noise_init: initial noise σ of regression, in the unit of the targets.
        temperature: T of the likelihood.
        fix_sigma_noise: whether to keep σ at its initial value.
        progress_bar: whether to show a progress bar.
        enable_backprop: whether predictions can be differentiated with respect to the inputs.
        dict_key_x: key of the input in batches that are mappings, or several keys. None passes the
            whole mapping to the model, as in laplace-torch.
        dict_key_y: key of the targets in batches that are mappings.
        fabric: launched Fabric with devices and precision; ``train_loader`` is then this rank's
            shard, see `OnlineTraining`. None uses the model's device.
        keep: "last", or "best" for the parameters of the update with the highest evidence, as in
            laplace-torch; see `Schedule`.
        average: parameters that are averaged, see `Schedule`.
        held_out: held-out batches, which correct the weight decays of a classifier, see
            `OnlineTraining`.
        curvature_from: "pass" uses all data in each update, as in laplace-torch; see
            `LearnerOptions`.
        options: fields of `CurvatureOptions`, such as ``kfac_approx`` or ``dict_key_mask``, except
            ``fisher`` and ``mc_samples``, which the backend sets.

    Raises:
        ValueError: an option is not supported.
    """
    if prior_structure not in ("layerwise", "scalar"):
        raise ValueError(
            f"prior_structure={prior_structure!r} is not supported. Choose 'layerwise' (one "
            "precision per parameter tensor) or 'scalar' (one precision). For one precision per "
            "parameter, use laplace.marglik_training(..., backend=KfacGGN)."
        )
    likelihood = likelihood_of(likelihood)
    options = fisher_of_backend(backend, options)
    curvature = CurvatureOptions().replace(dict_key_x=dict_key_x, dict_key_y=dict_key_y, **options)
    optimizer = _without_weight_decay(optimizer_cls(model.parameters(), **(optimizer_kwargs or {})))
    scheduler = scheduler_cls and scheduler_cls(optimizer, **(scheduler_kwargs or {}))
    schedule = Schedule(
        n_epochs, marglik_frequency, n_epochs_burnin, n_hypersteps, keep=keep, average=average
    )
    _warn_without_updates(schedule)
    weight_decay = WEIGHT_DECAY
    if prior_prec_init is not None:
        check_positive("prior_prec_init", prior_prec_init)
        num_data = count_on_ranks(train_loader, ranks_of(fabric), curvature)
        weight_decay = precision_to_weight_decay(prior_prec_init, num_data, temperature)
    has_sigma, is_scalar = likelihood.has_sigma, prior_structure == "scalar"
    learner = PriorLearner(
        likelihood, curvature, schedule=schedule, weight_decay=weight_decay,
        structure="scalar" if is_scalar else "per_tensor", lr=lr_hyp, temperature=temperature,
        sigma_noise=sigma_noise_init if has_sigma else 1.0,
        learn_sigma_noise=has_sigma and not fix_sigma_noise,
        hessian_structure=hessian_structure, curvature_from=curvature_from,
    )  # fmt: skip
    result = OnlineTraining(
        model, optimizer, train_loader, learner, scheduler=scheduler, held_out=held_out,
        fabric=fabric, progress=progress_bar, keep_probabilities=False,
    ).run()  # fmt: skip
    laplace = _laplace_of(result.laplace, curvature, is_scalar, enable_backprop)
    model.eval()  # as in laplace-torch
    losses = [record["objective"] for record in result.records if record["kind"] == "epoch"]
    negative_evidences = [-evidence for evidence in result.evidences]
    return MarglikTraining(laplace, model, negative_evidences, losses)


def _without_weight_decay(optimizer: Optimizer) -> Optimizer:
    """Return the optimiser with a weight decay of 0; warn if it had another one."""
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        warnings.warn("weight_decay is set to 0, because the prior replaces it.", stacklevel=3)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
    return optimizer


def _warn_without_updates(schedule: Schedule) -> None:
    epochs, every, burn_in = schedule.epochs, schedule.every, schedule.burn_in
    assert epochs is not None
    has_update = any(map(schedule.is_due, range(1, epochs + 1)))
    if burn_in > epochs or (schedule.keep == "best" and not has_update):
        warnings.warn(
            f"n_epochs={epochs}, marglik_frequency={every} and n_epochs_burnin={burn_in} give no "
            "update. The weight decays keep their initial values. Pass a smaller "
            "marglik_frequency, or more epochs.",
            stacklevel=3,
        )


def _laplace_of(
    posterior: Posterior, curvature: CurvatureOptions, is_scalar: bool, enable_backprop: bool
) -> ParametricLaplace:
    """Return a posterior with the interface of laplace-torch, and one δ if it is a scalar."""
    laplace = Laplace(
        posterior.model, posterior.likelihood, "all", posterior.structure, options=curvature,
        prior_precision=posterior.prior_precision[: 1 if is_scalar else None],
        sigma_noise=posterior.sigma_noise, temperature=posterior.temperature,
        enable_backprop=enable_backprop,
    )  # fmt: skip
    laplace.restore(posterior.fitted_curvature(), posterior.sample_size)
    laplace.fingerprints = posterior.fingerprints
    return laplace
