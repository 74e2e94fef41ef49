"""`KronLaplace`: laplace-torch's interface on our fit, the evidence from cached eigenvalues."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from kfac_backend.coverage import check_module
from kfac_backend.factors import kronecker_factors
from kfac_backend.kronecker import KroneckerFactors
from kfac_backend.laplace_interface import KfacGGN, KfacInterface, check_alignment
from kfac_backend.laplace_kron import EigenKron, FactorKron, laplace
from kfac_backend.options import KfacApprox, Likelihood, check_option, check_positive
from kfac_backend.threads import turn_of
from marglik import evidence
from marglik.evidence import EvidenceTerms
from marglik.modes import in_eval_mode
from marglik.output_distribution import OutputDistribution

__all__ = ["KronLaplace"]


class KronLaplace(OutputDistribution):
    """Laplace approximation with Kronecker factors, for all weights of a network.

    A drop-in for laplace-torch's class of that name. What differs:

    - `fit` counts the examples it sees instead of asking ``len(loader.dataset)``, and leaves the
      model in the mode it was in; predictions run in eval mode and restore the mode, too.
    - The evidence uses eigenvalues in float64, computed once; eigenvectors wait until a predictive
      asks for them.
    - The linearised predictives need no Jacobian, see `output_distribution`.
    - With a temperature T the whole log-likelihood is divided by T, regression's normaliser
      included (laplace-torch leaves the normaliser as it is).

    Args:
        model: the network at its MAP parameters; frozen parameters have no posterior.
        likelihood: "classification", "regression" or "bernoulli".
        sigma_noise: σ of regression.
        prior_precision: δ, a scalar or one per trainable tensor; includes N, see `marglik.prior`.
        prior_mean: μ of the prior.
        temperature: T of the likelihood.
        enable_backprop: whether predictives can be differentiated with respect to inputs.
        dict_key_x: the input's key in batches that are mappings.
        dict_key_y: the targets' key in batches that are mappings.
        backend: `KfacGGN` or `KfacEF`.
        damping: add √δ to both factors' eigenvalues instead of δ to their products.
        backend_kwargs: keywords of the backend, for example ``{"stochastic": True}``; those of
            `KfacGGN` say which targets count (``ignore_index``, ``shift_labels``,
            ``dict_key_mask``).
        asdl_fisher_kwargs: what laplace-torch forwards to ``backend.kron``.
        kfac_approx: a mode, "auto" or modes by layers' names, see `kronecker_factors`; the
            backend's own default if None.
    """

    factors: KroneckerFactors | None = None
    """The fitted curvature, None before `fit`."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type = KfacGGN,
        damping: bool = False,
        backend_kwargs: dict[str, Any] | None = None,
        asdl_fisher_kwargs: dict[str, Any] | None = None,
        *,
        kfac_approx: KfacApprox | None = None,
    ) -> None:
        check_module(model)
        check_option("likelihood", likelihood, Likelihood)
        if not hasattr(backend, "fisher"):
            raise TypeError(
                f"backend {backend.__name__} is not one of kfac_backend's; pass KfacGGN or KfacEF, "
                "or use laplace.Laplace with other backends."
            )
        check_positive("temperature", temperature)
        unknown = set(asdl_fisher_kwargs or {}) - {"kfac_approx", "mc_samples"}
        if unknown:
            raise TypeError(
                f"asdl_fisher_kwargs has {sorted(unknown)[0]!r}; kron(...) takes 'kfac_approx' and "
                "'mc_samples'."
            )
        kwargs = dict(backend_kwargs or {})
        if kfac_approx is not None:
            kwargs["kfac_approx"] = kfac_approx
        self._eigen: EigenKron | None = None
        self._covariances = {}
        super().__init__(
            model,
            # laplace-torch does not know Bernoulli's, whose every use is overridden.
            "classification" if likelihood == "bernoulli" else likelihood,
            sigma_noise,
            prior_precision,
            prior_mean,
            temperature,
            enable_backprop,
            dict_key_x,
            dict_key_y,
            backend,
            damping,
            kwargs,
            asdl_fisher_kwargs,
        )
        _ = self.backend  # made while laplace-torch knows the likelihood
        self.likelihood = likelihood

    @property
    def prior_precision(self) -> Tensor:
        """δ > 0, (1,) or one per trainable tensor; set it to a scalar or a tensor."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, prior_precision: float | Tensor) -> None:
        check_positive("prior_precision", prior_precision)
        delta = torch.as_tensor(prior_precision)
        if delta.dim() > 1 or delta.numel() not in (1, self.n_layers):
            raise ValueError(
                f"prior_precision has shape {tuple(delta.shape)}; expected a scalar or "
                f"({self.n_layers},), one per trainable tensor."
            )
        inherited: Any = laplace.KronLaplace.prior_precision
        inherited.fset(self, prior_precision)

    @property
    def sigma_noise(self) -> Tensor:
        """σ > 0 of regression; set it to a scalar."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, sigma_noise: float | Tensor) -> None:
        check_positive("sigma_noise", sigma_noise)
        inherited: Any = laplace.KronLaplace.sigma_noise
        inherited.fset(self, sigma_noise)

    def fit(
        self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool = False
    ) -> None:
        """Compute the curvature at the model's present parameters.

        Args:
            train_loader: any iterable of batches (x, y), or of mappings.
            override: False adds the data to what was fitted before.
            progress_bar: whether to show a bar over the batches.
        """
        settings, backend = self._asdl_fisher_kwargs, cast(KfacInterface, self.backend)
        alone = backend.pass_options["backward_precision"] != "float32"
        with turn_of(self.model, alone):
            factors = in_eval_mode(self.model, kronecker_factors)(
                self.model,
                train_loader,
                self.likelihood,  # pyright: ignore[reportArgumentType]
                kfac_approx=settings.get("kfac_approx", backend.kfac_approx),
                fisher=backend.fisher,
                mc_samples=settings.get("mc_samples", getattr(backend, "num_samples", 1)),
                progress=progress_bar,
                dict_key_y=self.dict_key_y,
                **backend.pass_options,
            )
        if not override and self.factors is not None:
            factors = self.factors + factors
        self.restore(factors)

    def restore(self, factors: KroneckerFactors) -> None:
        """Be fitted, with these factors, at the model's present parameters.

        Raises:
            ValueError: factors of another model.
        """
        check_alignment(self.model, factors)
        self.mean = parameters_to_vector(self.params)
        if not self.enable_backprop:
            self.mean = self.mean.detach()
        self._set_factors(factors)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "KronLaplace":
        """Move the network and its posterior, in place, as torch's modules do; returns itself.

        Factors stay in float32 at least.
        """
        self.model.to(device, dtype)
        for name in ("_prior_precision", "_prior_mean", "_sigma_noise", "mean"):
            value = getattr(self, name)
            setattr(self, name, value.to(self._device, self._dtype))
        if self.factors is not None:
            wide = None if dtype is None else torch.promote_types(dtype, torch.float32)
            self._set_factors(self.factors.to(device, wide))
        return self

    def _set_factors(self, factors: KroneckerFactors) -> None:
        self.factors = factors
        self.loss = factors.loss
        self.n_data = factors.num_data  # pyright: ignore  # not whole where data has weights
        self.n_outputs = factors.num_outputs
        self.model.output_size = factors.num_outputs  # pyright: ignore  # laplace-torch reads it
        self.H_facs = FactorKron.from_factors(factors, self._dtype)
        self._eigen = None
        self._covariances = {}
        self._terms: EvidenceTerms | None = None
        self._means: tuple[Tensor, ...] = ()

    def _init_H(self) -> None:
        """Nothing to allocate: the factors come whole from the pass."""

    @property
    def H(self) -> EigenKron:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The curvature with eigenvectors, computed when first asked for."""
        if self.factors is None:
            raise AttributeError("The Laplace approximation is not fitted; call fit() first.")
        if self._eigen is None:
            self._eigen = FactorKron.from_factors(self.factors, self._dtype).decompose(self.damping)
        return self._eigen

    @property
    def evidence_terms(self) -> EvidenceTerms:
        """What the evidence needs; the eigenvalues are computed when first asked for."""
        if self.factors is None:
            raise AttributeError("The Laplace approximation is not fitted; call fit() first.")
        means = (cast(Tensor, self.mean), cast(Tensor, self.prior_mean))
        # A mean that was set anew needs new norms.
        if self._terms is None or any(a is not b for a, b in zip(means, self._means, strict=True)):
            mean, prior_mean = (m.detach() for m in means)
            self._terms = EvidenceTerms.from_factors(self.factors, mean, prior_mean)
            self._means = means
        return self._terms

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """The Laplace evidence (nats), float64, differentiable in what is passed.

        Args:
            prior_precision: sets δ first, a scalar or one per trainable tensor.
            sigma_noise: sets σ first.
        """
        terms = self.evidence_terms
        if sigma_noise is not None and self.likelihood != "regression":
            raise ValueError("sigma_noise can be set for regression only.")
        if prior_precision is not None:
            self.prior_precision = prior_precision  # pyright: ignore[reportIncompatibleMethodOverride]
        if sigma_noise is not None:
            self.sigma_noise = sigma_noise
        delta = self.prior_precision if prior_precision is None else prior_precision
        sigma = self.sigma_noise if sigma_noise is None else sigma_noise
        if self.damping:
            return super().log_marginal_likelihood()
        return evidence.log_marginal_likelihood(terms, delta, sigma, self.temperature)

    @property
    def log_likelihood(self) -> Tensor:
        """Log p(D|θ*) / T (nats)."""
        return evidence.log_likelihood(self.evidence_terms, self.sigma_noise, self.temperature)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Log det of the posterior precision, from eigenvalues alone unless damped."""
        if self.factors is None or self.damping:
            return super().log_det_posterior_precision
        return evidence.log_det_posterior_precision(
            self.evidence_terms, self.prior_precision, self.sigma_noise, self.temperature
        )

    def effective_parameters(self) -> Tensor:
        """γ per trainable tensor: how many of its directions the data determines."""
        return evidence.effective_parameters(
            self.evidence_terms, self.prior_precision, self.sigma_noise, self.temperature
        )

    def state_dict(self) -> dict[str, Any]:
        """laplace-torch's state, with our factors' under "H": `torch.load` reads it at its default.

        Without the network's frozen parameters and buffers; see `marglik.save_posterior`.
        """
        if self.factors is None:
            raise AttributeError("The Laplace approximation is not fitted; call fit() first.")
        return super().state_dict() | {"H": self.factors.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the state of another model or likelihood.
        """
        factors = KroneckerFactors.from_state_dict(state_dict["H"]).to(self._device)
        check_alignment(self.model, factors)
        if state_dict["likelihood"] != self.likelihood:
            raise ValueError(
                f"The state is of likelihood {state_dict['likelihood']!r}, this object of "
                f"{self.likelihood!r}."
            )
        for name in ("mean", "prior_mean", "prior_precision", "sigma_noise", "temperature"):
            setattr(self, name, state_dict[name])
        self._set_factors(factors)
