"""`Laplace`: Laplace approximations with the names and arguments of laplace-torch.

The module does not import laplace-torch. `Laplace` returns a `Posterior` that also has the methods
of laplace-torch. The curvature has Kronecker factors. For small networks, last layers and
subnetworks it may also be the whole GGN, its diagonal or its largest eigenpairs, from Jacobians.
Calls with the same meaning return the same numbers, see the table in docs/laplace-torch.md.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.covariance.output_covariance import check_not_empty
from kfac_backend.engine.batches import check_read_twice, detached, split_batch, to_device
from kfac_backend.engine.model_calls import call_with_each
from kfac_backend.engine.task import Task, check_finite
from kfac_backend.likelihoods import IGNORED, Likelihood
from kfac_backend.options import CurvatureOptions, check_keys, check_option, check_positive
from kfac_backend.precision import at_least_float32, full_float32
from kfac_backend.sharding import check_whole
from marglik.eval_mode import eval_mode
from marglik.posterior.fitted_weights import trainable_parameters
from marglik.posterior.jacobian_ggn import JacobianGGN, Structure
from marglik.posterior.jacobians import JacobianCovariance, jacobians, parameter_vector
from marglik.posterior.posterior import Posterior, last_layer, trainable_layers
from marglik.posterior.precision import (
    DiagonalPrecision,
    KroneckerPrecision,
    LowRankPrecision,
    Precision,
    log_prob,
)
from marglik.prediction.links import probit_outputs

__all__ = [
    "DiagLLLaplace",
    "DiagLaplace",
    "DiagSubnetLaplace",
    "FullLLLaplace",
    "FullLaplace",
    "FullSubnetLaplace",
    "KronLLLaplace",
    "KronLaplace",
    "LLLaplace",
    "Laplace",
    "LowRankLaplace",
    "ParametricLaplace",
    "SubnetLaplace",
]

Subset = Literal["all", "last_layer", "subnetwork"]
PredType = Literal["glm", "nn"]
LinkApprox = Literal["probit", "mc", "bridge", "bridge_norm"]
FeatureReduction = Literal["pick_first", "pick_last", "average"]
SAVED = (
    *("prior_precision", "prior_mean", "sigma_noise", "temperature"),
    *("mean", "indices", "structure", "sample_size", "fingerprints"),
)
"""Attributes that `state_dict` saves, in addition to the fit and the names of the parameters."""
MOST_VARIANCES = 2**24
"""Maximum number of variances of a batch that a grid of prior precisions computes at once."""
NO_EFFECT = {"damping": False, "asdl_fisher_kwargs": None}
"""Arguments of laplace-torch that are accepted only with these values, which have no effect."""


def Laplace(  # noqa: N802  # as laplace-torch's function
    model: nn.Module,
    likelihood: Likelihood | str,
    subset_of_weights: Subset = "last_layer",
    hessian_structure: Structure = "kron",
    *arguments: Any,
    **options: Any,
) -> "ParametricLaplace":
    """Return a Laplace approximation: a `Posterior` with the interface of laplace-torch.

    There are three differences from laplace-torch. N is the number of examples that were read, not
    the length of the loader's data set. No call changes the mode or the parameters of the model. A
    temperature T divides the whole log-likelihood, including the normaliser of regression.

    Args:
        model: the network at its MAP parameters. It is not copied. Frozen parameters have no
            posterior.
        likelihood: "classification", "regression", "reward_modeling", or another of
            `kfac_backend.likelihoods`.
        subset_of_weights: parameters with a posterior: "last_layer", "all" (all trainable
            parameters) or "subnetwork". Other parameters are constants.
        hessian_structure: "kron", or, from Jacobians, "diag", "full" (P, P) and "lowrank".
        arguments: further positional arguments of `ParametricLaplace`, with σ first. The classes
            of laplace-torch for subnetworks and low rank have another order.
        options: arguments of `ParametricLaplace`.

    Raises:
        ValueError: an option is not supported.
        TypeError: a subnetwork has no ``subnetwork_indices``.
    """
    check_option("subset_of_weights", subset_of_weights, Subset)
    check_option("hessian_structure", hessian_structure, Structure)
    classes = (
        (FullLaplace, KronLaplace, DiagLaplace, LowRankLaplace)
        + (FullLLLaplace, KronLLLaplace, DiagLLLaplace)
        + (FullSubnetLaplace, DiagSubnetLaplace)
    )
    by_key = {(c._subset, c._structure): c for c in classes}
    others: dict[str, type[ParametricLaplace]]
    others = {"all": ParametricLaplace, "last_layer": LLLaplace, "subnetwork": SubnetLaplace}
    made = by_key.get((subset_of_weights, hessian_structure)) or others[subset_of_weights]
    return made(model, likelihood, *arguments, structure=hessian_structure, **options)


def fisher_of_backend(backend: type | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return ``fisher`` and other options of `CurvatureOptions` for a backend of laplace-torch.

    The base class of a backend determines its matrix: the GGN or the empirical Fisher. kfac_backend
    computes this matrix for all backends, including those based on another library.

    Args:
        backend: `KfacGGN`, `KfacEF`, or a backend of laplace-torch; None is the GGN.
        options: keywords of the backend. ``stochastic`` and ``num_samples`` of laplace-torch select
            ``fisher="mc"``.

    Raises:
        ValueError: the backend computes neither the GGN nor the empirical Fisher.
    """
    options = dict(options)
    stochastic, samples = options.pop("stochastic", False), options.pop("num_samples", 1)
    bases = [base.__name__ for base in getattr(backend, "__mro__", ())]
    if backend is None or "GGNInterface" in bases:
        drawn = {"fisher": "mc", "mc_samples": samples} if stochastic else {}
    elif "EFInterface" in bases:
        drawn = {"fisher": "empirical"}
    else:
        raise ValueError(
            f"backend={getattr(backend, '__name__', backend)!r} computes neither the GGN nor the "
            "empirical Fisher. Pass KfacGGN or KfacEF, or use laplace-torch for this matrix."
        )
    if backend is not None and not backend.__module__.startswith("kfac_backend"):
        warnings.warn(
            f"backend={backend.__name__}: kfac_backend computes this matrix. Its Kronecker "
            "factors of convolutions differ from those of ASDL and BackPACK.",
            stacklevel=4,
        )
    return options | drawn


def _with_others_frozen(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Return a copy that shares all tensors; all parameters except these names are frozen."""
    learned, wrong = set(), set(names)
    for parameter, p in model.named_parameters(remove_duplicate=False):
        matches = {name for name in names if not name or f"{parameter}.".startswith(f"{name}.")}
        learned |= {id(p)} if matches else set()
        wrong -= matches
    if wrong or not learned:
        raise ValueError(
            f"The model has no parameters {sorted(wrong)}. Pass names of its modules or "
            "parameters, as in model.named_parameters()."
        )
    # A copy, because the user's objects must not change.
    parameters = {
        id(p): nn.Parameter(p.detach(), p.requires_grad and id(p) in learned)
        for p in model.parameters()
    }
    return deepcopy(model, parameters | {id(buffer): buffer for buffer in model.buffers()})


class ParametricLaplace(Posterior):
    """A `Posterior` with laplace-torch's interface, see `Laplace`.

    Its subclasses have laplace-torch's names. For likelihoods other than classification, regression
    and reward_modeling, use `laplace_predictive` to predict.

    Args:
        model: the network at its MAP parameters. It is not copied. Frozen parameters have no
            posterior.
        likelihood: see `Laplace`. "reward_modeling" fits a classification of the better of two
            inputs, and predicts rewards.
        sigma_noise: σ of regression.
        prior_precision: δ, see `Posterior`.
        prior_mean: see `Posterior`.
        temperature: T.
        enable_backprop: whether predictions can be differentiated with respect to the inputs.
        options: options of the curvature; ``kfac_approx`` is "expand" by default, as in
            laplace-torch.
        last_layer_name: name of the last layer, for last-layer Laplace. None selects the last layer
            in the model's definition. `fit` raises an error if another layer runs last.
        subnetwork_indices: the subnetwork, for subnetwork Laplace: indices (int64) into the vector
            of all trainable parameters, or names of modules or parameters. "kron" supports only
            names.
        feature_reduction: laplace-torch's choice of the feature for the Jacobian of the last layer.
            It has no effect here, because Jacobians are computed through the whole network.
        backend: backend that determines the matrix, see `fisher_of_backend`.
        backend_kwargs: keywords of the backend.
        keywords: the other arguments of `Posterior`, and fields of `CurvatureOptions`, such as
            ``kfac_approx="reduce"``.

    Raises:
        ValueError: an option is not supported.
        TypeError: a subnetwork has no ``subnetwork_indices``.
    """

    _subset: ClassVar[Subset] = "all"
    _structure: ClassVar[Structure] = "kron"
    _adds_at_other_weights = True

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        *,
        options: CurvatureOptions = CurvatureOptions(kfac_approx="expand"),  # noqa: B008
        structure: Structure | None = None,
        last_layer_name: str | None = None,
        subnetwork_indices: Collection[str] | Tensor | None = (),
        feature_reduction: FeatureReduction | None = None,
        backend: type | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        if feature_reduction is not None:
            check_option("feature_reduction", feature_reduction, FeatureReduction)
        self._whole, self._last = None, ""
        shared, indices = model, None
        if self._subset == "last_layer":
            listed = trainable_layers(model)
            if not listed:
                raise ValueError(
                    "All parameters of the model are frozen, so there is no posterior. Set "
                    "requires_grad_(True) on the parameters of its last layer."
                )
            self._whole = model if last_layer_name is None else None
            self._last = last_layer_name or listed[-1]
            shared = _with_others_frozen(model, [self._last])
        elif self._subset == "subnetwork":
            names = subnetwork_indices
            if isinstance(names, tuple) and not names:
                raise TypeError(
                    "Subnetwork Laplace needs subnetwork_indices. Pass indices of parameters, or "
                    "names of modules or parameters."
                )
            if isinstance(names, Tensor):
                indices = names
            elif names is None or not all(isinstance(name, str) for name in names):
                raise ValueError(
                    f"subnetwork_indices={names!r} is not supported. Pass a vector of int64 "
                    "indices, or names of modules or parameters."
                )
            else:
                shared = _with_others_frozen(model, names)
        keywords = {k: v for k, v in keywords.items() if k not in NO_EFFECT or v != NO_EFFECT[k]}
        numbers = {
            "sigma_noise": sigma_noise,
            "prior_precision": prior_precision,
            "prior_mean": prior_mean,
        }
        for name, value in numbers.items():
            if isinstance(value, str | CurvatureOptions):
                raise ValueError(f"{name}={value!r} is not supported. Pass a number or a tensor.")
        self._is_reward = likelihood == "reward_modeling"
        of_backend = fisher_of_backend(backend, backend_kwargs or {})
        super().__init__(
            shared,
            "classification" if self._is_reward else likelihood,
            options,
            structure=structure or self._structure,
            indices=indices,
            temperature=temperature,
            enable_backprop=enable_backprop,
            **numbers,
            **of_backend | keywords,
        )

    def fit(self, train_loader: Iterable[Any], *args: Any, **keywords: Any) -> None:
        """Compute the curvature; see `Posterior.fit` for the arguments.

        ``override=False`` adds the curvature to the curvature of previous fits. All layers may be
        trained in between, as in continual learning; the mean is then the new weights. A last layer
        or a subnetwork must not change in between. Changes of other layers are not detected.

        Raises:
            ValueError: another layer than the last in the model's definition runs last; targets
                have a wrong dtype; or a last layer or subnetwork changed before ``override=False``.
        """
        if self._whole is not None:
            batches = iter(train_loader)
            first = next(batches, None)
            if batches is train_loader:  # read only once, so put the first batch back
                train_loader = [] if first is None else chain([first], batches)
            if first is not None:
                x, _ = split_batch(first, self.options)
                if (ran := last_layer(self._whole, x)) != self._last:
                    raise ValueError(
                        f"The model defines {self._last!r} last, but runs {ran!r} last. Pass "
                        f"last_layer_name={ran!r}, or the name of another layer."
                    )
        try:
            super().fit(train_loader, *args, **keywords)
        except TypeError as error:
            raise ValueError(str(error)) from error

    @property
    def saved_subset(self) -> dict[str, Any]:
        """Weights that have a posterior, as plain data, for `save_posterior`."""
        last = self._last.replace("_orig_mod.", "")  # the name without torch.compile
        return {
            "subset_of_weights": self._subset,
            "last_layer_name": last,
            "is_reward": self._is_reward,
        }

    # Parts of the posterior, under their names in laplace-torch.

    @property
    def params(self) -> list[nn.Parameter]:
        """The network's trainable parameters, in ``parameters()`` order."""
        return [*trainable_parameters(self.model).values()]

    @property
    def H(self) -> Tensor | Precision | None:  # noqa: N802
        """The curvature at σ = T = 1: (P, P), (P,) for "diag", or an operator for "kron".

        For "lowrank" it is R with RᵀR = H. Before `fit` it is 0 for "diag" and "full", else None.
        """
        if isinstance(self._curvature, JacobianGGN):
            return self._curvature.H.to(self._wide_dtype)
        if self._curvature is None and self.structure in ("diag", "full"):
            zeros = torch.zeros_like(self._delta_each(), dtype=self._wide_dtype)
            return zeros if self.structure == "diag" else zeros.diag()
        if self._curvature is None:
            return None
        names = self.precision_blocks(any_weights=True)  # computes the eigenvectors, too
        return KroneckerPrecision({n: (self._eigen[n], self._eigen[n].spectrum()) for n in names})

    @property
    def prior_precision_diag(self) -> Tensor:
        """δ of each parameter with a posterior, (P,)."""
        return self._delta_each().to(self._wide_dtype)

    def _delta_each(self) -> Tensor:
        delta = self.precision_per_block(self.prior_precision)
        if self.structure != "kron":
            return delta
        return delta.repeat_interleave(torch.tensor(self._sizes, device=self._device))

    @property
    def posterior_precision(self) -> Any:
        """H/(σ²T) + P₀: (P, P) for "full", (P,) for "diag", and an operator for "kron".

        For "lowrank" it is ((U, λ), δ), which stands for U diag(λ) Uᵀ + diag(δ).
        """
        precision = self.precision(any_weights=True)
        if isinstance(precision, KroneckerPrecision):
            return precision
        if isinstance(precision, DiagonalPrecision):
            return precision.diagonal().to(self._wide_dtype)
        if isinstance(precision, LowRankPrecision):
            delta = self._delta_each()
            values, vectors = torch.linalg.eigh(precision.to_dense().double() - delta.diag())
            positive = values > 1e-12 * values.max()
            pairs = vectors[:, positive].to(self.mean.dtype), values[positive].to(self.mean.dtype)
            return pairs, delta.to(self.mean.dtype)
        return precision.to_dense()

    @property
    def posterior_covariance(self) -> Tensor:
        """Covariance Σ of the posterior, (P, P)."""
        return self.precision(any_weights=True).covariance()

    @property
    def posterior_variance(self) -> Tensor:
        """Variances of the parameters, the diagonal of Σ, (P,)."""
        return self.precision(any_weights=True).variances().to(self._wide_dtype)

    @property
    def posterior_scale(self) -> Tensor:
        """Cholesky factor L of Σ = L Lᵀ, (P, P); for "diag" standard deviations (P,)."""
        if self.structure == "diag":
            return self.posterior_variance.sqrt()
        return torch.linalg.cholesky(self.posterior_covariance)

    @property
    def scatter(self) -> Tensor:
        """(θ* − prior mean)ᵀ P₀ (θ* − prior mean), without constants such as padding rows."""
        norms = self.evidence_terms.squared_norms
        return (self.precision_per_block(self.prior_precision) * norms).sum()

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """Return the evidence (nats), computed in float64, in at least float32.

        The result has the model's dtype, as in laplace-torch, unless this is float16 or bfloat16.
        """
        evidence = super().log_marginal_likelihood(prior_precision, sigma_noise)
        return evidence.to(self._wide_dtype)

    @property
    def loss(self) -> Tensor:
        """Σ ℓ over the data (nats) at σ = 1, a float64 scalar."""
        loss = 0.0 if self._curvature is None else self._curvature.loss
        return torch.as_tensor(loss, dtype=torch.float64)

    @property
    def log_likelihood(self) -> Tensor:
        """Log p(D|θ*) / T (nats, a sum over the data)."""
        return self.evidence_terms.log_likelihood(self.sigma_noise, self.temperature)

    @property
    def log_det_prior_precision(self) -> Tensor:
        """Log determinant of the prior precision P₀."""
        return self._delta_each().log().sum()

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Log determinant of the posterior precision H/(σ²T) + P₀."""
        return self.precision(any_weights=True).logdet()

    @property
    def log_det_ratio(self) -> Tensor:
        """Log det(H/(σ²T) + P₀) − log det P₀."""
        return 2 * (self.log_likelihood - super().log_marginal_likelihood()) - self.scatter

    def square_norm(self, value: Tensor) -> Tensor:
        """Return (θ − θ*)ᵀ (H/(σ²T) + P₀) (θ − θ*) at parameter vectors θ (..., P)."""
        return -2 * self.log_prob(value, normalized=False)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Return the log density (nats) at parameter vectors (..., P); before `fit` of the prior.

        ``normalized=False`` omits the terms that do not depend on the vector.
        """
        if self._curvature is None:
            prior = DiagonalPrecision(self._delta_each() * 0, self._delta_each(), self.mean)
            difference = (value - self.prior_mean)[..., self.indices.to(value.device)]
            return log_prob(prior, difference, normalized)
        difference = value - self.mean
        if isinstance(self._curvature, JacobianGGN):
            difference = difference[..., self._curvature.indices]
        return log_prob(self.precision(any_weights=True), difference, normalized)

    def functional_variance(self, Js: Tensor) -> Tensor:
        """Return J Σ Jᵀ (N, ..., C, C) for Jacobians (N, ..., C, P)."""
        self.check_weights()
        return self.precision().square_form(Js)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """Return J Σ Jᵀ (N·C, N·C) of all outputs, for Jacobians (N, C, P) or (N, R, C, P)."""
        self.check_weights()
        return self.precision().square_form(Js.flatten(0, -2))

    def functional_variance_fast(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return outputs (N, C) and their variances (N, C)."""
        return self.output_distribution(x, variance_only=True)

    @property
    def backend(self) -> "ParametricLaplace":
        """This object: it has the methods of laplace-torch's backends for Jacobians."""
        return self

    @property
    def subnetwork_indices(self) -> Tensor:
        """Indices of the parameters with a posterior."""
        return self.indices

    def jacobians(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return Jacobians (N, C, P) of the P parameters with a posterior, and outputs (N, C)."""
        with eval_mode(self.model):
            f, J = jacobians(self.model, self._ggn_indices(), x, self.enable_backprop)
        return at_least_float32(J), f

    last_layer_jacobians = jacobians

    # The prior

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: Literal["marglik", "gridsearch"] = "marglik",
        n_steps: int = 100,
        lr: float = 0.1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: Literal["scalar", "layerwise", "diag"] = "scalar",
        val_loader: Iterable[Any] | None = None,
        loss: Callable[..., Any] | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str | None = None,
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
    ) -> None:
        """Set δ by Adam steps on the evidence, or to the best point of a grid on validation data.

        The default loss of the grid is the NLL (nats), in regression under N(f, J Σ Jᵀ + σ²).
        laplace-torch uses the mean square error, which does not depend on δ if the network is
        linearised. `marglik.maximize_evidence` finds the maximum of the evidence.

        Args:
            pred_type: see `predictive`.
            method: "marglik" (Adam on the evidence) or "gridsearch".
            n_steps: number of Adam steps.
            lr: Adam's step size on log δ.
            init_prior_prec: δ before the first step; a tensor determines the structure.
            prior_structure: "scalar", one δ for all; "layerwise", one per trainable tensor; or
                "diag", one per parameter (not for "kron").
            val_loader: validation batches, for the grid.
            loss: loss of the grid: a torchmetrics metric, which is reset for each δ, or a function
                of predictions and targets, in regression of means, variances and targets.
            log_prior_prec_min: the smallest logarithm of δ on the grid.
            log_prior_prec_max: the largest logarithm of δ on the grid.
            grid_size: number of points of the grid.
            link_approx: see `predictive`.
            n_samples: see `predictive`.
            verbose: whether to print the final δ.
            progress_bar: whether to show a progress bar.
            log_prior_prec_base: base of the logarithms of the grid.

        Raises:
            ValueError: an option is not supported, or the grid has no ``val_loader``.
        """
        link_approx = _checked_link(pred_type, link_approx)
        check_option("prior_structure", prior_structure, Literal["scalar", "layerwise", "diag"])
        if method == "marglik":
            log_delta = torch.as_tensor(init_prior_prec, dtype=torch.float64).log().reshape(-1)
            if len(log_delta) == 1:
                sizes = {"scalar": 1, "layerwise": self.n_layers, "diag": self.n_params}
                log_delta = log_delta.repeat(sizes[prior_structure])
            self._step_on_evidence(log_delta.to(self._device), n_steps, lr, progress_bar)
        elif method == "gridsearch" and val_loader is not None:
            check_read_twice(val_loader)
            grid = torch.logspace(
                log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base
            )
            has_variances = self.likelihood.name == "regression" or link_approx == "probit"
            if loss is None and pred_type == "glm" and has_variances:
                losses = self._grid_nlls(grid, val_loader, progress_bar)
            else:
                losses = []
                for delta in tqdm(grid, "Grid", disable=not progress_bar):
                    self.prior_precision = delta
                    options = loss, pred_type, link_approx, n_samples
                    losses.append(self._grid_loss(val_loader, *options))
            losses = torch.tensor(losses, dtype=torch.float64).nan_to_num(math.inf)
            if not losses.isfinite().any():
                raise ValueError(
                    "The loss of the validation data is not finite at any prior precision. Check "
                    "that val_loader has examples, their targets, and the function loss."
                )
            self.prior_precision = grid[int(losses.argmin())]
        else:
            raise ValueError(
                f"method={method!r} is not supported. Choose 'marglik', or 'gridsearch' with a "
                "val_loader."
            )
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")

    def _step_on_evidence(
        self, log_delta: Tensor, n_steps: int, lr: float, progress_bar: bool
    ) -> None:
        """Set δ by Adam steps on log δ, which is changed in place."""
        self.prior_precision = log_delta.exp()  # checks its shape
        terms, T, sigma = self.evidence_terms, self.temperature, self.sigma_noise.double()
        # The number of the δ of each block. The evidence's gradient has a closed form.
        numbers = torch.arange(len(log_delta), dtype=torch.float64, device=self._device)
        index = self.precision_per_block(numbers).long()
        adam = torch.optim.Adam([log_delta], lr=lr)
        for _ in tqdm(range(n_steps), "Evidence", disable=not progress_bar):
            delta = log_delta.exp()[index]
            gradient, _ = terms.gradient(delta, sigma, T)
            if not math.isfinite(gradient.sum().item() + terms.loss):
                terms.log_marginal_likelihood(delta, sigma, T)  # raises an error with the cause
            log_delta.grad = torch.zeros_like(log_delta).index_add_(0, index, -gradient)
            adam.step()
        self.prior_precision = log_delta.exp()

    def _grid_nlls(
        self, grid: Tensor, val_loader: Iterable[Any], progress_bar: bool
    ) -> list[float]:
        """Return the mean NLL (nats) of the linearised network at each δ, with link "probit"."""
        self._check_predicts()
        task, count = Task(self.likelihood, self.options), 0
        total = torch.zeros(len(grid), dtype=torch.float64)
        for batch in tqdm(val_loader, "Grid", disable=not progress_bar):
            x, y = self._split(batch, task)
            # Some δ at a time if the outputs are many; usually all of them.
            at_once = max(1, MOST_VARIANCES // (y.numel() * self.n_outputs or 1))
            errors = [self._errors(x, y, some) for some in grid.split(at_once)]
            total += torch.cat(errors)
            count += len(y)
        return (total / count).tolist()

    @torch.no_grad()
    def output_variances(
        self, x: Any, prior_precisions: Float[Tensor, "D"]
    ) -> tuple[Float[Tensor, "N *R C"], Float[Tensor, "D N *R C"]]:
        """Return outputs f and their variances at each of D values of a single δ.

        The derivatives of the outputs are computed once and rotated into the eigenbasis of H. So a
        grid of a hundred values costs little more than one of them. The posterior's own δ stays.

        Args:
            x: inputs, see `output_distribution`.
            prior_precisions: values of δ > 0, each for all parameters.

        Raises:
            AttributeError: the posterior is not fitted.
            ValueError: a δ is not positive, there is no example, or the network has other weights.
        """
        check_positive("prior_precisions", prior_precisions)
        check_not_empty(x)
        self.check_weights()
        curvature = self.fitted_curvature()
        if isinstance(curvature, KroneckerFactors):
            with eval_mode(self.model):
                covariance_of = self._output_covariance(x, "all", 0.0)
                assert not isinstance(covariance_of, JacobianCovariance)
                f, variances = covariance_of(x, added=prior_precisions)
            check_finite(self.model, f, x)
            return f, variances
        with eval_mode(self.model), torch.inference_mode(False):
            f, J = jacobians(self.model, self._ggn_indices(), x)
        J = at_least_float32(J).flatten(0, -2)  # (M, P)
        with torch.autocast(J.device.type, enabled=False), full_float32():
            scale = 1 / (self.sigma_noise.double().square() * self.temperature)
            variances = curvature.variances(J, prior_precisions, scale)
        return f, variances.to(at_least_float32(f)).view(-1, *f.shape)

    def _errors(self, x: Any, y: Tensor, grid: Tensor) -> Tensor:
        """Return the sum of the NLLs (nats) of a batch at each δ, on the CPU."""
        f, variances = self.output_variances(x, grid)
        is_regression = self.likelihood.name == "regression"
        predicted = (f, variances) if is_regression else probit_outputs(f, variances).softmax(-1)
        return self._nll(predicted, y).flatten(1).sum(1).cpu()

    def _nll(self, predicted: Any, y: Tensor) -> Tensor:
        """Return the NLL (nats) of each target, for class probabilities or means and variances."""
        if isinstance(predicted, tuple):
            f, variance = predicted[0], predicted[1] + self.sigma_noise.square()
            return 0.5 * ((f - y).square() / variance + variance.log())
        counted = y != IGNORED
        p = predicted[..., counted, :]
        return -p.log().gather(-1, y[counted][:, None].expand(*p.shape[:-1], 1))

    def _split(self, batch: Any, task: Task) -> tuple[Any, Tensor]:
        """Return the inputs and targets of a batch, on the model's device."""
        x, y = split_batch(batch, task.options)
        x, y = detached(x, self._device), detached(y, self._device)
        with eval_mode(self.model):
            return x, task.targets(self.model, x, y)

    def _grid_loss(
        self,
        val_loader: Iterable[Any],
        loss: Callable[..., Any] | None,
        pred_type: str,
        link_approx: str,
        n_samples: int,
    ) -> float:
        """Return the loss on validation data, by default the mean NLL (nats)."""
        task, outputs, total, count = Task(self.likelihood, self.options), [], 0.0, 0
        is_metric = hasattr(loss, "update") and hasattr(loss, "compute")
        if is_metric:
            loss.reset()  # pyright: ignore
        for batch in val_loader:
            x, y = self._split(batch, task)
            # For rewards, the labels say which of two inputs is better, so predict classes.
            predicted = self._predict(x, pred_type, False, link_approx, n_samples, loss is None)
            parts = predicted if isinstance(predicted, tuple) else (predicted,)
            if is_metric:
                loss.update(parts[0], y)  # pyright: ignore
            elif loss is not None:
                outputs.append((*parts, y))
            else:
                total, count = total + self._nll(predicted, y).sum().item(), count + len(y)
        if is_metric:
            return float(loss.compute().sum())  # pyright: ignore
        if loss is not None:
            return float(loss(*(torch.cat(part) for part in zip(*outputs, strict=True))))
        return total / count if count else math.nan

    # Predictions

    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str | None = None,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Return class probabilities (N, C), or for regression means and covariances without noise.

        Means have the shape (N, C) and covariances (N, C, C). Outputs (N, ..., C) have a prediction
        at each position.

        Args:
            x: inputs.
            pred_type: "glm" for the linearised network, or "nn" for the network at sampled weights.
            joint: whether regression returns the joint covariance of all outputs, (N·C, N·C), and
                means (N·C,).
            link_approx: link for classes: "probit", "mc", or the Laplace bridge "bridge" or
                "bridge_norm". "nn" supports only "mc". None is "probit", or "mc" for "nn".
            n_samples: number of samples.
            diagonal_output: whether to return only the diagonals (N, C) of the covariances.
            generator: generator of the samples.
            fitting: whether a reward model returns class probabilities, as in the fit.
            model_kwargs: not supported; pass a mapping to a model with several arguments.

        Raises:
            ValueError: a prediction, a link or a keyword is not supported.
            NotImplementedError: the likelihood is neither classification nor regression.
        """
        if model_kwargs:
            raise ValueError(
                f"The keywords {', '.join(model_kwargs)} are not passed to the model. Pass the "
                "model's arguments as a mapping x."
            )
        link_approx = _checked_link(pred_type, link_approx)
        options = pred_type, joint, link_approx, n_samples, diagonal_output, generator
        with torch.set_grad_enabled(self.enable_backprop and torch.is_grad_enabled()):
            predicts_numbers = self._predicts_numbers and not (fitting and self._is_reward)
            return self._predict(x, *options, predicts_numbers=predicts_numbers)

    predictive = __call__

    @property
    def _predicts_numbers(self) -> bool:
        return self.likelihood.name == "regression" or self._is_reward

    def _predict(
        self,
        x: Any,
        pred_type: str,
        joint: bool,
        link_approx: str,
        n_samples: int,
        diagonal_output: bool,
        generator: torch.Generator | None = None,
        predicts_numbers: bool | None = None,
    ) -> Any:
        self._check_predicts()
        numbers = (
            self.likelihood.name == "regression" if predicts_numbers is None else predicts_numbers
        )
        if pred_type == "nn" or (not numbers and link_approx == "mc"):
            samples = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
            return (samples.mean(0), samples.var(0)) if numbers else samples.softmax(-1).mean(0)
        if joint and numbers:
            J, f = self.jacobians(x)
            return f.flatten(), self.functional_covariance(J)
        variance_only = diagonal_output if numbers else link_approx == "probit"
        f, covariance = self.output_distribution(x, variance_only=variance_only)
        if numbers:
            return f, covariance
        if link_approx == "probit":
            return probit_outputs(f, covariance).softmax(-1)
        return _bridge(f, covariance, normalised=link_approx == "bridge_norm")

    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return samples of the network's outputs, (S, N, ..., C); arguments as `predictive`."""
        check_option("pred_type", pred_type, PredType)
        with torch.set_grad_enabled(self.enable_backprop and torch.is_grad_enabled()):
            if pred_type == "nn":
                return self.network_outputs(self.sample(n_samples, generator), x)
            f, covariance = self.output_distribution(x)
            f = f.to(covariance)  # at least float32
            noise = torch.randn(
                f.shape[-1], n_samples, generator=generator, device=f.device, dtype=f.dtype
            )
            if diagonal_output:
                root = covariance.diagonal(dim1=-2, dim2=-1).sqrt().diag_embed()
            else:
                root = torch.linalg.cholesky(covariance)
            return f + (root @ noise).movedim(-1, 0)

    def network_outputs(self, samples: Float[Tensor, "S P"], x: Any) -> Float[Tensor, "S N *R C"]:
        """Return outputs of the network itself at parameter vectors, without changing the network.

        Small inputs run at many vectors at once if all modules are of classes in
        `kfac_backend.engine.model_calls.VECTORISED`. Otherwise one vector follows the other.

        Args:
            samples: parameter vectors θ from `sample`.
            x: inputs, a tensor or a mapping of tensors; moved to the model's device.
        """
        check_whole(self.model, "The network at other parameters")
        x = to_device(x, self._device)
        named = zip(self._named(samples).items(), self.params, strict=True)
        values = {name: value.to(p.dtype) for (name, value), p in named}  # (S, *shape)
        with eval_mode(self.model):
            return at_least_float32(call_with_each(self.model, values, x))

    def predictive_samples(self, *args: Any, **keywords: Any) -> Tensor:
        """Return `functional_samples` with the same arguments, as probabilities for classes."""
        self._check_predicts()
        samples = self.functional_samples(*args, **keywords)
        return samples if self._predicts_numbers else samples.softmax(-1)

    def _check_predicts(self) -> None:
        if self.likelihood.name not in ("classification", "regression"):
            raise NotImplementedError(
                f"laplace-torch's predictions do not support likelihood '{self.likelihood}'. Use "
                "marglik.laplace_predictive(la)(x)."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the fit without the network, in a form for `torch.save` and `torch.load`."""
        fit = self.fitted_curvature().state_dict()
        names = [*trainable_parameters(self.model)]
        return {name: getattr(self, name) for name in SAVED} | {"fit": fit, "names": names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`, with the network at the same parameters.

        Raises:
            ValueError: the state lacks entries; or it has other values or dtypes of parameters, or
                another likelihood, structure or subset. This object is then unchanged.
        """
        check_keys("Laplace", state, (*SAVED, "fit", "names"))
        if state["structure"] != self.structure:
            raise ValueError(
                f"The state has hessian_structure={state['structure']!r}, but this Laplace has "
                f"{self.structure!r}. Create it with the hessian_structure of the state."
            )
        names, indices = [*trainable_parameters(self.model)], state["indices"].to(self.indices)
        if state["names"] != names or not torch.equal(indices, self.indices):
            raise ValueError(
                f"The state has {len(indices)} parameters in {len(state['names'])} tensors, but "
                f"this Laplace has {len(self.indices)} in {len(names)}. Create it with the state's "
                "subset_of_weights and subnetwork_indices."
            )
        here, there = parameter_vector(self.params).detach(), state["mean"]
        if here.dtype != there.dtype:
            raise ValueError(
                f"The state is for a model in {there.dtype}, but this model is in {here.dtype}. "
                "Convert the model first (model.to(dtype))."
            )
        if here.shape != there.shape or not torch.equal(here, there.to(here)):
            raise ValueError(
                "The state was saved with other values of the model's parameters. Load these "
                "parameters first."
            )
        form = KroneckerFactors if self.structure == "kron" else JacobianGGN
        curvature = form.from_state_dict(state["fit"]).to(self._device)
        self.restore(curvature, state["sample_size"])
        self.fingerprints = state["fingerprints"]
        for name in ("prior_precision", "prior_mean", "sigma_noise", "temperature"):
            setattr(self, name, state[name])


class FullLaplace(ParametricLaplace):
    """Laplace approximation of all weights, with the whole GGN."""

    _structure = "full"


class KronLaplace(ParametricLaplace):
    """Laplace approximation of all weights, with Kronecker factors."""


class DiagLaplace(ParametricLaplace):
    """Laplace approximation of all weights, with the GGN's diagonal."""

    _structure = "diag"


class LowRankLaplace(ParametricLaplace):
    """Laplace approximation of all weights, with the GGN's largest eigenpairs."""

    _structure = "lowrank"


class LLLaplace(ParametricLaplace):
    """Laplace approximation of the last layer."""

    _subset = "last_layer"
    _adds_at_other_weights = False  # curvatures for different features must not be added


class FullLLLaplace(LLLaplace):
    """Laplace approximation of the last layer, with its whole GGN."""

    _structure = "full"


class KronLLLaplace(LLLaplace):
    """Laplace approximation of the last layer, with Kronecker factors."""


class DiagLLLaplace(LLLaplace):
    """Laplace approximation of the last layer, with the GGN's diagonal."""

    _structure = "diag"


class SubnetLaplace(ParametricLaplace):
    """Laplace approximation of a subnetwork."""

    _subset = "subnetwork"
    _adds_at_other_weights = False

    @property
    def n_params_subnet(self) -> int:
        """Number of parameters with a posterior."""
        return self.n_params

    @property
    def mean_subnet(self) -> Tensor:
        """θ* of the parameters with a posterior."""
        return self.mean[self._ggn_indices()]

    def assemble_full_samples(self, subnet_samples: Tensor) -> Tensor:
        """Return θ* (S, P) with its subnetwork replaced by samples (S, P_subnet)."""
        return self.mean.expand(len(subnet_samples), -1).index_copy(
            1, self._ggn_indices(), subnet_samples.to(self.mean)
        )


class FullSubnetLaplace(SubnetLaplace):
    """Laplace approximation of a subnetwork, with its whole GGN."""

    _structure = "full"


class DiagSubnetLaplace(SubnetLaplace):
    """Laplace approximation of a subnetwork, with the GGN's diagonal."""

    _structure = "diag"


def _checked_link(pred_type: str, link_approx: str | None) -> str:
    """Return the link of predictions; "nn" has only "mc".

    Raises:
        ValueError: the prediction or the link is not supported.
    """
    check_option("pred_type", pred_type, PredType)
    if link_approx is None:
        return "mc" if pred_type == "nn" else "probit"
    links = Literal["mc"] if pred_type == "nn" else LinkApprox
    check_option(f"pred_type={pred_type!r} with link_approx", link_approx, links)
    return link_approx


def _bridge(f: Tensor, covariance: Tensor, normalised: bool) -> Tensor:
    """Return class probabilities by the Laplace bridge, the mean of a Dirichlet.

    Source: Hobbhahn, Kristiadi & Hennig 2022 (arXiv:2003.01227); ``normalised`` is laplace-torch's
    correction of the variance.
    """
    C, rows = f.shape[-1], covariance.sum(-1)  # (N, ..., C)
    total = rows.sum(-1, keepdim=True)  # (N, ..., 1)
    # Step 1: condition on Σ_c f_c = 0. The softmax does not depend on this sum.
    f = f - rows * f.sum(-1, keepdim=True) / total
    variance = covariance.diagonal(dim1=-2, dim2=-1) - rows.square() / total
    if normalised:
        scale = variance.mean(-1, keepdim=True) / (C / 2) ** 0.5
        f, variance = f / scale.sqrt(), variance / scale
    # Step 2: the Dirichlet's parameters.
    alpha = (1 - 2 / C + f.exp() / C**2 * (-f).exp().sum(-1, keepdim=True)) / variance
    return (alpha / alpha.sum(-1, keepdim=True)).nan_to_num(1.0)
