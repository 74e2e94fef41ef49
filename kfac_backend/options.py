"""The options of a curvature pass, and their checks.

An options object is created and checked once, and then passed whole to all functions that use it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, get_args

import torch

from kfac_backend.fisher import Fisher
from kfac_backend.likelihoods import Likelihood
from kfac_backend.precision import BackwardPrecision

Mode = Literal["expand", "reduce"]
KfacApprox = Literal["expand", "reduce", "auto"] | dict[str, Mode]
"""One mode for all layers, "auto", or patterns of layers' names with their modes; see
`modes_of_layers`."""
ExpandScaling = Literal["positions", "examples"]
Unsupported = Literal["error", "freeze", "diagonal"]
ShiftLabels = bool | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of options: each object checks itself, and changes create a new object."""

    def replace(self, **changes: Any) -> Self:
        """Return these options with some of them changed.

        Raises:
            TypeError: a name is not an option; the error lists the options.
        """
        names = [field.name for field in fields(self)]
        unknown = [name for name in changes if name not in names]
        if unknown:
            raise TypeError(f"{unknown[0]!r} is not an option; choose from {', '.join(names)}.")
        is_new = any(getattr(self, name) is not value for name, value in changes.items())
        return replace(self, **changes) if is_new else self


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Options):
    """The targets of a batch, their matching with the model's outputs, and the targets that count.

    Training, curvature and evaluation must agree on these, so one object is passed to all.

    Args:
        dict_key_x: the key of the model's input in batches that are mappings; several keys are its
            keyword arguments. None passes the whole mapping to the model.
        dict_key_y: the targets' key in batches that are mappings.
        batch: a function of a batch of any form that returns (args, kwargs, y): the arguments of
            the model's call, and the targets. It replaces both keys; files do not store it.
        ignore_index: the label of loss terms that do not count, such as padding, in
            "classification".
        shift_labels: whether the output at a position predicts the label of the next position, as
            in Hugging Face's causal language models. "auto" compares the likelihood's loss with the
            loss that such a model computes from labels; if the model computes none, labels are not
            shifted.
        dict_key_mask: the key of a mask (N, R) in inputs that are mappings. Masked positions do not
            count in the layers or as loss terms. The first batch with masked positions proves that
            they do not affect the outputs at other positions. With None all positions count.

    Raises:
        ValueError: an option is not supported.
    """

    dict_key_x: str | tuple[str, ...] | None = None
    dict_key_y: str = "labels"
    batch: Callable[[Any], tuple[Any, ...]] | None = field(default=None, repr=False)
    ignore_index: int | None = None
    shift_labels: ShiftLabels = "auto"
    dict_key_mask: str | None = "attention_mask"

    def __post_init__(self) -> None:
        check_option("shift_labels", self.shift_labels, Literal[True, False, "auto"])
        if isinstance(self.dict_key_x, list):  # JSON has lists instead of tuples
            object.__setattr__(self, "dict_key_x", tuple(self.dict_key_x))

    def check(self, likelihood: Likelihood) -> None:
        """Raise a ValueError unless the options fit this likelihood."""
        if likelihood.has_labels:
            return
        if self.ignore_index is not None:
            raise ValueError(
                f"ignore_index={self.ignore_index} needs the labels of likelihood "
                f"'classification', not '{likelihood}'. Pass None, and omit the examples that do "
                "not count."
            )
        if self.shift_labels is True:
            raise ValueError(
                "shift_labels=True needs the labels of likelihood 'classification', not "
                f"'{likelihood}'. Shift the targets in the data."
            )


@dataclass(frozen=True, kw_only=True)
class PassOptions(Options):
    """The matrix of a curvature pass, and its computation.

    The command line shows these sentences as its help. In Python, modes are strings and null is
    None.

    Args:
        kfac_approx: treatment of the positions that share a layer's weight. expand treats each
            position as a separate example. reduce first combines the positions of an example. It is
            faster, and exact if the network itself sums over the positions. auto selects expand if
            examples have several loss terms, that is, outputs (N, ..., C). Otherwise auto selects
            for each layer the mode whose block has a trace closer to the exact trace, on some
            examples. A mapping sets the mode by layer name, such as {"head*": expand, "*": reduce};
            the first matching pattern applies.
        fisher: matrix that the factors approximate. exact is the generalised Gauss-Newton matrix
            (GGN). For each loss term of an example it takes C - 1 backward passes per batch
            (classification with C classes), or C (other likelihoods with C outputs). mc and
            random_signs estimate the GGN without bias, with one backward pass for each of the
            random draws (one by default). random_signs starts each backward pass from S z, where S
            Sᵀ is the curvature of the loss with respect to the outputs (its Hessian, or for some
            likelihoods the Fisher information), and z is a vector of random signs. mc draws labels
            from the model for classification, noisy_classification and bernoulli (also with
            weights), and is noisier if the model is confident. For other likelihoods, mc is the
            same as random_signs. empirical uses the gradients of the data's own labels, with one
            backward pass for each loss term.
        mc_samples: number of random draws per example with fisher=mc or random_signs. More draws
            reduce the noise and cost a backward pass each.
        unsupported: treatment of parameters in layers that have no K-FAC rule. error stops. freeze
            treats these parameters as constants. diagonal computes the exact diagonal of their
            block, which is slow. diagonal also applies to parameters that have a rule but are used
            in a way that the rule does not cover.
        backward_precision: precision of the backward passes. bf16 is for a CPU, and faster than
            float32. tf32 is for a GPU, and faster with large batches (on WRN-16-4 with 500 images,
            but not with 128). On the other device, each raises an error. Both make the gradient
            factors less exact (by up to 0.3 % on WRN-16-4 in bf16). The input factors A are not
            affected.
        diagonal_above: limit for layers of large vocabularies. If a weight has more rows than this
            number, its factor B and the block of its bias are diagonal. The curvature between two
            different rows is then zero. The block of a single row is the same as with the complete
            B. If two layers share the weight, the block of a row approximates the sum of both
            layers' blocks. Only its trace is exact. Tensors that contain the weights of several
            linear maps, such as the in_proj_weight of attention, are not affected. null keeps all
            factors whole.
        expand_scaling: scale of the blocks of expand. "positions" is the paper's main definition:
            the input factor A is a mean over all examples and positions. "examples" divides the
            same sum by the number of examples, as in the paper's appendix. The block of a weight or
            a bias is then R times as large, where R is the mean number of positions of an example.
            This can be closer to the GGN if loss terms depend on several positions.

    Raises:
        ValueError: an option is not supported.
    """

    kfac_approx: KfacApprox = "auto"
    fisher: str = "exact"
    mc_samples: int = 1
    unsupported: Unsupported = "error"
    backward_precision: BackwardPrecision = "float32"
    diagonal_above: int | None = None
    expand_scaling: ExpandScaling = "positions"

    def __post_init__(self) -> None:
        modes = self.kfac_approx
        if isinstance(modes, Mapping):
            for pattern, mode in modes.items():
                check_option(f"kfac_approx[{pattern!r}]", mode, Mode)
            object.__setattr__(self, "kfac_approx", dict(modes))
        elif modes not in ("expand", "reduce", "auto"):
            raise ValueError(
                f"kfac_approx={modes!r} is not supported; choose one of 'expand', 'reduce', "
                "'auto', or a mapping of layers' names or patterns to modes, such as {'head*': "
                "'expand', '*': 'reduce'}."
            )
        check_option("fisher", self.fisher, Fisher.by_name)
        check_option("unsupported", self.unsupported, Unsupported)
        check_option("backward_precision", self.backward_precision, BackwardPrecision)
        check_option("expand_scaling", self.expand_scaling, ExpandScaling)
        if self.mc_samples < 1:
            raise ValueError(f"mc_samples must be at least 1, not {self.mc_samples}.")
        if self.diagonal_above is not None and self.diagonal_above < 1:
            raise ValueError(
                f"diagonal_above must be at least 1, or None, not {self.diagonal_above}."
            )

    def make_fisher(self) -> Fisher:
        """Return the object that ``fisher`` names."""
        return Fisher.by_name[self.fisher](self.mc_samples)

    def of_the_matrix(self) -> dict[str, Any]:
        """Return the options that decide which matrix a pass computes or estimates, by name.

        Factors can be added only if these agree. The other options determine how it is computed,
        with which noise (``mc_samples``), or how batches give their targets.
        """
        names = ("kfac_approx", "fisher", "diagonal_above", "expand_scaling")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class CurvatureOptions(PassOptions, TargetOptions):
    """All options of a curvature pass over some data, checked once and passed whole.

    It has the options of `PassOptions`, which choose the matrix, and of `TargetOptions`, which
    choose the targets.

    Raises:
        ValueError: an option is not supported.
    """

    def __post_init__(self) -> None:
        PassOptions.__post_init__(self)
        TargetOptions.__post_init__(self)

    def to_json(self) -> dict[str, Any]:
        """Return the options except ``batch`` as plain data, for ``CurvatureOptions(**data)``."""
        return {name: value for name, value in asdict(self).items() if name != "batch"}


def check_option(name: str, value: object, options: object) -> None:
    """Raise a ValueError that lists ``options`` (a Literal, names) unless ``value`` is one."""
    supported = list(options) if isinstance(options, Mapping) else get_args(options)
    if isinstance(value, Mapping) or value not in supported:
        raise ValueError(
            f"{name}={value!r} is not supported; choose one of {', '.join(map(repr, supported))}."
        )


def check_positive(name: str, value: object) -> None:
    """Raise an error unless a number, or each entry of a tensor, is positive and finite."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64).detach()
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"{name}={value!r} is not supported. Pass a number or a tensor.") from None
    right = numbers.isfinite() & (numbers > 0)
    if not right.all():
        # Print the number as the user passed it, -3 and not -3.0.
        wrong = value if isinstance(value, (int, float)) else numbers[~right][0].item()
        needed = "positive" if math.isfinite(wrong) else "positive and finite"
        raise ValueError(f"{name} must be {needed}, not {wrong}.")


def check_fraction(argument: str, value: float, *, zero: bool = True) -> None:
    """Raise a ValueError unless the fraction is in [0, 1), or in (0, 1) if zero is False."""
    if not (0 <= value < 1 if zero else 0 < value < 1):
        allowed = "in [0, 1), 0 for none" if zero else "between 0 and 1, both excluded"
        raise ValueError(f"{argument}={value} must be a fraction {allowed}.")


def check_keys(owner: str, state: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise a ValueError that names the entries that a state lacks."""
    missing = [key for key in keys if key not in state]
    if missing:
        raise ValueError(
            f"The state of {owner} lacks {', '.join(map(repr, missing))}. Another version wrote "
            "it, or it is empty, incomplete, or belongs to another object. Load the whole result "
            "of state_dict() with the version that wrote it, or start again without the state."
        )


def modes_of_layers(kfac_approx: KfacApprox, names: Iterable[str]) -> dict[str, Mode]:
    """Return each layer's mode; the first pattern that matches its name applies.

    Raises:
        ValueError: a layer without a matching pattern, or a pattern without a layer.
    """
    names = list(names)
    if not isinstance(kfac_approx, Mapping):
        assert kfac_approx != "auto"
        return dict.fromkeys(names, kfac_approx)
    modes: dict[str, Mode] = {}
    matched: set[str] = set()
    for name in names:
        fitting = [pattern for pattern in kfac_approx if fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(
                f"No pattern of kfac_approx matches layer '{name}': {', '.join(kfac_approx)}. Add "
                "a pattern for it, or '*' at the end for all other layers."
            )
        modes[name] = kfac_approx[fitting[0]]
        matched.add(fitting[0])
    unused = [pattern for pattern in kfac_approx if pattern not in matched and pattern != "*"]
    if unused:
        raise ValueError(
            f"The pattern '{unused[0]}' of kfac_approx matches no layer, or only layers of earlier "
            f"patterns. The layers are {', '.join(names)}."
        )
    return modes
