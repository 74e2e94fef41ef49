"""The hyperparameters, log δ per group and log σ, and two methods that raise the evidence."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kfac_backend.options import check_positive
from marglik.posterior.prior import PriorGroups

__all__ = ["Hyperparameters", "Laplace", "UpdateMethod"]

UpdateMethod = Literal["adam", "mackay"]

# MacKay's fixed point δ = γ/‖θ‖² is infinite for a group whose parameters are all zero, and 0 for
# one that the data ignores. These bounds are far outside the precisions of trained networks.
SMALLEST_PRECISION, LARGEST_PRECISION = 1e-6, 1e10


class Laplace(Protocol):
    """What the update needs of a fitted Laplace approximation, laplace-torch's or ours."""

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """The evidence (nats), differentiable in the arguments."""
        ...


class Hyperparameters:
    """log δ and log σ, in float64, and how they are learned.

    They outlive the Laplace approximations: each update fits a new one, and goes on from the values
    of the last update with the same state of Adam.

    Args:
        groups: which tensor belongs to which group.
        prior_precision: initial δ, one number or one per group; includes N.
        sigma_noise: initial σ.
        learn_sigma_noise: whether σ is learned (regression).
        method: "adam", gradient steps on the logarithms; "mackay", the fixed point
            δ = γ / ‖θ‖², σ² = 2·loss / (number of targets − Σγ), of MacKay 1992, "Bayesian
            interpolation".
        lr: Adam's step size on the logarithms.
        device: device of the values.
    """

    def __init__(
        self,
        groups: PriorGroups,
        prior_precision: float | Sequence[float] | Tensor,
        *,
        sigma_noise: float = 1.0,
        learn_sigma_noise: bool = False,
        method: UpdateMethod = "adam",
        lr: float = 0.1,
        device: torch.device | str = "cpu",
    ) -> None:
        check_positive("sigma_noise", sigma_noise)
        check_positive("The hyperparameters' learning rate", lr)
        if method not in ("adam", "mackay"):
            raise ValueError(f"method {method!r} is not supported; choose 'adam' or 'mackay'.")
        if method == "mackay" and groups.diagonal:
            raise ValueError("method 'mackay' needs groups of tensors, not structure 'diagonal'.")
        self.groups = groups
        self.method = method
        self.learn_sigma_noise = learn_sigma_noise
        self._log_delta = groups.initial(prior_precision).log().to(device).requires_grad_()
        self._log_sigma = torch.tensor(sigma_noise, dtype=torch.float64, device=device).log()
        self._log_sigma.requires_grad_(learn_sigma_noise)
        learned = [self._log_delta] + [self._log_sigma] * learn_sigma_noise
        self._adam = torch.optim.Adam(learned, lr=lr)
        self._lr = lr

    @property
    def prior_precision(self) -> Tensor:
        """δ per group, (G,), detached."""
        return self._log_delta.detach().exp()

    @property
    def sigma_noise(self) -> Tensor:
        """σ, a scalar, detached."""
        return self._log_sigma.detach().exp()

    def set(self, prior_precision: Tensor, sigma_noise: Tensor) -> None:
        """Replace the values; Adam's state stays."""
        with torch.no_grad():
            self._log_delta.copy_(prior_precision.log())
            self._log_sigma.copy_(sigma_noise.log())

    def state_dict(self) -> dict[str, Any]:
        """The values, Adam's state, and the options that must agree where it is loaded."""
        return {
            "options": self._options(),
            "log_delta": self._log_delta.detach().clone(),
            "log_sigma": self._log_sigma.detach().clone(),
            "adam": self._adam.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the state of other groups, or of another method or step size.
        """
        for name, value in self._options().items():
            if state["options"][name] != value:
                raise ValueError(
                    f"The state of the prior has {name} {state['options'][name]!r}, these "
                    f"have {value!r}. Continue with the same options, or start anew."
                )
        with torch.no_grad():
            self._log_delta.copy_(state["log_delta"])
            self._log_sigma.copy_(state["log_sigma"])
        self._adam.load_state_dict(state["adam"])

    def _options(self) -> dict[str, Any]:
        return {
            "groups": list(self.groups.names),
            "values": self.groups.num_values,
            "method": self.method,
            "lr": self._lr,
            "learn_sigma_noise": self.learn_sigma_noise,
        }

    def tensors(self) -> list[Tensor]:
        """The values and Adam's moments, not copied; an update changes these and a step count."""
        moments = [
            state[name] for state in self._adam.state.values() for name in ("exp_avg", "exp_avg_sq")
        ]
        return [self._log_delta, self._log_sigma, *moments]

    def update(self, laplace: Laplace, steps: int) -> list[float]:
        """Take steps that raise the evidence; returns it (nats) before each step and at the end.

        Args:
            laplace: a fitted Laplace approximation; its hyperparameters become the new ones.
            steps: number of steps.

        Raises:
            TypeError: method "mackay" with another Laplace approximation than marglik's.
            FloatingPointError: the evidence is not finite.
        """
        if self.method == "mackay" and not hasattr(laplace, "evidence_terms"):
            raise TypeError(
                f"method 'mackay' needs marglik.KronLaplace, not {type(laplace).__name__}; use "
                "'adam'."
            )
        evidences = []
        for _ in range(steps):
            if self.method == "adam":
                self._adam.zero_grad()
                evidence = self._evidence(laplace)
                (-evidence).backward()
                self._adam.step()
            else:
                evidence = self._evidence(laplace)
                self._fixed_point_step(laplace)
            evidences.append(evidence.item())
        with torch.no_grad():
            evidences.append(self._evidence(laplace).item())
        return evidences

    def _evidence(self, laplace: Laplace) -> Tensor:
        delta = self.groups.for_laplace(self._log_delta.exp())
        sigma = self._log_sigma.exp() if self.learn_sigma_noise else None
        evidence = laplace.log_marginal_likelihood(delta, sigma)
        if not torch.isfinite(evidence):
            raise FloatingPointError(
                f"The evidence is {evidence.item()}. Likely causes: training has diverged, or the "
                "step on the hyperparameters is too large."
            )
        return evidence

    @torch.no_grad()
    def _fixed_point_step(self, laplace: Laplace) -> None:
        terms = laplace.evidence_terms  # pyright: ignore[reportAttributeAccessIssue]
        gamma = laplace.effective_parameters()  # pyright: ignore[reportAttributeAccessIssue]
        norms = self.groups.sum_over_tensors(terms.squared_norms)
        tiny = torch.finfo(norms.dtype).tiny  # of zero parameters: no 0/0
        delta = self.groups.sum_over_tensors(gamma) / norms.clamp(min=tiny)
        self._log_delta.copy_(delta.clamp(SMALLEST_PRECISION, LARGEST_PRECISION).log())
        if self.learn_sigma_noise:
            temperature = laplace.temperature  # pyright: ignore[reportAttributeAccessIssue]
            free = (terms.num_targets / temperature - gamma.sum()).clamp(min=1e-3)
            self._log_sigma.copy_((2 * terms.loss / temperature / free).log() / 2)
