"""Compute the GGN from Jacobians: dense, diagonal, or its largest eigenpairs.

This is for few parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kfac_backend.engine.batches import (
    NO_BATCH,
    detached,
    each_batch,
    num_examples,
    split_batch,
)
from kfac_backend.engine.operations.padding import padding_rows
from kfac_backend.engine.rule_assignment import check_parameters
from kfac_backend.engine.task import Task
from kfac_backend.likelihoods import Likelihood, likelihood_of, loss_sum, num_counted_terms
from kfac_backend.options import CurvatureOptions, check_keys
from kfac_backend.ranks import Ranks
from marglik.posterior.jacobians import jacobians, parameter_vector
from marglik.posterior.precision import (
    DensePrecision,
    DiagonalPrecision,
    LowRankPrecision,
    Precision,
)

Structure = Literal["kron", "diag", "full", "lowrank"]
"""Structure of the posterior's precision. All except "kron" use Jacobians."""
OVERSAMPLING = 20
"""Number of eigenpairs that "lowrank" keeps in addition to 2 · rank while it adds batches."""
OPERATORS = {"full": DensePrecision, "diag": DiagonalPrecision, "lowrank": LowRankPrecision}


@dataclass(frozen=True)
class JacobianGGN:
    """H = Σ_n J_nᵀ Λ_n J_n at σ = T = 1, a sum over the data, of P parameters.

    With "lowrank", a fit keeps 2 K + 20 eigenpairs while it adds batches, and the K largest at its
    end. H is the whole GGN if the GGN has no more eigenpairs. Otherwise H is smaller, and variances
    and evidence are too large. Both then depend a little on the division of the data into batches,
    and more so if data is added to a fit. Source: Ross et al. 2008, "Incremental learning for
    robust visual tracking".
    """

    structure: str
    H: Tensor
    """(P, P); for "diag" the diagonal (P,); for "lowrank" rows R (K, P) with Rᵀ R = H. Float64."""
    indices: Tensor
    """Indices of the parameters in the vector of all trainable ones, (P,)."""
    rank: int
    """Maximum number K of eigenpairs of "lowrank"."""
    likelihood: Likelihood
    loss: float
    """Σ ℓ over the data (nats) at σ = 1."""
    num_data: int
    num_outputs: int
    num_loss_terms: float
    is_corrected: bool = False

    def precision(
        self, delta: Float[Tensor, "P"], scale: Tensor | float = 1.0, like: Tensor | None = None
    ) -> Precision:
        """Return H · scale + diag(δ), differentiable in both. Draws have the dtype of ``like``."""
        scale = torch.as_tensor(scale, dtype=self.H.dtype, device=self.H.device)
        H = self.H * (scale.sqrt() if self.structure == "lowrank" else scale)
        return OPERATORS[self.structure](H, delta, self.H if like is None else like)

    def variances(
        self, J: Float[Tensor, "M P"], added: Float[Tensor, "D"], scale: Tensor
    ) -> Float[Tensor, "D M"]:
        """Return diagonals of J (H · scale + δ I)⁻¹ Jᵀ for each δ of ``added``, in float64."""
        J, added = J.double(), added.to(self.H)
        if self.structure == "lowrank":
            precisions = (self.precision(delta.expand(J.shape[1]), scale) for delta in added)
            return torch.stack([p.square_form(J, diagonal=True) for p in precisions])
        values = self.H * scale
        if self.structure == "full":
            values, Q = torch.linalg.eigh(values)
            values, J = values.clamp(min=0), J @ Q  # negative by rounding
        return (values + added[:, None]).reciprocal() @ J.square().mT

    # The methods of `Spectra` that the evidence calls. Here each parameter is a separate block.

    def log_det_ratio(self, ratio: Float[Tensor, "P"]) -> Float[Tensor, ""]:
        """Return log det(I + H diag(ratio)), differentiable in the ratios > 0."""
        return self.precision(1 / ratio).logdet() + ratio.log().sum()

    def effective(self, ratio: Float[Tensor, "P"]) -> Float[Tensor, "P"]:
        """Return γ = 1 − δ Σ_ii of each parameter, at δ = 1/ratio."""
        return 1 - self.precision(1 / ratio).variances() / ratio

    @property
    def largest(self) -> Float[Tensor, "P"]:
        """The diagonal of H, for errors that name entries that are not finite."""
        return self.precision(torch.zeros(len(self.indices)).to(self.H)).diagonal()

    def __add__(self, other: "JacobianGGN") -> "JacobianGGN":
        """Return the GGN of both data sets, at the same parameters.

        Raises:
            ValueError: another structure, likelihood or set of parameters.
        """
        same = self.structure == other.structure and self.likelihood == other.likelihood
        if not same or not torch.equal(self.indices, other.indices):
            raise ValueError(
                f"Cannot add two different GGNs: {self.structure!r}, '{self.likelihood}', "
                f"{len(self.indices)} parameters, and {other.structure!r}, '{other.likelihood}', "
                f"{len(other.indices)} parameters. Fit both with the same options."
            )
        sums = "loss", "num_data", "num_loss_terms"
        return replace(
            self,
            H=_sum(self.structure, self.rank, self.H, other.H),
            **{name: getattr(self, name) + getattr(other, name) for name in sums},
        )

    def __mul__(self, weight: float) -> "JacobianGGN":
        """Return the GGN times a weight, as if the data had each example that many times."""
        sums = {
            name: getattr(self, name) * weight for name in ("loss", "num_data", "num_loss_terms")
        }
        factor = weight**0.5 if self.structure == "lowrank" else weight
        return replace(self, H=self.H * factor, **sums)

    def restrict(self, chosen: Tensor) -> "JacobianGGN":
        """Return the GGN of some of the parameters, by a mask; the others are constants."""
        H = self.H[chosen] if self.structure == "diag" else self.H[..., chosen]
        H = H[chosen] if self.structure == "full" else H
        return replace(self, H=H, indices=self.indices[chosen])

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "JacobianGGN":
        """Return the GGN on another device; H stays in float64."""
        return replace(self, H=self.H.to(device), indices=self.indices.to(device))

    def state_dict(self) -> dict[str, Any]:
        """Return all fields, as plain data and tensors."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
            "likelihood": str(self.likelihood)
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "JacobianGGN":
        """Load a result of `state_dict`.

        Raises:
            ValueError: a state that lacks entries.
        """
        names = [f.name for f in fields(cls)]
        check_keys("Laplace's fit", state, names)
        values: dict[str, Any] = {name: state[name] for name in names}
        values["likelihood"] = likelihood_of(values["likelihood"])
        return cls(**values)


def _sum(structure: str, rank: int, H: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two matrices in the form of the structure."""
    if structure != "lowrank":
        return H + other
    rows = torch.cat([H, other])
    return torch.linalg.eigh(rows @ rows.mT)[1].mT[-rank:] @ rows


def jacobian_ggn(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    options: CurvatureOptions,
    *,
    structure: str,
    rank: int,
    indices: Int[Tensor, "P"],
    ranks: Ranks,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> JacobianGGN:
    """Return the GGN at the model's current parameters, or another matrix of ``options.fisher``.

    Collective with several ranks, of which some may have no data.

    Args:
        model: the network, in eval mode.
        data: batches; with several ranks each has a shard.
        likelihood: likelihood of the targets.
        options: options of the targets and of the matrix.
        structure: "full", "diag" or "lowrank".
        rank: number of eigenpairs of "lowrank".
        indices: indices of the parameters in the vector of all trainable ones. Embedding padding is
            left out, because it has neither curvature nor prior.
        ranks: all ranks get the sum over their data.
        generator: random generator of a Fisher that draws.
        progress: whether to show a progress bar.

    Raises:
        ValueError: no data; a parameter that is 0-dimensional, or has no shape yet.
        NotImplementedError: a complex parameter.
    """
    check_parameters({n: p for n, p in model.named_parameters() if p.requires_grad})
    task, fisher = Task(likelihood, options), options.make_fisher()
    num_rows = 2 * rank + OVERSAMPLING  # for "lowrank", while batches are added
    device = next(model.parameters()).device
    ggn: JacobianGGN | None = None
    for batch in each_batch(data, "Fitting", progress):
        x, y = (detached(part, device) for part in split_batch(batch, options))
        if ranks.size > 1 and num_examples(y) == 0:
            continue
        y = task.targets(model, x, y)
        if ggn is None:
            task.check_axis(model, x, y)
            indices = _without_padding(model, x, indices)
        f, J = jacobians(model, indices, x)  # (N, ..., C), (N, ..., C, P)
        task.check(f, y)
        task.look_at(f)
        # One row Jᵀ v for each vector v of an example: Σ v vᵀ = Λ of each of its loss terms.
        vectors = fisher.vectors(task.likelihood, f, y, generator, may_ignore=task.may_ignore)
        f_flat, J_flat = f.flatten(1), J.flatten(1, -2)  # (N, RC), (N, RC, P)
        rows = torch.cat([torch.einsum("nc,ncp->np", v.flatten(1), J_flat.to(v)) for v in vectors])
        part = JacobianGGN(
            structure,
            _matrix(structure, num_rows, rows.double()),
            indices,
            num_rows,
            task.likelihood,
            loss_sum(f, y, task.likelihood).item(),
            len(f_flat),
            f.shape[-1],
            float(num_counted_terms(f, y, task.likelihood)),
        )
        ggn = part if ggn is None else ggn + part
    parts = [part.to(device) for part in ranks.gather(ggn) if part is not None]
    if not parts:
        raise ValueError(NO_BATCH)
    total = replace(reduce(add, parts), rank=rank)
    return replace(total, H=_matrix(structure, rank, total.H)) if structure == "lowrank" else total


def _matrix(structure: str, rank: int, rows: Float[Tensor, "K P"]) -> Tensor:
    """Return Rᵀ R of rows R, in the form of the structure."""
    if structure == "diag":
        return rows.square().sum(0)
    return rows.mT @ rows if structure == "full" else _sum(structure, rank, rows[:0], rows)


def _without_padding(model: nn.Module, x: Any, indices: Tensor) -> Tensor:
    """Return the indices without embedding rows that are only padding."""
    padding = padding_rows(model, x)
    if not padding:
        return indices
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    masks = {n: torch.ones_like(p, dtype=torch.bool) for n, p in trainable.items()}
    for name, row in padding.items():
        masks[name][row] = False
    return indices[parameter_vector(masks.values())[indices]]
