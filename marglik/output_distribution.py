"""What a fitted posterior says of new inputs: the half of `KronLaplace` that predicts."""

from typing import Any, cast

import torch
from torch import Tensor

from kfac_backend.batches import to_device
from kfac_backend.block import EigenBlock
from kfac_backend.calls import call_with, check_output
from kfac_backend.laplace_kron import EigenKron, FactorKron, laplace
from kfac_backend.options import check_option
from kfac_backend.output_covariance import OutputCovariance
from kfac_backend.weight_sharing import at_least_float32
from marglik.modes import in_eval_mode
from marglik.subset import Layers, last_layer

__all__ = ["OutputDistribution"]


class OutputDistribution(laplace.KronLaplace):
    """The outputs' Gaussian N(f, J Σ Jᵀ) without Jacobians, and laplace-torch's predictives on it.

    Predictions run in eval mode, and restore the mode that was there. Sampled parameters are passed
    to the network; its own stay the MAP's, also where a prediction fails or is interrupted.
    """

    # laplace-torch finds classes by this key among all subclasses: ours must not shadow its own.
    _key = ("all", "marglik_kron")

    _covariances: dict[tuple[Layers, int | None], tuple[tuple, OutputCovariance]]

    def output_distribution(
        self, x: Any, layers: Layers = "all", memory: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs f (N, C) and their covariances (N, C, C) in the linearised network.

        No Jacobian is held. Source: Immer, Korzepa & Bauer 2021 (arXiv:2008.08400).

        Args:
            x: inputs, a tensor or a mapping of tensors; moved to the model's device.
            layers: "last" takes the other layers as known: the last-layer Laplace approximation,
                at the cost of a forward pass.
            memory: bytes that the gradients may take at once, see `OutputCovariance`.
        """
        check_option("layers", layers, Layers)

        def distribution() -> tuple[Tensor, Tensor]:
            return self._output_covariance(x, layers, memory)(x)

        return in_eval_mode(self.model, distribution)()

    def precision_blocks(self, prefix: str = "") -> dict[str, tuple[EigenBlock, Tensor]]:
        """Parameter name -> eigenvectors and eigenvalues of the posterior precision's block.

        Blocks whose names do not start with the prefix are left out, and not decomposed.
        """
        precision = cast(EigenKron, self.posterior_precision)
        names = cast(FactorKron, self.H_facs).names
        return {n: precision.spectrum(i) for i, n in enumerate(names) if n.startswith(prefix)}

    def _output_covariance(self, x: Any, layers: Layers, memory: int | None) -> OutputCovariance:
        """The covariance at the present hyperparameters, made anew when they change."""
        state = (
            tuple(cast(Tensor, self.prior_precision).tolist()),
            tuple(cast(Tensor, self.sigma_noise).flatten().tolist()),
            self.temperature,
            self.damping,
        )
        known = self._covariances.get((layers, memory))
        if known is None or known[0] != state:
            name = last_layer(self.model, x) if layers == "last" else ""
            with torch.inference_mode(False), torch.no_grad():
                blocks = self.precision_blocks(f"{name}." if name else "")
            covariance = OutputCovariance(self.model, blocks, memory=memory)
            self._covariances[layers, memory] = known = (state, covariance)
        return known[1]

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The name laplace-torch has for `output_distribution`; by Jacobians where it must be."""
        if joint or self.enable_backprop:
            return super()._glm_predictive_distribution(X, joint, diagonal_output)
        f, covariance = self.output_distribution(X)
        f = at_least_float32(f)  # as the covariance is
        return f, covariance.diagonal(dim1=1, dim2=2) if diagonal_output else covariance

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Parameter vectors (S, P) of the posterior, in float32 at least.

        Raises:
            AttributeError: a posterior that is not fitted.
            ValueError: no samples.
        """
        _check_samples(n_samples)
        self._check_H_init()
        mean = at_least_float32(cast(Tensor, self.mean).detach())
        noise = torch.randn(
            n_samples, self.n_params, device=mean.device, dtype=mean.dtype, generator=generator
        )
        changes = cast(EigenKron, self.posterior_precision).bmm(noise, exponent=-0.5)
        return mean + changes.view(noise.shape)  # bmm drops an axis of one

    def sampled_outputs(self, sample: Tensor, x: Any, **model_kwargs: Any) -> Tensor:
        """The network's output at x, in float32 at least, with a sample (P,) as its parameters."""
        parameters = dict(zip(cast(FactorKron, self.H_facs).names, self.params, strict=True))
        parts = sample.split([p.numel() for p in self.params])
        values = {
            name: part.view_as(p).to(p.dtype)
            for (name, p), part in zip(parameters.items(), parts, strict=True)
        }
        f = call_with(self.model, values, x, keywords=model_kwargs)
        check_output(f)
        return at_least_float32(f)

    def optimize_prior_precision(self, *args: Any, **kwargs: Any) -> None:
        """Tune δ post hoc, by evidence or validation; arguments as in laplace-torch."""
        in_eval_mode(self.model, super().optimize_prior_precision)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The posterior predictive, in eval mode; arguments as in laplace-torch."""
        self._refuse_bernoulli()
        return in_eval_mode(self.model, super().__call__)(*args, **kwargs)

    def functional_samples(self, *args: Any, **kwargs: Any) -> Tensor:
        """Samples of the network's outputs, in eval mode; arguments as in laplace-torch."""
        return in_eval_mode(self.model, super().functional_samples)(*args, **kwargs)

    def predictive_samples(self, *args: Any, **kwargs: Any) -> Tensor:
        """Samples of the predictive, in eval mode; arguments as in laplace-torch."""
        self._refuse_bernoulli()
        return in_eval_mode(self.model, super().predictive_samples)(*args, **kwargs)

    def _nn_functional_samples(
        self,
        X: Any,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Outputs (S, N, C) of sampled networks; laplace-torch's writes samples into the model."""
        x = to_device(X, self._device)
        outputs = (
            self.sampled_outputs(sample, x, **model_kwargs)
            for sample in self.sample(n_samples, generator)
        )
        return torch.stack([f if self.enable_backprop else f.detach() for f in outputs])

    def _nn_predictive_classification(
        self, X: Any, n_samples: int = 100, **model_kwargs: Any
    ) -> Tensor:
        """Mean class probabilities (N, C) of sampled networks, which are held one at a time."""
        x = to_device(X, self._device)
        total: Any = 0.0
        for sample in self.sample(n_samples):
            f = self.sampled_outputs(sample, x, **model_kwargs).detach()
            total = total + torch.softmax(f, dim=-1)
        return total / n_samples

    def _glm_functional_samples(
        self,
        f_mu: Tensor,
        f_var: Tensor,
        n_samples: int,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Samples (S, N, C) of the outputs' Gaussian."""
        _check_samples(n_samples)
        return super()._glm_functional_samples(f_mu, f_var, n_samples, diagonal_output, generator)

    def _refuse_bernoulli(self) -> None:
        if self.likelihood == "bernoulli":
            raise NotImplementedError(
                "laplace-torch's predictives do not know likelihood 'bernoulli'; use "
                "marglik.laplace_predictive(laplace)(x)."
            )


def _check_samples(n_samples: int) -> None:
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 1:
        raise ValueError(f"n_samples must be a positive integer, not {n_samples!r}.")
