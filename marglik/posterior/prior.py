"""Groups of parameters that share one prior precision, and weight decay <-> precision.

The prior is θ ~ N(0, P₀⁻¹) with one precision δ per group on the diagonal of P₀. In the training
loss, a mean over N examples with likelihood temperature T, precision δ acts as the weight decay
T·δ/N.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from kfac_backend.model.checks import check_module

__all__ = [
    "PriorGroups",
    "PriorStructure",
    "parameter_kind",
    "precision_to_weight_decay",
    "weight_decay_to_precision",
]

PriorStructure = Literal["layerwise", "scalar", "kind", "stage", "diagonal"]
Number = TypeVar("Number", float, Tensor)


def weight_decay_to_precision(
    weight_decay: Number, num_data: float, temperature: float = 1.0
) -> Number:
    """δ = weight decay · N / T, the prior precision beside a likelihood of N examples."""
    return weight_decay * num_data / temperature


def precision_to_weight_decay(
    prior_precision: Number, num_data: float, temperature: float = 1.0
) -> Number:
    """Weight decay T·δ/N of a loss that is the mean over examples; coupled, as SGD adds it."""
    return prior_precision * temperature / num_data


def parameter_kind(parameter: Tensor) -> str:
    """The kind of a parameter: 'scalars' with one entry, else 'weights' (2+ axes) or 'biases'."""
    if parameter.numel() == 1:
        return "scalars"
    return "weights" if parameter.dim() > 1 else "biases"


@dataclass(frozen=True)
class PriorGroups:
    """The groups of parameter tensors that share a prior precision.

    Values of groups are tensors (G,). With the structure "diagonal", each of the P parameters is a
    group of its own.
    """

    names: tuple[str, ...]
    """Group names, (G,); for "diagonal" the tensors' names."""
    index: tuple[int, ...]
    """The group of each trainable tensor, in ``parameters()`` order."""
    shapes: tuple[torch.Size, ...]
    """Shape of each trainable tensor."""
    diagonal: bool = False

    @classmethod
    def from_model(
        cls, model: nn.Module, structure: PriorStructure | Mapping[str, str] = "layerwise"
    ) -> "PriorGroups":
        """Group the trainable parameters of a model.

        Args:
            model: the model.
            structure: "layerwise", one group per tensor; "scalar", one for all; "kind", weights,
                biases and scalars; "stage", one per top-level child of the model; "diagonal", one
                per entry (not with Kronecker factors). Or rules, group name -> pattern: a shell
                pattern on parameter names ("stage1.*"), or "kind:weights", "kind:biases",
                "kind:scalars"; the first that matches decides.

        Raises:
            ValueError: an unknown structure, rules that leave a parameter or a group out.
        """
        check_module(model)
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError("The model has no trainable parameter to put a prior on.")
        if isinstance(structure, Mapping):
            labels = [_first_match(name, p, structure) for name, p in trainable.items()]
            unused = [group for group in structure if group not in labels]
            if unused:
                raise ValueError(
                    f"Prior group '{unused[0]}' ({structure[unused[0]]!r}) matches no parameter "
                    "that an earlier group has not taken; drop it or reorder the rules."
                )
        elif structure in ("layerwise", "diagonal"):
            labels = list(trainable)
        elif structure == "scalar":
            labels = ["all"] * len(trainable)
        elif structure == "kind":
            labels = [parameter_kind(p) for p in trainable.values()]
        elif structure == "stage":
            labels = [name.split(".")[0] for name in trainable]
        else:
            supported = ", ".join(map(repr, get_args(PriorStructure)))
            raise ValueError(
                f"prior structure {structure!r} is not supported; choose one of {supported}, or "
                "pass rules {group: pattern}."
            )
        names = tuple(dict.fromkeys(labels))
        index = tuple(names.index(label) for label in labels)
        shapes = tuple(p.shape for p in trainable.values())
        return cls(names, index, shapes, diagonal=structure == "diagonal")

    @property
    def num_values(self) -> int:
        """G, the number of precisions to learn."""
        return sum(s.numel() for s in self.shapes) if self.diagonal else len(self.names)

    def initial(self, prior_precision: float | Sequence[float] | Tensor) -> Tensor:
        """The groups' initial precisions (G,), float64, from one number or from one per group.

        Raises:
            ValueError: a wrong length, or a precision that is not positive and finite.
        """
        value = torch.as_tensor(prior_precision, dtype=torch.float64).detach().flatten().cpu()
        if len(value) not in (1, self.num_values):
            raise ValueError(
                f"prior_precision has length {len(value)}; expected 1 or {self.num_values}, one "
                f"per group ({', '.join(self.names[:4])}{', ...' if len(self.names) > 4 else ''})."
            )
        if not (torch.isfinite(value).all() and (value > 0).all()):
            wrong = value[~(torch.isfinite(value) & (value > 0))][0].item()
            raise ValueError(f"A prior precision must be positive and finite, not {wrong}.")
        return value.expand(self.num_values).clone()

    def for_laplace(self, values: Tensor) -> Tensor:
        """Values of groups (G,) as a posterior takes them: one per tensor, or one per parameter."""
        return values if self.diagonal else values[list(self.index)]

    def for_parameters(self, values: Tensor) -> list[Tensor]:
        """Values of groups (G,) as one tensor per parameter tensor, broadcastable to its shape."""
        if not self.diagonal:
            return list(self.for_laplace(values))
        parts = values.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def sum_over_tensors(self, values: Tensor) -> Tensor:
        """One value per tensor, summed within its group: (G,)."""
        if self.diagonal:
            raise ValueError("The structure 'diagonal' has no groups of tensors.")
        index = torch.tensor(self.index, device=values.device)
        return values.new_zeros(len(self.names)).index_add(0, index, values)

    def summary(self, values: Tensor) -> dict[str, float]:
        """Group name -> value; for "diagonal" the mean within each tensor."""
        if self.diagonal:
            values = torch.stack([part.mean() for part in self.for_parameters(values)])
        return dict(zip(self.names, values.tolist(), strict=True))


def _first_match(name: str, parameter: Tensor, rules: Mapping[str, str]) -> str:
    for group, pattern in rules.items():
        kind = pattern.removeprefix("kind:")
        if kind != pattern and kind not in ("weights", "biases", "scalars"):
            raise ValueError(
                f"Prior group '{group}' has pattern {pattern!r}; kinds are kind:weights, "
                "kind:biases and kind:scalars."
            )
        if kind == parameter_kind(parameter) if kind != pattern else fnmatchcase(name, pattern):
            return group
    raise ValueError(
        f"No prior group matches parameter '{name}'; add a last group with pattern '*'."
    )
