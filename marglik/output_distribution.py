"""What a fitted posterior says of new inputs: the half of `KronLaplace` that predicts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from kfac_backend.block import EigenBlock
from kfac_backend.laplace_kron import EigenKron, FactorKron, laplace
from kfac_backend.options import check_option
from kfac_backend.output_covariance import OutputCovariance
from kfac_backend.threads import turn_of
from kfac_backend.weight_sharing import at_least_float32
from marglik.modes import eval_mode
from marglik.subset import Layers, last_layer

__all__ = ["OutputDistribution"]


class OutputDistribution(laplace.KronLaplace):
    """The outputs' Gaussian N(f, J Σ Jᵀ) without Jacobians, and laplace-torch's predictives on it.

    Predictions run in eval mode, and restore the mode that was there.
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
        with self._model_kept():
            return self._output_covariance(x, layers, memory)(x)

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
        return f, covariance.diagonal(dim1=1, dim2=2) if diagonal_output else covariance

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Parameter vectors (S, P) of the posterior, in float32 at least."""
        mean = at_least_float32(cast(Tensor, self.mean).detach())
        noise = torch.randn(
            n_samples, self.n_params, device=mean.device, dtype=mean.dtype, generator=generator
        )
        return mean + cast(EigenKron, self.posterior_precision).bmm(noise, exponent=-0.5)

    def optimize_prior_precision(self, *args: Any, **kwargs: Any) -> None:
        """Tune δ post hoc, by evidence or validation; arguments as in laplace-torch."""
        with self._model_kept():
            super().optimize_prior_precision(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The posterior predictive, in eval mode; arguments as in laplace-torch."""
        self._refuse_bernoulli()
        with self._model_kept():
            return super().__call__(*args, **kwargs)

    def functional_samples(self, *args: Any, **kwargs: Any) -> Tensor:
        """Samples of the network's outputs, in eval mode; arguments as in laplace-torch."""
        with self._model_kept():
            return super().functional_samples(*args, **kwargs)

    def predictive_samples(self, *args: Any, **kwargs: Any) -> Tensor:
        """Samples of the predictive, in eval mode; arguments as in laplace-torch."""
        self._refuse_bernoulli()
        with self._model_kept():
            return super().predictive_samples(*args, **kwargs)

    def _refuse_bernoulli(self) -> None:
        if self.likelihood == "bernoulli":
            raise NotImplementedError(
                "laplace-torch's predictives do not know likelihood 'bernoulli'; use "
                "marglik.laplace_predictive(laplace)(x)."
            )

    @contextmanager
    def _model_kept(self) -> Iterator[None]:
        """Eval mode for a while, in one thread; then parameters are no views of the mean."""
        with turn_of(self.model):
            try:
                with eval_mode(self.model):
                    yield
            finally:
                storage = cast(Tensor, self.mean).untyped_storage().data_ptr()
                for p in self.params:
                    if p.untyped_storage().data_ptr() == storage:
                        p.data = p.data.clone()
