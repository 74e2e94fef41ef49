"""`KronLaplace`: `Posterior` in the interface of laplace-torch's class of that name.

Training, fitting and predicting use `Posterior` instead, and so do not import laplace-torch.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.laplace_torch.interface import KfacGGN, KfacInterface
from kfac_backend.laplace_torch.kron import EigenKron, FactorKron, laplace
from kfac_backend.likelihoods import likelihood_of
from kfac_backend.model.checks import check_module
from kfac_backend.options import KfacApprox, check_positive
from kfac_backend.precision import at_least_float32
from marglik.eval_mode import in_eval_mode
from marglik.posterior import evidence
from marglik.posterior.posterior import Posterior, parameter_vector

__all__ = ["KronLaplace"]


class KronLaplace(Posterior, laplace.KronLaplace):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Laplace approximation with Kronecker factors, for all weights of a network.

    A drop-in for laplace-torch's class of that name. What differs:

    - `fit` counts the examples it sees instead of asking ``len(loader.dataset)``, and leaves the
      model in the mode it was in; predictions run in eval mode and restore the mode, too.
    - The evidence uses eigenvalues in float64, computed once; eigenvectors are computed when a
      predictive first needs them.
    - The linearised predictives need no Jacobian, see `Posterior.output_distribution`. Sampled
      parameters are passed to the network; its own remain the MAP's, even if a prediction fails.
    - A temperature T divides the whole log-likelihood, including regression's normaliser
      (laplace-torch does not divide the normaliser).

    Args:
        model: the network at its MAP parameters; frozen parameters have no posterior.
        likelihood: "classification", "regression" or "bernoulli".
        sigma_noise: σ of regression.
        prior_precision: δ, a scalar or one per trainable tensor; includes N, see `prior`.
        prior_mean: 0; `laplace.KronLaplace` with our backend supports others.
        temperature: T of the likelihood.
        enable_backprop: whether predictives can be differentiated with respect to inputs.
        dict_key_x: the input's key in batches that are mappings.
        dict_key_y: the targets' key in batches that are mappings.
        backend: `KfacGGN` or `KfacEF`.
        damping: False; `laplace.KronLaplace` with our backend supports True.
        backend_kwargs: keywords of the backend: ``stochastic``, ``num_samples``, ``generator``,
            ``process_group``, and the options of `CurvatureOptions`.
        asdl_fisher_kwargs: keywords that laplace-torch forwards to ``backend.kron``.
        kfac_approx: a mode, "auto", or modes by layer name; None takes that of
            ``backend_kwargs``, or "auto".
    """

    # laplace-torch finds classes by this key among all subclasses: ours must not shadow its own.
    _key = ("all", "marglik_kron")

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
        likelihood_of(likelihood)
        check_positive("temperature", temperature)
        if damping or not isinstance(prior_mean, (int, float)) or prior_mean:
            raise ValueError(
                "damping=True and a prior_mean other than 0 are not supported; use "
                "laplace.KronLaplace(..., backend=KfacGGN)."
            )
        if not hasattr(backend, "fisher"):
            raise TypeError(
                f"backend {backend.__name__} is not one of kfac_backend's; pass KfacGGN or KfacEF, "
                "or use laplace.Laplace with other backends."
            )
        settings = dict(asdl_fisher_kwargs or {})
        kwargs = dict(backend_kwargs or {})
        if kfac_approx is not None:
            kwargs["kfac_approx"] = kfac_approx
        kwargs.setdefault("kfac_approx", "auto")  # the backends' own default is laplace-torch's
        laplace.KronLaplace.__init__(
            self,
            model,
            # laplace-torch knows two; every use of its likelihood is overridden for others.
            "regression" if likelihood == "regression" else "classification",
            sigma_noise,
            prior_precision,
            prior_mean,
            temperature,
            enable_backprop,
            dict_key_x,
            dict_key_y,
            backend,
            False,  # damping
            kwargs,
            settings,
        )
        # Now, since laplace-torch creates the backend from its own likelihood, which
        # Posterior.__init__ replaces.
        of_backend = cast(KfacInterface, self.backend)
        Posterior.__init__(
            self,
            model,
            likelihood,
            of_backend.options.but(**settings),
            prior_precision=prior_precision,
            sigma_noise=sigma_noise,
            temperature=temperature,
            generator=of_backend.generator,
            process_group=of_backend.ranks.process_group,
        )

    def restore(self, factors: KroneckerFactors) -> None:
        """Take these factors as the fit; with ``enable_backprop`` the mean stays in the graph."""
        super().restore(factors)
        if self.enable_backprop:
            self.mean = parameter_vector(self.params)

    def _set_factors(self, factors: KroneckerFactors) -> None:
        super()._set_factors(factors)
        self.model.output_size = factors.num_outputs  # pyright: ignore  # laplace-torch reads it
        self.H_facs = FactorKron.from_factors(factors, self._dtype)
        self._decomposed: EigenKron | None = None

    def _init_H(self) -> None:
        """Nothing to allocate: the factors come whole from the pass."""

    @property
    def H(self) -> EigenKron:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The curvature with eigenvectors, computed when first asked for."""
        factors = self.fitted_factors()
        if self._decomposed is None:
            self._decomposed = EigenKron.from_factors(factors, self._dtype)
        return self._decomposed

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Log det of the posterior precision, from eigenvalues alone."""
        if self.factors is None:
            return laplace.KronLaplace.log_det_posterior_precision.fget(self)  # pyright: ignore
        return evidence.log_det_posterior_precision(
            self.evidence_terms, self.prior_precision, self.sigma_noise, self.temperature
        )

    def optimize_prior_precision(self, *args: Any, **kwargs: Any) -> None:
        """Tune δ post hoc, by evidence or validation; arguments as in laplace-torch."""
        in_eval_mode(self.model, super().optimize_prior_precision)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The posterior predictive, in eval mode; arguments as in laplace-torch."""
        self._refuse_others()
        return in_eval_mode(self.model, super().__call__)(*args, **kwargs)

    def functional_samples(self, *args: Any, **kwargs: Any) -> Tensor:
        """Samples of the network's outputs, in eval mode; arguments as in laplace-torch."""
        return in_eval_mode(self.model, super().functional_samples)(*args, **kwargs)

    def predictive_samples(self, *args: Any, **kwargs: Any) -> Tensor:
        """Samples of the predictive, in eval mode; arguments as in laplace-torch."""
        self._refuse_others()
        return in_eval_mode(self.model, super().predictive_samples)(*args, **kwargs)

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`output_distribution` under laplace-torch's name; Jacobians if joint or for autograd."""
        if joint or self.enable_backprop:
            return super()._glm_predictive_distribution(X, joint, diagonal_output)
        f, covariance = self.output_distribution(X, variance_only=diagonal_output)
        return at_least_float32(f), covariance  # in the dtype of the covariance

    def _nn_functional_samples(
        self,
        X: Any,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Outputs (S, N, C) of sampled networks, without writing samples into the model."""
        with torch.set_grad_enabled(self.enable_backprop and torch.is_grad_enabled()):
            return self.network_outputs(self.sample(n_samples, generator), X, **model_kwargs)

    def _nn_predictive_classification(
        self, X: Any, n_samples: int = 100, **model_kwargs: Any
    ) -> Tensor:
        """Mean class probabilities (N, C) of sampled networks."""
        outputs = self._nn_functional_samples(X, n_samples, **model_kwargs)
        return torch.softmax(outputs.detach(), dim=-1).mean(0)

    def _refuse_others(self) -> None:
        if self.likelihood not in ("classification", "regression"):
            raise NotImplementedError(
                f"laplace-torch's predictives do not support likelihood {self.likelihood!r}; use "
                "marglik.laplace_predictive(laplace)(x)."
            )

    def state_dict(self) -> dict[str, Any]:
        """laplace-torch's state, with the factors under "H"; `torch.load` reads it by default.

        It does not include the network's frozen parameters and buffers; `marglik.save_posterior`
        does.
        """
        factors = self.fitted_factors()
        return super().state_dict() | {
            "H": factors.state_dict(),
            "likelihood": str(self.likelihood),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the state of another model or likelihood.
        """
        factors = KroneckerFactors.from_state_dict(state_dict["H"]).to(self._device)
        factors.check_alignment(self.model)
        if state_dict["likelihood"] != self.likelihood:
            raise ValueError(
                f"The state is for likelihood {state_dict['likelihood']!r}, this object for "
                f"{self.likelihood!r}."
            )
        for name in ("mean", "prior_precision", "sigma_noise", "temperature"):
            setattr(self, name, state_dict[name])
        self._set_factors(factors)
