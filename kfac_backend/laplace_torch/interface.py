"""Backends of laplace-torch: `KfacGGN` and `KfacEF`."""

from collections.abc import MutableMapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.curvature import CurvaturePass
from kfac_backend.laplace_torch.kron import FactorKron, laplace
from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.options import CurvatureOptions
from kfac_backend.ranks import ProcessGroupOption, Ranks
from kfac_backend.sharding import check_whole


class KfacInterface(laplace.curvature.CurvatureInterface):
    """Base class of backends: `kron` by `CurvaturePass`, other methods from laplace-torch.

    Args:
        model: the network, or laplace-torch's feature extractor around it.
        likelihood: "classification" or "regression".
        last_layer: whether to compute only the last layer's curvature.
        subnetwork_indices: for laplace-torch's subnetwork Laplace (full, diag).
        dict_key_x: as in laplace-torch, where the model still gets a mapping as a whole.
        dict_key_y: the targets' key in batches that are mappings.
        generator: random numbers for Monte Carlo labels.
        process_group: the ranks that have a shard of each batch, None for this process alone.
            `kron` returns the sums over all shards, so all ranks must call it equally often: give
            each rank the same number of batches, of any sizes. `marglik.KronLaplace` reduces once
            for all batches, and does not need this.
        kwargs: ``stochastic`` and ``num_samples`` of laplace-torch's interfaces, and all options of
            `CurvatureOptions` except ``fisher`` and ``mc_samples``. laplace-torch needs a block for
            every trainable parameter: freeze with requires_grad_(False) instead of
            ``unsupported="freeze"``.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        last_layer: bool = False,
        subnetwork_indices: torch.LongTensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        generator: torch.Generator | None = None,
        process_group: ProcessGroupOption = "default",
        **kwargs: Any,
    ) -> None:
        check_whole(model, "laplace-torch")
        of_laplace = {k: kwargs.pop(k) for k in ("stochastic", "num_samples") if k in kwargs}
        self._likelihood = likelihood_of(likelihood)
        # laplace-torch compares strings.
        name = str(self._likelihood)
        super().__init__(
            model, name, last_layer, subnetwork_indices, dict_key_x, dict_key_y, **of_laplace
        )
        self.generator = generator
        self.ranks = Ranks(process_group)
        """Ranks that have a shard of each batch."""
        fisher = "empirical"
        if isinstance(self, laplace.curvature.GGNInterface):
            fisher = "mc" if self.stochastic else "exact"
        self.options = CurvatureOptions(kfac_approx="expand").replace(
            **{"dict_key_y": dict_key_y} | kwargs,
            fisher=fisher,
            mc_samples=getattr(self, "num_samples", 1),
        )
        """Options of `kron`."""

    def kron(  # pyright: ignore[reportIncompatibleMethodOverride]  # has no other keywords
        self, x: Tensor | MutableMapping[str, Any], y: Tensor, N: int
    ) -> tuple[Tensor, FactorKron]:
        """Return the loss (a sum, nats) and curvature of one batch, scaled so that batches add up.

        A is the batch's mean times M/N, B the batch's sum.

        Args:
            x: input (M, ...) or a mapping.
            y: targets.
            N: number of examples in all batches together.
        """
        if self.last_layer:
            with torch.no_grad():
                _, x = self.model.forward_with_features(x)  # pyright: ignore
        self._pass.reset()
        self._pass.add(x, y)
        factors = self._pass.factors().gathered(self.ranks, self._pass.driver.device)
        factors.check_alignment(self._layers)
        _check_sum(factors, N)
        kron = FactorKron.from_factors(factors, self.params[0].dtype)
        for F in kron.kfacs:
            if len(F) == 2:
                F[1].mul_(factors.num_data / N)
        return self.params[0].new_tensor(factors.loss), kron

    @property
    def _layers(self) -> nn.Module:
        """The model, or its last layer alone."""
        return self.model.last_layer if self.last_layer else self.model  # pyright: ignore

    @cached_property
    def _pass(self) -> CurvaturePass:
        # Kept for all batches, because its proof is made only once.
        return CurvaturePass(
            self._layers,
            self._likelihood,
            self.options,
            generator=self.generator,
            process_group=self.ranks.process_group,
        )


class KfacGGN(KfacInterface, laplace.curvature.GGNInterface):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The GGN by K-FAC, expand or reduce, for laplace-torch 0.3.

    Use it as ``Laplace(model, "classification", hessian_structure="kron", backend=KfacGGN,
    backend_kwargs={"kfac_approx": "reduce"})``. With ``stochastic=True`` labels are drawn from the
    model, ``num_samples`` per example.
    """


class KfacEF(KfacInterface, laplace.curvature.EFInterface):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The empirical Fisher by K-FAC, expand or reduce, for laplace-torch 0.3.

    It uses the gradients of −log p(y|f), with unit noise for "regression": ``f − y``.
    laplace-torch's own full and diagonal empirical Fisher are twice as large, because they use
    gradients of the squared error without ½, 2 (f − y), and halve their outer product.
    """

    def gradients(self, x: Tensor | MutableMapping[str, Any], y: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients (M, P) of each example's ``lossfunc``, and its sum over the batch."""
        if not self.last_layer and isinstance(x, Tensor):
            return super().gradients(x, y)
        # laplace-torch supports neither mappings nor the last layer here: chain Jacobians instead.
        Js, f = self.last_layer_jacobians(x) if self.last_layer else self.jacobians(x)
        f = f.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.lossfunc(f, y)
        (g,) = torch.autograd.grad(loss, f)
        return torch.einsum("nc,ncp->np", g, Js), loss.detach()

    def full(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return loss and dense empirical Fisher (P, P) of one batch."""
        loss, H = super().full(x, y, **kwargs)
        return loss, self.factor * H

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return loss and diagonal (P,) of the empirical Fisher of one batch."""
        loss, H = super().diag(x, y, **kwargs)
        return loss, self.factor * H


def _check_sum(factors: KroneckerFactors, N: int) -> None:
    """Raise a NotImplementedError unless the batches' factors can be added."""
    tied = [n for n, b in factors.blocks.items() if b.A is not None and b.num_terms is None]
    if tied and factors.num_data != N:
        raise NotImplementedError(
            f"Parameter '{tied[0]}' is used in two ways, so the factors of different batches "
            "cannot be added. Fit with marglik.KronLaplace, which passes over all the data at "
            "once, or freeze it (requires_grad_(False))."
        )
