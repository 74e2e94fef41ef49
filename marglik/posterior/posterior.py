"""The Laplace posterior: a Gaussian at the network's parameters.

p(θ | D) ≈ N(θ*, (H/(σ²T) + P₀)⁻¹). H is the GGN, a sum over the data. P₀ is the prior precision
with one δ per tensor. H is Kronecker-factored, block by block. For few parameters it can also be
dense, diagonal or of low rank. The precision is an operator (`marglik.posterior.precision`). With
Kronecker factors the evidence needs only eigenvalues, so eigenvectors are computed when a
prediction first needs them. `marglik.laplace` offers this posterior with the interface of
laplace-torch.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kfac_backend.blocks.block import (
    EigenBlock,
    KroneckerBlock,
    compute_eigenvalues,
    decompose,
)
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.blocks.spectrum import Spectra
from kfac_backend.covariance.last_layer import LastLayerCovariance
from kfac_backend.covariance.linearised import linearised_outputs
from kfac_backend.covariance.output_covariance import OutputCovariance
from kfac_backend.curvature import CurvaturePass
from kfac_backend.eigenvalue_correction import corrected_factors
from kfac_backend.engine.batches import check_read_twice, to_device
from kfac_backend.engine.model_calls import call_with
from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.engine.task import check_finite
from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.options import CurvatureOptions, check_option, check_positive
from kfac_backend.precision import at_least_float32
from kfac_backend.ranks import ProcessGroupOption, Ranks
from kfac_backend.sharding import check_whole, is_sharded, local_part, squared_norms
from marglik.eval_mode import eval_mode
from marglik.posterior.evidence import EvidenceTerms
from marglik.posterior.fingerprints import FingerprintedBatches, concatenated
from marglik.posterior.fitted_weights import FittedWeights, trainable_parameters
from marglik.posterior.jacobian_ggn import JacobianGGN, Structure, jacobian_ggn
from marglik.posterior.jacobians import JacobianCovariance, parameter_vector
from marglik.posterior.precision import KroneckerPrecision, Precision

T = TypeVar("T")
NOT_FITTED = "The Laplace approximation is not fitted. Call fit() first."
Layers = Literal["all", "last"]
"""Layers whose uncertainty is included. "last" treats all other layers as constants."""


class Posterior:
    """The Gaussian posterior N(θ*, (H/(σ²T) + P₀)⁻¹) of a network's trainable parameters.

    `fit` computes the curvature H and takes θ* from the model; `restore` does the same with
    existing factors. All other quantities are computed on first use and cached: evidence terms,
    eigenvectors, and functions for output covariances. A new fit clears the cache. A new δ, σ or T
    keeps eigenvalues and eigenvectors, which depend only on H. It clears the covariance functions
    and hides the calibrations, which belong to the former values. It is therefore cheap to try many
    hyperparameters.

    A posterior belongs to the weights at which it was fitted. If the network has other weights,
    evidence, samples and predictions raise an error, see `check_weights`. Constant entries, such as
    an embedding's padding, have no prior, and samples keep their values.

    `fit` and predictions run the model in eval mode and then restore its mode. N is the number of
    examples that `fit` read. A temperature T divides the whole log-likelihood, including the
    normaliser of regression.

    Args:
        model: the network at its MAP parameters; frozen parameters have no posterior.
        likelihood: "classification", "regression", "bernoulli", or another of
            `kfac_backend.likelihoods`.
        options: all options of the curvature pass.
        prior_precision: δ, a scalar or one per trainable tensor. It belongs to the likelihood of
            the whole data set (weight decay · N / T), see `marglik.posterior.prior`.
        sigma_noise: σ of regression.
        temperature: T; the likelihood is raised to the power 1/T.
        prior_mean: the mean of the prior, a scalar or one per trainable parameter.
        structure: structure of the precision: "kron", or, from Jacobians, "full", "diag" or
            "lowrank", for at most a few thousand parameters. From Jacobians, δ may also be one per
            parameter.
        rank: K, the number of eigenpairs of "lowrank". If H has more eigenpairs, the results depend
            slightly on the batches of the fit, see `JacobianGGN`.
        indices: indices of the parameters that have a posterior, in the vector of all trainable
            parameters; the others are constants. None selects all. "kron" needs whole tensors.
        enable_backprop: whether `output_distribution` keeps its graph in the inputs, which needs
            Jacobians.
        generator: random numbers for a Fisher that draws, on the model's device.
        process_group: the ranks of `torch.distributed` that fit together, each with a shard of the
            data; None for this process alone.
        former: another posterior of the model, whose pass over data, with its proof of the model,
            `fit` uses again. See `CurvaturePass.factors_of`.
        keywords: single options that override fields of ``options``, such as
            ``kfac_approx="reduce"``.

    Raises:
        ValueError: an option is not supported, or a hyperparameter is not positive.
        TypeError: a keyword is not an option.
    """

    _adds_at_other_weights: ClassVar[bool] = False
    """Whether ``fit(override=False)`` after more training adds the curvature at the new weights."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        options: CurvatureOptions = CurvatureOptions(),  # noqa: B008
        *,
        prior_precision: float | Tensor = 1.0,
        sigma_noise: float | Tensor = 1.0,
        temperature: float = 1.0,
        prior_mean: float | Tensor = 0.0,
        structure: Structure = "kron",
        rank: int = 100,
        indices: Tensor | None = None,
        enable_backprop: bool = False,
        generator: torch.Generator | None = None,
        process_group: ProcessGroupOption = "default",
        former: "Posterior | None" = None,
        **keywords: Any,
    ) -> None:
        check_module(model)
        options = options.replace(**keywords) if keywords else options
        check_structure(options, structure)
        if structure != "kron":
            check_whole(model, f"structure {structure!r}")
        self.structure: Structure = structure
        self._rank, self.enable_backprop = rank, enable_backprop
        self.ranks = Ranks(process_group)
        """The ranks that fit together."""
        self.model = model
        self._curvature: KroneckerFactors | JacobianGGN | None = None
        self.options = options
        self.likelihood = likelihood
        self.generator = generator
        named = trainable_parameters(self.model)
        self._sizes = [p.numel() for p in named.values()]
        number = sum(self._sizes)
        self.indices = torch.arange(number) if indices is None else _checked(indices, number)
        """Indices of the parameters that have a posterior, in the vector of all trainable
        parameters."""
        if structure == "kron" and indices is not None:
            raise ValueError(
                "structure='kron' has one block per tensor, but indices select single weights. "
                "Freeze the other tensors, or choose 'full' or 'diag'."
            )
        self.n_layers = len(self._sizes)
        dtypes = {p.dtype for p in named.values()} or {next(model.parameters()).dtype}
        # Use the widest dtype: adapters may be wider than a frozen base.
        dtype = reduce(torch.promote_types, dtypes)
        self.mean: Tensor = torch.zeros((), device=self._device, dtype=dtype)
        self.temperature = temperature
        self._forget()
        self._fitted: FittedWeights | None = None
        self.prior_mean = prior_mean
        self.prior_precision = prior_precision
        self.sigma_noise = sigma_noise
        self.n_data, self.n_outputs = 0, 0
        self._calibrations: tuple[dict[str, Any], tuple] = {}, ()
        self.sample_size: int | None = None
        """M, the number of examples if `fit` used a random sample of the data; None for all
        data."""
        self.fingerprints: Tensor | None = None
        """Fingerprints of the fit's examples, see `marglik.posterior.fingerprints`; None if the
        inputs have none."""
        # Later fits use it again, with its proof of the model.
        self._curvature_pass: CurvaturePass | None = former and former._curvature_pass

    def __repr__(self) -> str:
        sample = "" if self.sample_size is None else f"{self.sample_size} of "
        fitted = f"fitted to {sample}{self.n_data} examples"
        fitted = "not fitted" if self._curvature is None else fitted
        return (
            f"{type(self).__name__}({type(self.model).__name__}, '{self.likelihood}', "
            f"{self.n_params} parameters, {fitted})"
        )

    @property
    def n_params(self) -> int:
        """Number of parameters that have a posterior."""
        return len(self._ggn_indices())

    @property
    def factors(self) -> KroneckerFactors | None:
        """Fitted curvature H at σ = T = 1, a sum over the data; None before `fit`.

        Also None if H is from Jacobians, see `fitted_curvature`.
        """
        return self._curvature if isinstance(self._curvature, KroneckerFactors) else None

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _wide_dtype(self) -> torch.dtype:
        """Dtype of eigenvectors, δ and σ: at least float32, because float16 cannot hold these."""
        return torch.promote_types(self.mean.dtype, torch.float32)

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the targets. It can be set before the fit, also by name."""
        return self._likelihood

    @likelihood.setter
    def likelihood(self, likelihood: Likelihood | str) -> None:
        if self._curvature is not None:
            raise ValueError(
                f"The posterior was fitted with likelihood '{self.likelihood}', and its curvature "
                "depends on the likelihood. Fit another posterior: Posterior(model, "
                f"'{likelihood}')."
            )
        likelihood = likelihood_of(likelihood)
        self.options.check(likelihood)
        self._likelihood = likelihood

    @property
    def temperature(self) -> float:
        """T > 0; the likelihood is raised to the power 1/T."""
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        check_positive("temperature", temperature)
        self._temperature = temperature

    @property
    def prior_precision(self) -> Tensor:
        """δ > 0, (1,) or one per trainable tensor. Set it to a scalar or a tensor.

        For a posterior from Jacobians also one per parameter with a posterior.
        """
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, prior_precision: float | Tensor) -> None:
        check_positive("prior_precision", prior_precision)
        delta = torch.as_tensor(prior_precision, dtype=torch.float64)
        numbers = [1, self.n_layers]
        if self.structure != "kron":
            numbers += [len(self.indices), self.n_params]
        if delta.dim() > 1 or delta.numel() not in numbers:
            raise ValueError(
                f"prior_precision has shape {tuple(delta.shape)}. Pass a scalar or "
                f"({self.n_layers},), one per trainable tensor."
            )
        self._prior_precision = self._as_hyperparameter(delta.reshape(-1))

    @property
    def sigma_noise(self) -> Tensor:
        """σ of regression, 1 for other likelihoods; a scalar."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, sigma_noise: float | Tensor) -> None:
        check_positive("sigma_noise", sigma_noise)
        sigma = torch.as_tensor(sigma_noise, dtype=torch.float64)
        if sigma.numel() != 1 or sigma.dim() > 1:
            raise ValueError(
                f"sigma_noise has shape {tuple(sigma.shape)}. Pass one number for all outputs."
            )
        if not self._likelihood.has_sigma and sigma != 1:
            raise ValueError(
                f"sigma_noise is {sigma.item()}. Only regression supports a noise other than 1."
            )
        self._sigma_noise = self._as_hyperparameter(sigma.reshape(()))

    @property
    def prior_mean(self) -> Tensor:
        """Copy of the prior's mean: a scalar, (1,) or one per trainable parameter."""
        return self._prior_mean.clone()

    @prior_mean.setter
    def prior_mean(self, prior_mean: float | Tensor) -> None:
        mean = torch.as_tensor(prior_mean, dtype=torch.float64)
        number = sum(self._sizes)
        if mean.dim() > 1 or mean.numel() not in (1, number) or not mean.isfinite().all():
            raise ValueError(
                f"prior_mean has shape {tuple(mean.shape)}. Pass a finite scalar or ({number},) "
                "finite numbers, one per trainable parameter."
            )
        if (self._fitted or mean.numel() > 1) and is_sharded(self.model):
            raise NotImplementedError(
                "The prior of a network under fully_shard supports one mean for all parameters. "
                "Set it before the fit: Posterior(..., prior_mean=0.1)."
            )
        with torch.inference_mode(False):
            self._prior_mean = mean.detach().clone().to(self.mean)
        self._terms = None

    @torch.inference_mode(False)  # autograd could not save inference tensors
    def _as_hyperparameter(self, value: Tensor) -> Tensor:
        """Return δ or σ in the posterior's dtype, with its graph."""
        value = value.clone() if value.is_inference() else value
        return value.to(self.mean.device, self._wide_dtype)

    @property
    def _hyperparameters(self) -> tuple:
        """Hyperparameters of the covariance, as values that can be compared."""
        return tuple(self._prior_precision.tolist()), self._sigma_noise.item(), self.temperature

    @property
    def calibrations(self) -> dict[str, dict[str, Any]]:
        """Maps the label of a predictive to its calibration by `marglik.calibrate`, as plain data.

        The mapping is saved with the posterior. Calibrations belong to the hyperparameters at which
        they were set. With other hyperparameters the mapping is empty. The returned mapping is a
        copy; to change it, assign a whole mapping.
        """
        calibrations, at = self._calibrations
        return dict(calibrations) if at == self._hyperparameters else {}

    @calibrations.setter
    def calibrations(self, calibrations: dict[str, dict[str, Any]]) -> None:
        self._calibrations = calibrations, self._hyperparameters

    # --- fitting ---

    @torch.inference_mode(False)  # gradients are needed in any mode of the caller
    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        corrected: bool = False,
        stands_for: int | None = None,
        repeat_proof: bool = True,
    ) -> None:
        """Compute the curvature at the model's current parameters.

        All ranks of the process group call this together, each with its shard of the data. All then
        have the evidence of all the data; see `kronecker_factors`. One rank stores each block.
        `laplace_predictive` with ``ranks`` needs no other call. Before a single rank computes
        samples or predictions, call `gather`.

        Args:
            train_loader: any iterable of batches (x, y), or of mappings.
            override: whether to discard earlier data; False adds the new data to it.
            progress_bar: whether to show a progress bar.
            corrected: whether to make a second pass over the data, which computes the diagonal of
                the exact blocks in the factors' eigenbasis; see `kfac_backend.corrected_factors`.
            stands_for: N, if the data is a random sample of M of N examples. Sums are multiplied by
                N/M, so loss, curvature and evidence are estimates for all the data.
            repeat_proof: whether a pass that has proved the model proves it again, see
                `CurvaturePass.factors_of`.

        Raises:
            ValueError: corrected eigenvalues with override=False after a fit, or data added at
                other weights.
            TypeError: corrected eigenvalues for data that can be read only once.
        """
        adds = not override and self._curvature is not None
        if corrected and adds:
            raise ValueError(
                "override=False adds data and so changes the eigenvectors, but the corrected "
                "eigenvalues belong to the former ones. Fit all data at once, or pass "
                "corrected=False."
            )
        if adds and not self._adds_at_other_weights:
            self.check_weights()
        if corrected:
            check_read_twice(train_loader)
        former = self.fingerprints if adds else None
        with eval_mode(self.model):
            batches = FingerprintedBatches(train_loader, self.model, self.options)
            curvature = self._curvature_of(batches, progress_bar, repeat_proof)
            if corrected:
                curvature = corrected_factors(
                    curvature,
                    self.model,
                    train_loader,
                    generator=self.generator,
                    progress=progress_bar,
                    process_group=self.ranks.process_group,
                )
        num_seen = int(curvature.num_data)
        if stands_for is not None:
            curvature = replace(curvature * (stands_for / curvature.num_data), num_data=stands_for)
        if adds:
            curvature = self._curvature + curvature  # pyright: ignore  # of one structure
        if self.ranks.size > 1 and isinstance(curvature, KroneckerFactors):
            # Sharing the work needs all ranks, and all are here now. Later a single rank may need
            # the evidence.
            compute_eigenvalues(curvature.blocks.values(), self.ranks, self._device)
        parts = self.ranks.gather(concatenated(batches.parts))
        self._take(curvature, None if stands_for is None else num_seen)
        self.fingerprints = concatenated([former, *parts] if adds else parts)

    def gather(self) -> None:
        """Bring all factors to all ranks; collective.

        After a fit by several ranks, samples, predictions and saving on one rank need this.
        """
        factors = self.factors
        if factors is not None and self.ranks.size > 1:
            self._curvature = factors.gathered(self.ranks, self._device)
            # The factors are the same, elsewhere, so cached results stay valid.
            self._version = [block.version for block in self._curvature.blocks.values()]

    def _curvature_of(self, data: Iterable[Any], progress: bool, repeat_proof: bool) -> Any:
        if self.structure != "kron":
            return jacobian_ggn(
                self.model,
                data,
                self._likelihood,
                self.options,
                structure=self.structure,
                rank=self._rank,
                indices=self.indices.to(self._device),
                ranks=self.ranks,
                generator=self.generator,
                progress=progress,
            )
        # A pass can be reused for another matrix, but not for other targets, draws or ranks.
        names = ("kfac_approx", "fisher", "mc_samples")
        matrix: Any = {name: getattr(self.options, name) for name in names}
        curvature_pass = self._curvature_pass
        if (
            curvature_pass is None
            or curvature_pass.driver.model is not self.model
            or curvature_pass.driver.options.replace(**matrix) != self.options
            or curvature_pass.driver.generator is not self.generator
            or curvature_pass.driver.ranks != self.ranks
            or curvature_pass.driver.task.likelihood.name != self._likelihood.name
        ):
            self._curvature_pass = curvature_pass = CurvaturePass(
                self.model,
                self._likelihood,
                self.options,
                generator=self.generator,
                process_group=self.ranks.process_group,
            )
        return curvature_pass.factors_of(
            data, progress, self._likelihood, repeat_proof=repeat_proof, **matrix
        )

    @torch.inference_mode(False)
    def restore(
        self, curvature: KroneckerFactors | JacobianGGN, sample_size: int | None = None
    ) -> None:
        """Use a given curvature at the model's current parameters.

        Args:
            curvature: curvature of all the data, or of a sample, scaled to all.
            sample_size: the number of examples in that sample.

        Raises:
            TypeError: the curvature has another structure.
            ValueError: the curvature has other parameters or another likelihood than the posterior.
        """
        if self.structure == "kron":
            if not isinstance(curvature, KroneckerFactors):
                raise TypeError(
                    f"The curvature is {type(curvature).__name__}. Pass the KroneckerFactors that "
                    "kronecker_factors(model, data, likelihood) returns."
                )
            curvature.check_alignment(self.model)
        elif not isinstance(curvature, JacobianGGN) or curvature.structure != self.structure:
            raise TypeError(
                f"The curvature is {type(curvature).__name__}. Pass the JacobianGGN of a fit with "
                f"structure {self.structure!r}."
            )
        elif not torch.isin(curvature.indices.cpu(), self.indices.cpu()).all():
            raise ValueError(
                "The GGN belongs to other parameters than this posterior. Select the same "
                "parameters."
            )
        likelihood = curvature.likelihood
        if likelihood.name != self.likelihood.name:
            raise ValueError(
                f"The curvature belongs to likelihood '{likelihood}', but the posterior has "
                f"'{self.likelihood}'. Create the posterior with the same likelihood."
            )
        self._take(curvature, sample_size)

    def _take(self, curvature: KroneckerFactors | JacobianGGN, sample_size: int | None) -> None:
        """Store this curvature, which is known to fit the model's parameters."""
        self._take_weights(curvature)
        self.sample_size, self.fingerprints = sample_size, None
        self._likelihood = curvature.likelihood  # with the fitted parameters
        self._curvature, self._calibrations = curvature, ({}, ())
        self.n_data, self.n_outputs = curvature.num_data, curvature.num_outputs
        self._forget()

    @torch.inference_mode(False)
    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Move the posterior and its network in place, like torch's modules; return the posterior.

        The factors have at least float32, in which eigenvalues are computed.
        """
        self.model.to(device, dtype)
        self.mean = self.mean.to(self._device, dtype)
        if self._fitted:
            self._fitted.move(self.model, self._named(self.mean))
        for name in ("_prior_precision", "_sigma_noise"):
            setattr(self, name, getattr(self, name).to(self._device, self._wide_dtype))
        self._prior_mean = self._prior_mean.to(self.mean)
        if self._curvature is not None:
            wide = None if dtype is None else torch.promote_types(dtype, torch.float32)
            self._curvature = self._curvature.to(device, wide)
            self._forget()
        return self

    # --- the weights of the fit ---

    def _take_weights(self, curvature: KroneckerFactors | JacobianGGN) -> None:
        """Store the network's weights as the mean, and for `check_weights`.

        For a network under `fully_shard` each rank stores its part; collective.
        """
        named = trainable_parameters(self.model)
        if not is_sharded(self.model):
            self.mean = parameter_vector(named.values()).detach()
            self._fitted = FittedWeights(self.model, self._named(self.mean))
            return
        assert isinstance(curvature, KroneckerFactors)
        parts = {name: local_part(p).clone() for name, p in named.items()}
        self.mean = parameter_vector(parts.values())
        self._fitted = FittedWeights(self.model, parts)
        rows = {
            i: block.constants[0] // named[name].shape[1:].numel()
            for i, (name, block) in enumerate(curvature.blocks.items())
            if block.constants[0] < block.constants[1]
        }
        # Compute it now, as all ranks are here. Later a single rank may need the evidence.
        self._squared_norms = squared_norms(
            list(named.values()), rows, float(self._prior_mean.mean())
        )

    def fitted_weights(self) -> dict[str, Tensor]:
        """Return trainable parameters and running statistics at the fit by name.

        ``model.load_state_dict(posterior.fitted_weights(), strict=False)`` restores them.
        """
        return {} if self._fitted is None else dict(self._fitted.values)

    def check_weights(self, *, by_value: bool = True) -> None:
        """Raise a ValueError unless the network has the weights at which the posterior was fitted.

        This compares the trainable parameters and BatchNorm's running statistics, but not frozen
        parameters or other buffers.

        Args:
            by_value: whether to compare the values of all parameters. Otherwise only parameters
                whose torch version counter or memory has changed are compared. This takes no time,
                but does not detect changes by fused optimisers or through ``.data``.

        Raises:
            AttributeError: the posterior is not fitted.
            ValueError: the weights or their dtype differ; the error names the first one.
        """
        if self._fitted is None:
            raise AttributeError(NOT_FITTED)
        self._fitted.check(self.model, by_value=by_value)

    def _forget(self) -> None:
        """Drop all results that were computed from the curvature."""
        self._version: object = None
        self._eigen: dict[str, EigenBlock] = {}
        self._covariances: dict[Any, tuple[tuple, Any]] = {}
        self._terms: EvidenceTerms | None = None

    def fitted_curvature(self, *, any_weights: bool = False) -> KroneckerFactors | JacobianGGN:
        """Return the curvature of the fit.

        Args:
            any_weights: whether to accept other weights of the network.

        Raises:
            AttributeError: the posterior is not fitted.
            ValueError: the network has other weights, see `check_weights`.
        """
        if self._curvature is None:
            raise AttributeError(NOT_FITTED)
        if not any_weights:
            self.check_weights(by_value=False)
        if isinstance(self._curvature, KroneckerFactors):
            # Drop results of blocks that were changed in place since.
            version = [block.version for block in self._curvature.blocks.values()]
            if version != self._version:
                self._forget()
                self._version = version
        return self._curvature

    def fitted_factors(self, *, any_weights: bool = False) -> KroneckerFactors:
        """Return the factors of a fit with structure "kron"; otherwise like `fitted_curvature`.

        Raises:
            NotImplementedError: another structure, which has no Kronecker factors.
        """
        curvature = self.fitted_curvature(any_weights=any_weights)
        if not isinstance(curvature, KroneckerFactors):
            raise NotImplementedError(
                f"A posterior with structure {self.structure!r} has no Kronecker factors. Fit one "
                "with structure 'kron', or call posterior.precision()."
            )
        return curvature

    # --- the evidence ---

    @property
    @torch.inference_mode(False)  # cached for calls with autograd
    def evidence_terms(self) -> EvidenceTerms:
        """Quantities of the fit for the evidence, independent of δ, σ and T; computed once."""
        curvature = self.fitted_curvature()
        if self._terms is None:
            tensors = torch.arange(self.n_layers, device=self._device)
            squares = (self.mean - self._prior_mean).detach().double().square()
            if isinstance(curvature, JacobianGGN):
                spectra = curvature
                norms, tensors = squares[curvature.indices], self._tensor_of(curvature.indices)
            else:
                blocks = curvature.blocks.values()
                spectra = Spectra.of(blocks)
                if is_sharded(self.model):
                    norms = self._squared_norms
                else:
                    parts = squares.split([block.numel for block in blocks])
                    for block, part in zip(blocks, parts, strict=True):
                        part[slice(*block.constants)] = 0
                    norms = torch.stack([part.sum() for part in parts])
            num_targets = curvature.num_loss_terms * curvature.num_outputs
            self._terms = EvidenceTerms(
                spectra, norms, tensors, curvature.loss, num_targets, curvature.likelihood,
                names=[*trainable_parameters(self.model)],
            )  # fmt: skip
        return self._terms

    def precision_per_block(self, delta: Tensor) -> Tensor:
        """Return δ of each block, or from Jacobians of each parameter, in float64.

        If a subnetwork has as many parameters as tensors, δ has one value per parameter.
        """
        if self.structure == "kron":
            return delta.to(self.mean.device, torch.float64).expand(self.n_layers)
        indices = self._ggn_indices()
        delta = delta.to(self._device, torch.float64)
        if delta.numel() == len(indices):
            return delta
        if delta.numel() == len(self.indices):  # the posterior's parameters include padding
            each = delta.new_zeros(sum(self._sizes))
            return each.index_put((self.indices.to(self._device),), delta)[indices]
        return delta.expand(self.n_layers)[self._tensor_of(indices)]

    def _ggn_indices(self) -> Tensor:
        """Return indices of the parameters with a posterior; from Jacobians without padding."""
        fit = self._curvature
        return (fit.indices if isinstance(fit, JacobianGGN) else self.indices).to(self._device)

    def _tensor_of(self, indices: Tensor) -> Tensor:
        """Return the index of the tensor of each parameter."""
        ends = torch.tensor(self._sizes, device=self._device).cumsum(0)
        return torch.searchsorted(ends, indices, right=True)

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """Return the log marginal likelihood (nats, a sum over the data), a float64 scalar.

        It is differentiable in the arguments. The arguments become the posterior's hyperparameters,
        as in laplace-torch.

        For speed, the network's weights are not compared by value. Changes by fused optimisers or
        through ``.data`` are not detected, see `check_weights`.

        Args:
            prior_precision: the new δ, a scalar or one per trainable tensor.
            sigma_noise: the new σ.

        Raises:
            AttributeError: the posterior is not fitted.
            ValueError: a noise other than 1, but the likelihood is not regression.
            FloatingPointError: the evidence is not finite; the error names the tensor.
        """
        terms = self.evidence_terms
        if prior_precision is not None:
            self.prior_precision = prior_precision
        if sigma_noise is not None:
            self.sigma_noise = sigma_noise
        # Use the arguments themselves: the properties round them, but the evidence is computed in
        # float64.
        delta = self.prior_precision if prior_precision is None else prior_precision
        sigma = self.sigma_noise if sigma_noise is None else sigma_noise
        delta = self.precision_per_block(torch.as_tensor(delta, dtype=torch.float64))
        sigma = torch.as_tensor(sigma, dtype=torch.float64).squeeze()
        return terms.log_marginal_likelihood(delta, sigma, self.temperature)

    def effective_parameters(self) -> Tensor:
        """Return γ_b = Σ_i λ_i / (λ_i + δ_b), (B,): parameters that the data determine.

        Each is between 0 and the number of the tensor's parameters; see `EvidenceTerms`.
        """
        terms, delta = self.evidence_terms, self.precision_per_block(self.prior_precision)
        gamma = terms.effective_parameters(delta, self.sigma_noise, self.temperature)
        return terms.sum_over_blocks(gamma, range(self.n_layers))

    # --- the Gaussian ---

    def precision(self, *, any_weights: bool = False) -> Precision:
        """Return H/(σ²T) + P₀ at the current hyperparameters, an operator.

        It is differentiable in δ and σ if these were set to tensors that require a gradient.
        Samples and output covariances treat both as constants.

        Args:
            any_weights: whether to accept other weights of the network; H belongs to the fit.

        Raises:
            AttributeError: the posterior is not fitted.
            ValueError: the network has other weights.
        """
        curvature = self.fitted_curvature(any_weights=any_weights)

        def make() -> Precision:
            if isinstance(curvature, KroneckerFactors):
                constants = {name: block.constants for name, block in curvature.blocks.items()}
                blocks = self.precision_blocks(any_weights=any_weights)
                return KroneckerPrecision(blocks, constants)
            return self._precision_of(curvature)

        hyperparameters = self._prior_precision, self._sigma_noise
        if torch.is_grad_enabled() and any(h.requires_grad for h in hyperparameters):
            return make()  # with its graph, which belongs to this call
        return self._cached("precision", make)

    def _precision_of(self, curvature: JacobianGGN) -> Precision:
        scale = 1 / (self.sigma_noise.double().square() * self.temperature)
        delta = self.precision_per_block(self.prior_precision)
        among = torch.isin(self._ggn_indices(), curvature.indices)
        return curvature.precision(delta[among], scale, at_least_float32(self.mean))

    def precision_blocks(
        self,
        names: Collection[str] | None = None,
        *,
        any_weights: bool = False,
        delta: float | None = None,
    ) -> dict[str, tuple[EigenBlock, Tensor]]:
        """Return eigenvectors and eigenvalues of each block of H/(σ²T) + P₀ by parameter name.

        ``names`` restricts the parameters, which saves the other decompositions. ``delta`` replaces
        the prior precision.
        """
        factors = self.fitted_factors(any_weights=any_weights)
        scale = 1 / (self.sigma_noise.square() * self.temperature)
        precisions = self.prior_precision if delta is None else torch.tensor(delta)
        names = set(factors.blocks if names is None else names)
        self._decompose([b for n, b in factors.blocks.items() if n in names - self._eigen.keys()])
        blocks = {}
        for name, d in zip(factors.blocks, precisions.expand(len(factors)), strict=True):
            if name not in names:
                continue
            eigen = self._eigen[name].scale(scale)
            blocks[name] = eigen, eigen.spectrum(d)
        return blocks

    def share_eigenvectors(self, ranks: Ranks) -> None:
        """Compute the eigenvectors for samples and covariances on all ranks; collective.

        Each rank decomposes some factors, and all ranks cache exactly the same eigenvectors.
        Without this call, each rank computes all of them on first use. A single rank does nothing.

        Args:
            ranks: the ranks that predict together.

        Raises:
            AttributeError: the posterior is not fitted.
            ValueError: a factor is not finite.
        """
        if ranks.size == 1 or self.structure != "kron":
            self.fitted_curvature()
            return
        blocks = self.fitted_factors().blocks
        # If only some ranks have them, all compute them again, so that all have the same bits.
        of_ranks = ranks.gather(set(self._eigen))
        missing = [b for name, b in blocks.items() if not all(name in own for own in of_ranks)]
        self._decompose(missing, ranks)

    @torch.inference_mode(False)  # these are cached, too
    def _decompose(self, blocks: list[KroneckerBlock], ranks: Ranks | None = None) -> None:
        """Compute eigenvectors, at least in float32."""
        wide = [block.to(dtype=self._wide_dtype) for block in blocks]
        names = [block.name for block in blocks]
        if is_sharded(self.model):  # all ranks call this, because they run the model together
            ranks = self.ranks
        self._eigen |= zip(names, decompose(wide, ranks, self._device), strict=True)

    @torch.no_grad()
    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> Float[Tensor, "S P"]:
        """Return samples θ of the posterior, parameter vectors (S, P), at least in float32.

        Raises:
            AttributeError: the posterior is not fitted.
            ValueError: ``n_samples`` is not positive, or the network has other weights.
        """
        check_positive("n_samples", n_samples)
        check_whole(self.model, "A sample of parameters")
        self.check_weights()
        changes = self.precision().sample(n_samples, generator)
        mean = at_least_float32(self.mean.detach())
        if self.structure == "kron":
            return mean + changes
        samples = mean.repeat(n_samples, 1)
        samples[:, self._ggn_indices()] += changes.to(mean)
        return samples

    def linearised_outputs(
        self, samples: Float[Tensor, "S P"], x: Any
    ) -> Float[Tensor, "S N *R C"]:
        """Return outputs f(x) + J(x) (θ − θ*) of the linearised network, at least in float32.

        With θ from `sample` they are exact samples of the outputs' distribution, jointly over all
        inputs and positions. The GGN is the Hessian of the linearised network's loss. In the
        network itself, the same samples give bad predictions. Source: Immer, Korzepa & Bauer 2021
        (arXiv:2008.08400). Each sample costs about three forward passes, for any number of outputs.

        Args:
            samples: parameter vectors θ from `sample`.
            x: inputs, a tensor or a mapping of tensors; moved to the model's device.

        Raises:
            AttributeError: the posterior is not fitted.
            ValueError: the network has other weights.
        """
        self.check_weights()
        changes = self._named(samples - at_least_float32(self.mean.detach()))
        with eval_mode(self.model):
            return linearised_outputs(self.model, changes, x)

    def _named(self, vectors: Float[Tensor, "*S P"]) -> dict[str, Tensor]:
        """Return parameter vectors as tensors in the shapes of the parameters, by name."""
        named = trainable_parameters(self.model)
        parts = vectors.split([p.numel() for p in named.values()], -1)
        return {
            name: part.reshape(*part.shape[:-1], *p.shape)
            for (name, p), part in zip(named.items(), parts, strict=True)
        }

    def output_distribution(
        self,
        x: Any,
        layers: Layers = "all",
        *,
        positions: Bool[Tensor, "N *R"] | None = None,
        classes: Int[Tensor, "*chosen K"] | None = None,
        variance_only: bool = False,
    ) -> tuple[Float[Tensor, "*chosen C"], Float[Tensor, "..."]]:
        """Return outputs f and covariances J Σ Jᵀ of the linearised network: (N, C), (N, C, C).

        Outputs (N, R, C) of sequences have a covariance at each position, (N, R, C, C). These take
        R·C backward passes per example; `linearised_outputs` is much cheaper for sequences. The
        Jacobian J is never stored. Source: Immer, Korzepa & Bauer 2021 (arXiv:2008.08400).

        Args:
            x: inputs, a tensor or a mapping of tensors; moved to the model's device.
            layers: "last" treats all layers but the last as constants (last-layer Laplace), which
                costs one forward pass, see `LastLayerCovariance`. "all" costs the same if the other
                layers are frozen.
            positions: mask that selects M positions of sequences; the results then are (M, C) and
                (M, C, C).
            classes: indices of K selected outputs, (K,), or (..., K) for each position; None
                selects all C.
            variance_only: whether to return the variances (..., C), the diagonals of the
                covariances, without allocating C×C arrays. For the last layer, variances cost no
                more than a forward pass for any C.

        Raises:
            AttributeError: the posterior is not fitted.
            ValueError: the outputs contain NaN or infinity, or the network has other weights.
        """
        check_option("layers", layers, Layers)
        self.check_weights()

        with eval_mode(self.model):
            covariance_of = self._output_covariance(x, layers)
            f, covariance = covariance_of(x, positions, classes, variance_only=variance_only)
        check_finite(self.model, f, x)
        return f, covariance

    def joint_output_distribution(
        self, x: Float[Tensor, "*T q d"], classes: list[int] | None = None
    ) -> tuple[Float[Tensor, "*T q K"], Float[Tensor, "*T q_K q_K"]]:
        """Return outputs (..., q, K) at sets X of q inputs and joint covariances J(X) Σ J(X)ᵀ.

        Row p·K + c of a covariance (..., q·K, q·K) is output c at input p. Both results are
        differentiable in inputs that require a gradient, as acquisition functions of Bayesian
        optimisation need. The Jacobian J is never stored, see `OutputCovariance.joint`.

        Args:
            x: sets of inputs, each input a vector, on the model's device. The results have the
                dtype of x.
            classes: indices of K selected outputs; None selects all.

        Raises:
            AttributeError: the posterior is not fitted.
            ValueError: x has fewer than two axes or no inputs, or the network has other weights.
            NotImplementedError: the outputs have several positions.
        """
        if x.dim() < 2 or not x.shape[:-1].numel():
            raise ValueError(
                f"x has shape {tuple(x.shape)}. Pass sets of inputs (..., q, d) with at least one "
                "input."
            )
        self.check_weights()
        sets = x.to(next(self.model.parameters()).dtype).reshape(-1, *x.shape[-2:])

        def make() -> OutputCovariance | JacobianCovariance:
            if self.structure == "kron":
                return OutputCovariance(self.model, self.precision_blocks())
            return self._jacobian_covariance()

        with eval_mode(self.model):
            f, covariance = self._cached("joint", make).joint(sets, classes)
        batch = x.shape[:-2]
        f = f.reshape(*batch, *f.shape[1:])
        return f.to(x.dtype), covariance.reshape(*batch, *covariance.shape[1:]).to(x.dtype)

    def _output_covariance(
        self, x: Any, layers: Layers, delta: float | None = None
    ) -> OutputCovariance | LastLayerCovariance | JacobianCovariance:
        """Return the function for output covariances at the current hyperparameters.

        ``delta`` replaces the prior precision of Kronecker factors.
        """

        def make() -> OutputCovariance | LastLayerCovariance | JacobianCovariance:
            by_jacobians = self.structure != "kron" or (self.enable_backprop and delta is None)
            learning = trainable_layers(self.model)
            alone = len(learning) == 1
            if layers == "all" and by_jacobians:
                return self._jacobian_covariance()
            if layers == "all" and not alone:
                return OutputCovariance(self.model, self.precision_blocks(delta=delta))
            last = learning[0] if alone else last_layer(self.model, x)
            # A block has the first name of a tied parameter.
            own = {id(p) for p in self.model.get_submodule(last).parameters()}
            names = {name for name, p in self.model.named_parameters() if id(p) in own}
            if by_jacobians:
                return self._jacobian_covariance(names, None if alone else last)
            blocks = self.precision_blocks(names, delta=delta)
            return LastLayerCovariance(self.model, last, blocks, alone=alone)

        return self._cached((layers, delta), make)

    def _jacobian_covariance(
        self, names: Collection[str] | None = None, layer: str | None = None
    ) -> JacobianCovariance:
        """Return the function for output covariances from Jacobians.

        Args:
            names: names of the uncertain parameters, None for all.
            layer: the layer in which they are uncertain, None for all layers that use them.
        """
        indices, precision = self._ggn_indices(), self.precision()
        if names is not None:
            is_uncertain = [name in names for name in trainable_parameters(self.model)]
            chosen = torch.tensor(is_uncertain, device=self._device)[self._tensor_of(indices)]
            indices, curvature = indices[chosen], self.fitted_curvature()
            if isinstance(curvature, JacobianGGN):
                precision = self._precision_of(curvature.restrict(chosen))
            else:
                precision = KroneckerPrecision(self.precision_blocks(names))
        return JacobianCovariance(self.model, indices, precision, self.enable_backprop, layer)

    def _cached(self, key: Any, make: Callable[[], T]) -> T:
        """Return a function for covariances, cached until a hyperparameter or option changes.

        It holds the inverse precision in the eigenbasis, and must work with autograd later, even if
        this call is under inference_mode.
        """
        # Drop results of other factors. The caller has checked the weights.
        self.fitted_curvature(any_weights=True)
        state = self._hyperparameters, self.enable_backprop
        if key not in self._covariances or self._covariances[key][0] != state:
            with torch.inference_mode(False), torch.no_grad():
                self._covariances[key] = state, make()
        return self._covariances[key][1]


def _checked(indices: Any, number: int) -> Tensor:
    """Return indices of some of the trainable parameters, after a check.

    Raises:
        ValueError: the indices are not a vector of different int64 numbers.
    """
    is_vector = isinstance(indices, Tensor) and indices.dtype == torch.long and indices.dim() == 1
    if not is_vector or not len(indices) or len(indices.unique()) != len(indices):
        raise ValueError(
            "Indices of parameters must be a vector of different int64 numbers, such as "
            f"torch.tensor([0, 7, 30]), not {indices!s:.80}."
        )
    if indices.min() < 0 or indices.max() >= number:
        raise ValueError(
            f"Indices of parameters must be 0 to {number - 1}, the trainable parameters of the "
            f"model, but they are from {int(indices.min())} to {int(indices.max())}."
        )
    return indices


def check_structure(options: CurvatureOptions, structure: str, name: str = "structure") -> None:
    """Raise a ValueError for options of Kronecker factors if the GGN is from Jacobians.

    ``name`` is the name of the structure's own option.
    """
    check_option(name, structure, Structure)
    if structure == "kron":
        return
    defaults = CurvatureOptions()
    of_factors = ("kfac_approx", "unsupported", "backward_precision", "diagonal_above")
    for option in (*of_factors, "expand_scaling"):
        value = getattr(options, option)
        if value != getattr(defaults, option) and (option, value) != ("kfac_approx", "expand"):
            raise ValueError(
                f"{option}={value!r} is only for {name} 'kron'. {structure!r} computes the GGN "
                "from Jacobians. Omit the option."
            )


def trainable_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers with own trainable parameters, in the model's order."""
    return [
        name
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]


def last_layer(model: nn.Module, x: Any) -> str:
    """Return the name of the layer with trainable parameters that starts last at input x.

    A module with parameters and inner layers starts before its inner layers, so it is not the last
    one.

    Raises:
        ValueError: no layer with trainable parameters runs.
    """
    ran: list[str] = []
    with torch.no_grad(), eval_mode(model):  # removes the hooks as well
        for name in trainable_layers(model):
            layer = model.get_submodule(name)
            layer.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
        call_with(model, {}, to_device(x, next(model.parameters()).device))
    if not ran:
        raise ValueError(
            f"{type(model).__name__} runs no layer with trainable parameters, so it has no last "
            "layer. Unfreeze a layer (requires_grad_(True)), or use all layers."
        )
    return ran[-1]
