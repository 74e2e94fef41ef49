"""Likelihoods p(y|f) of targets y for outputs f of a network.

Each likelihood is a frozen dataclass, whose fields are its options: `StudentT(df=4)`. It has a
name, and `likelihood_of` makes it from a text such as "student_t(df=4)", which `str` returns.
Public functions accept both and make the object once; all other functions take the object.

Outputs f are (N, C), or (N, ..., C) if an example has several loss terms, one for each position in
``...``. The loss is ℓ = −log p(y|f) in nats. For classification, regression and bernoulli it omits
constants.

This module contains all code that depends on the likelihood. Training uses `Likelihood.loss`. The
curvature uses a square root S of Λ, S Sᵀ = Λ, or gradients at drawn targets or at the data's own. Λ
is the Hessian ∇²_f ℓ if that does not depend on y and so is positive semi-definite. Otherwise it is
the Fisher information E_y[∇_f ℓ ∇_f ℓᵀ], unless the class says something else. Predictions use
`log_probabilities`, or `moments`; metrics of continuous targets also use `log_density` and `cdf`.
"""

import ast
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kfac_backend.extras import extra
from kfac_backend.precision import at_least_float32

Moments = tuple[Tensor, Tensor, Tensor]
Observed = tuple[Tensor, Tensor, Bool[Tensor, "..."] | None]

IGNORED = -100
"""Label of terms that add neither loss nor curvature, such as padding, as in PyTorch's losses and
Hugging Face's models. `Task` replaces a data set's own label for such terms by this one."""

LARGEST_DRAW = 2**19
"""Maximum number of probabilities from which labels are drawn at once, over several loss terms."""

CLASSES_OF_BLOCK = 256
"""Number of classes in a block, if labels are drawn in two steps."""

EULER = 0.5772156649015329  # −E log of an exponential random number

MANY_CLASSES = 1024
"""Minimum number of classes for drawing a label in two steps: a block, then a class in it."""


def parameter(default: Any, *, start: Any = None, above: float = 0.0) -> Any:
    """Field for a continuous parameter of a likelihood; None if it is not given.

    `PriorLearner` learns parameters that are not given, by the evidence.

    Args:
        default: value for None; a list for one value per output.
        start: value at which learning starts, if steps do not grow with the gradient, as Adam's;
            None for ``default``. Other optimisers, such as SGD, start at ``default``.
        above: exclusive lower bound of the values.
    """
    start = default if start is None else start
    return field(default=None, metadata={"default": default, "start": start, "above": above})


@dataclass(frozen=True)
class Likelihood:
    """Base class of likelihoods. Its fields are its options.

    A continuous parameter with value None, such as ``StudentT().df``, is not given: a fit uses its
    default, and `PriorLearner` learns it.

    Likelihoods are equal if their class and options are equal. ``str`` returns a text from which
    `likelihood_of` makes an equal one. Files store this text.

    To add a likelihood, derive a class with a ``name`` and `losses`. For predictions it also needs
    `moments` (continuous) or `log_probabilities` (others). If it has options, make it a frozen
    dataclass, too. Autograd computes the rest. Λ is then the Hessian at the data's targets with its
    negative eigenvalues set to 0, so it is positive semi-definite even if ℓ is not convex in f.
    """

    name: ClassVar[str]
    """Name of the likelihood in options."""
    kind: ClassVar[Literal["classes", "binary", "continuous"]] = "continuous"
    """Kind of prediction: the class of each loss term, yes or no for each output, or numbers."""
    has_labels: ClassVar[bool] = False
    """Whether targets are class indices, one for each loss term. Others have one more axis."""
    has_sigma: ClassVar[bool] = False
    """Whether there is also a noise σ, which divides the loss and its Hessian by σ²."""
    needs_targets: ClassVar[bool] = True
    """Whether Λ depends on the data's targets."""
    has_probit: ClassVar[bool] = True
    """Whether the link "probit" approximates the mean of the probabilities."""
    has_label_noise: ClassVar[bool] = False
    """Whether ``noise`` is the share of labels that are drawn at random."""
    is_count: ClassVar[bool] = False
    """Whether the targets are whole numbers."""
    parameters: ClassVar[Mapping[str, Tensor]]
    """Values of the fields made by `parameter`, float64, by name. The loss and Λ are differentiable
    with respect to the parameters in `with_parameters`."""

    _by_name: ClassVar[dict[str, type["Likelihood"]]] = {}

    def __init_subclass__(cls) -> None:
        """Register the likelihood under its name."""
        if "name" in cls.__dict__:
            Likelihood._by_name[cls.name] = cls

    def __post_init__(self) -> None:
        """Check the parameters. Subclasses check their other options.

        Raises:
            ValueError: a value that is not supported.
        """
        parameters: dict[str, Tensor] = {}
        for option in fields(self):
            value = _plain(getattr(self, option.name))
            object.__setattr__(self, option.name, value)
            if not option.metadata:
                continue
            default, above = option.metadata["default"], option.metadata["above"]
            is_list = isinstance(default, list)
            number = _finite(default if value is None else value, is_list)
            if number is None or not (number > above).all():
                kind = "a list of finite numbers" if is_list else "a finite number"
                printed = list(value) if isinstance(value, tuple) else value
                raise ValueError(f"{option.name} must exceed {above:g}: {kind}, not {printed!r}")
            parameters[option.name] = number
        object.__setattr__(self, "parameters", parameters)

    def __str__(self) -> str:
        """Return the name and the given options, as read by `likelihood_of`."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    @property
    def options(self) -> dict[str, Any]:
        """Options that differ from their defaults, as plain data."""
        return {
            option.name: list(value) if isinstance(value, tuple) else value
            for option in fields(self)
            if (value := getattr(self, option.name)) != option.default
        }

    def replace(self, **options: Any) -> "Likelihood":
        """Return a copy with other values of some options."""
        return dataclasses.replace(self, **options)

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> Self:
        """Return a copy that computes with these tensors instead of some `parameters`.

        Its fields, and so its text, stay unchanged; `replace` changes these.
        """
        other = copy(self)
        object.__setattr__(other, "parameters", {**self.parameters, **parameters})
        return other

    def to_learn(self, normalized_steps: bool = True) -> dict[str, Any]:
        """Return the parameters that are not given, with the values at which learning starts.

        Args:
            normalized_steps: whether the optimiser divides gradients by their size, as Adam.
        """
        key = "start" if normalized_steps else "default"
        return {
            option.name: option.metadata[key]
            for option in fields(self)
            if option.metadata and getattr(self, option.name) is None
        }

    def lower_bounds(self) -> dict[str, float]:
        """Return the exclusive lower bound of each parameter."""
        return {f.name: f.metadata["above"] for f in fields(self) if f.metadata}

    def step_scale(self) -> float:
        """Return a factor of the loss in Adam's steps of `OnlineTraining`, 1 by default.

        It cancels a learned noise in the size of the gradients. Adam divides gradients by their
        root mean square over about 1,000 steps. Without the factor, its steps would be too large
        after an update that lowers the noise, and too small after an update that raises it.
        """
        return 1.0

    def num_vectors(self, C: int) -> int:
        """Return the number of columns of `root` for C outputs."""
        return C

    def target_shape(self, f: Tensor) -> Sequence[int]:
        """Return the shape of the targets for outputs (N, ..., C)."""
        return f.shape

    def check(self, f: Tensor, y: Tensor, may_ignore: bool = False) -> None:
        """Raise an error unless the targets fit outputs (N, ..., C).

        With ``may_ignore`` labels may be `IGNORED`; otherwise that label is out of range.

        Raises:
            TypeError: targets of a wrong dtype.
            ValueError: a wrong shape, a label out of range, targets that are not finite.
        """
        expected = tuple(self.target_shape(f))
        if y.shape != expected:
            is_flat = expected == (*y.shape, 1)
            way_out = " Give the targets their last axis: y[..., None]." if is_flat else ""
            raise ValueError(
                f"Targets have shape {tuple(y.shape)}, the model's output {tuple(f.shape)}; "
                f"likelihood '{self}' needs "
                f"{'the same shape' if expected == f.shape else f'targets of shape {expected}'}."
                + way_out
            )
        if y.is_complex():
            raise TypeError(
                f"The targets are complex ({y.dtype}), but likelihoods support only real targets."
            )
        if y.is_floating_point() and not torch.isfinite(y).all():
            raise ValueError(
                "The targets contain NaN or infinity. Correct or remove these examples."
            )

    def losses(self, f: Float[Tensor, "*terms C"], y: Tensor) -> Tensor:
        """Return ℓ of each target (nats), (*terms, C), or (*terms, 1) for labels."""
        raise NotImplementedError

    def loss(self, f: Float[Tensor, "*terms C"], y: Tensor) -> Tensor:
        """Return Σ ℓ over all terms that count, a scalar (nats)."""
        return self.losses(f, y).sum()

    def root(self, f: Float[Tensor, "*terms C"], y: Tensor) -> Iterator[Float[Tensor, "*terms C"]]:
        """Yield the columns s of S with Σ s sᵀ = Λ."""
        # Term by term, because different terms have no common second derivative: (C, C) each, not
        # the matrix of all outputs.
        one = torch.func.hessian(lambda f_t, y_t: self.loss(f_t[None], y_t[None]))
        hessians = torch.func.vmap(one)(f.flatten(0, -2), y.flatten(0, f.dim() - 2))  # (M, C, C)
        values, vectors = torch.linalg.eigh(hessians)
        columns = vectors * values.clamp(min=0).sqrt()[:, None]
        yield from (column.reshape(f.shape) for column in columns.unbind(-1))

    def drawn_root(
        self, f: Float[Tensor, "*terms C"], y: Tensor, generator: torch.Generator | None
    ) -> Float[Tensor, "*terms C"]:
        """Return S ε with random signs ε, so that E[S ε εᵀ Sᵀ] = Λ; differentiable in f."""
        draws = [s * _random_signs(s[..., :1], generator) for s in self.root(f, y)]
        return torch.stack(draws).sum(0)

    def gradient(self, f: Float[Tensor, "*terms C"], y: Tensor) -> Float[Tensor, "*terms C"]:
        """Return ∇_f ℓ at the targets y."""
        with torch.enable_grad():
            # Detach f unless a graph is needed, so that autograd does not go through the network.
            at = f if f.requires_grad else f.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss(at, y), at, create_graph=f.requires_grad)
        return gradient

    def drawn_gradient(
        self, f: Float[Tensor, "*terms C"], y: Tensor, generator: torch.Generator | None
    ) -> Float[Tensor, "*terms C"]:
        """Return a random g with E[g gᵀ] = Λ: S ε, or ∇_f ℓ at labels drawn from p(y|f)."""
        return self.drawn_root(f, y, generator)

    def log_probabilities(self, f: Float[Tensor, "*terms C"]) -> Tensor:
        """Return log p of each class (*terms, K), or of no and yes per output (*terms, C, 2)."""
        raise NotImplementedError(
            f"likelihood '{self}' has no class probabilities. Define log_probabilities(f) in "
            f"{type(self).__name__}."
        )

    def predicted(self, f: Float[Tensor, "*terms C"]) -> Int[Tensor, "*terms"]:
        """Return the most probable class of each term."""
        return self.log_probabilities(f).argmax(-1)

    def moments(self, f: Float[Tensor, "*terms C"], variance: Tensor, sigma: Tensor) -> Moments:
        """Return E[y], E[Var(y|f)] and Var(E[y|f]) of each number y, for outputs N(f, variance).

        Args:
            f: means of the outputs.
            variance: variance of each output.
            sigma: σ, if the likelihood has one.
        """
        raise NotImplementedError(
            f"likelihood '{self}' has no moments, which predictions need. Define moments(f, "
            f"variance, sigma) in {type(self).__name__}."
        )

    def observed(self, y: Tensor, variance: Tensor) -> Observed:
        """Return the observed part of targets for comparison with predictions.

        Args:
            y: targets.
            variance: variance of the numbers' predictions.

        Returns:
            Numbers or labels; the variance, including known noise of the targets; and a mask of
                censored numbers, whose true values are larger. The mask is None if numbers cannot
                be censored.
        """
        return y, variance, None

    def log_density(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the log density of numbers y (nats), in the family with these two moments."""
        return -0.5 * ((y - mean).square() / variance + (2 * math.pi * variance).log())

    def cdf(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the probability of numbers up to y, in the family with these two moments."""
        return torch.special.ndtr((y - mean) / variance.sqrt())

    def log_score(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log p(y) under predictions: `log_density`, or log P(> y) for censored targets.

        Args:
            y: targets.
            mean: mean of the numbers' predictions.
            variance: their variance, including the noise.
        """
        number, variance, censored = self.observed(y, variance)
        density = self.log_density(number, mean, variance)
        if censored is None:
            return density
        tiny = torch.finfo(mean.dtype).tiny
        beyond = (1 - self.cdf(number, mean, variance)).clamp(min=tiny).log()
        return torch.where(censored, beyond, density)

    def ranks(self, y: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ranks P(< number) and P(<= number) of targets in their predictions.

        For targets drawn from the predictions they are uniform over 0 to 1. A censored number's
        second rank is 1. A count's ranks differ by its probability. Sources: Czado, Gneiting & Held
        2009 (Biometrics 65) for counts; Haider et al. 2020 (arXiv:1811.11347) for censored numbers.
        """
        number, variance, censored = self.observed(y, variance)
        at = self.cdf(number, mean, variance)
        below = self.cdf(number - 1, mean, variance) if self.is_count else at
        return below, at if censored is None else at.where(~censored, 1.0)


class Diagonal(Likelihood):
    """Base class of likelihoods with a diagonal Λ. Subclasses define `diagonal`."""

    needs_targets = False

    def diagonal(self, f: Float[Tensor, "*terms C"], y: Tensor) -> Float[Tensor, "*terms C"]:
        """Return the diagonal of Λ."""
        raise NotImplementedError

    def root(self, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Yield a column for each output."""
        scale = self._scale(f, y)
        for c in range(f.shape[-1]):
            column = torch.zeros_like(f)
            column[..., c] = scale[..., c]
            yield column

    def drawn_root(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        return self._scale(f, y) * _random_signs(f, generator)

    def _scale(self, f: Tensor, y: Tensor) -> Tensor:
        """Return √ of the diagonal. The root of 0 has no derivative."""
        return self.diagonal(f, y).clamp(min=torch.finfo(f.dtype).tiny).sqrt()


class _Labels(Likelihood):
    """Base class of likelihoods of classes, with a label for each loss term."""

    kind = "classes"
    has_labels = True
    needs_targets = False

    def target_shape(self, f: Tensor) -> Sequence[int]:
        return f.shape[:-1]


class _Softmax(_Labels):
    """Base class of likelihoods of classes with p = softmax(f), for each loss term.

    Its dataclasses have a field ``weights``, the class weights.
    """

    weights: Sequence[float] | None
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None:
            numbers = _finite(self.weights, is_list=True)
            if numbers is None or not (numbers > 0).all():
                weights = self.options.get("weights")
                raise ValueError(
                    f"weights must be a positive number for each class, not {weights!r}"
                )
        object.__setattr__(self, "needs_targets", self.weights is not None)
        if not isinstance(self.smoothing, int | float) or not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1), not {self.smoothing!r}")

    def _with_weight(self, vector: Tensor, y: Tensor) -> Tensor:
        """Return a vector times √h, where the weighted Λ is h (diag(p) − ppᵀ)."""
        if self.weights is None and self.smoothing == 0:
            return vector
        C, eps = vector.shape[-1], self.smoothing
        w = vector.new_tensor([1.0] * C if self.weights is None else self.weights)
        h = (1 - eps) * w[y.long().where(y != IGNORED, 0)] + eps * w.mean()
        return vector * h.sqrt()[..., None]

    def check(self, f: Tensor, y: Tensor, may_ignore: bool = False) -> None:
        C = f.shape[-1]
        of_images = y.shape == (len(f), *f.shape[2:])
        if y.shape != f.shape[:-1] and of_images and not y.is_floating_point():
            last = ", ".join(map(str, (*y.shape, f.shape[1])))
            raise ValueError(
                f"The model's output has shape {tuple(f.shape)}, with classes in the second axis, "
                f"for labels of shape {tuple(y.shape)}. Classes must come last, ({last}). Return "
                "f.movedim(1, -1)."
            )
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise TypeError(
                f"Class labels have dtype {y.dtype}; likelihood '{self}' needs integers, "
                "for example y.long(). Use 'regression' or 'bernoulli' for other targets."
            )
        if C < 2:
            raise ValueError(
                f"likelihood '{self}' needs at least two outputs, but the model has one. For one "
                "logit use likelihood='bernoulli'."
            )
        if self.weights is not None and len(self.weights) != C:
            raise ValueError(
                f"likelihood '{self}' has weights for {len(self.weights)} classes, but the model "
                f"has {C} outputs."
            )
        super().check(f, y)
        outside = (y < 0) | (y >= C)
        wrong = y[outside & (y != IGNORED) if may_ignore else outside]
        if len(wrong):
            label = wrong[0].item()
            way_out = "Relabel the data, or change the number of the model's outputs."
            if label < 0:
                way_out = f"If it marks positions that do not count, pass ignore_index={label}."
            raise ValueError(
                f"Label {label} is out of range: the model has {C} outputs, so labels must be 0 to "
                f"{C - 1}. {way_out}"
            )

    def predicted(self, f: Tensor) -> Tensor:
        return f.argmax(-1)

    def log_probabilities(self, f: Tensor) -> Tensor:
        return torch.log_softmax(f, -1)


@dataclass(frozen=True)
class Classification(_Softmax):
    """Likelihood of a class index for each loss term, by the softmax of its C logits.

    Args:
        weights: class weights w; the loss of label y counts w_y times.
        smoothing: ε. A share ε of each label is spread evenly over all classes. With weights, each
            class's part has its own weight, as in `torch.nn.CrossEntropyLoss`.

    With either option exp(−ℓ) is no probability, and the evidence belongs to a pseudo-likelihood.
    """

    name = "classification"
    weights: Sequence[float] | None = None
    smoothing: float = 0.0

    def num_vectors(self, C: int) -> int:
        """Return C − 1, the rank of diag(p) − ppᵀ."""
        return C - 1

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log Σ_c exp f_c − f_y, with weights and smoothing; 0 where y is `IGNORED`."""
        return self.loss(f, y, "none").view(*f.shape[:-1], 1)

    def loss(self, f: Tensor, y: Tensor, reduction: str = "sum") -> Tensor:
        """Return the sum of `losses`, in one operation, because each training step needs it."""
        w = None if self.weights is None else f.new_tensor(self.weights)
        return F.cross_entropy(
            f.flatten(0, -2),
            y.flatten().long(),
            w,
            ignore_index=IGNORED,
            reduction=reduction,
            label_smoothing=self.smoothing,
        )

    def root(self, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Yield the C − 1 columns of the Cholesky factor of diag(p) − ppᵀ, with p descending.

        With t_j = Σ_{k≥j} p_k: S_jj = √(p_j t_{j+1} / t_j), and S_ij = −p_i / t_{j+1} · S_jj for i
        > j.
        """
        p = torch.softmax(f, dim=-1)
        in_order, order = p.sort(dim=-1, descending=True)
        place = order.argsort(-1)  # of each class in that order
        # Cumulative sums from the smallest probability up, read backwards: t_j. The form 1 −
        # Σ_{k<j} p_k would cancel.
        t = in_order.flip(-1).cumsum(-1).flip(-1)
        tiny = torch.finfo(p.dtype).tiny  # where probabilities underflow, columns are 0, not 0 / 0
        p_j, t_j, t_next = in_order[..., :-1], t[..., :-1], t[..., 1:]
        first = (p_j * (t_next / t_j.clamp(min=tiny))).clamp(min=tiny).sqrt()  # S_jj
        t_next = t_next.clamp(min=tiny)
        # Several columns at once, (columns, *terms, C), in the classes' order of f.
        number, size = p.shape[-1] - 1, max(1, LARGEST_DRAW // max(1, p.numel()))
        for start in range(0, number, size):
            some = slice(start, min(start + size, number))
            S_jj, below = (x[..., some].movedim(-1, 0)[..., None] for x in (first, t_next))
            j = torch.arange(some.start, some.stop, device=f.device).view(-1, *[1] * f.dim())
            columns = torch.where(place > j, -(p / below) * S_jj, 0.0)
            yield from self._with_weight(torch.where(place == j, S_jj, columns), y)

    def drawn_root(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the draw (diag(√p) − p √pᵀ) ε."""
        p = torch.softmax(f, dim=-1)
        scaled = p.clamp(min=torch.finfo(f.dtype).tiny).sqrt() * _random_signs(f, generator)
        scaled = torch.addcmul(scaled, p, scaled.sum(-1, keepdim=True), value=-1)
        return self._with_weight(scaled, y)

    def drawn_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the gradient p − e_ŷ with labels ŷ drawn from p."""
        p = torch.softmax(f, dim=-1)
        labels = _drawn(p.flatten(0, -2), generator).view(*f.shape[:-1], 1)
        # Write into p, because one-hot integers would take twice its memory.
        g = p.scatter_add_(-1, labels, -torch.ones_like(p[..., :1]))
        return self._with_weight(g, y)


@dataclass(frozen=True)
class NoisyClassification(_Softmax):
    """Likelihood of a class index that was replaced, with probability ε, by a random one.

    p(y|f) = q_y = (1 − ε) p_y + ε/C with p = softmax(f). The loss ℓ = −log q_y is at most log(C/ε),
    so the fit can give up a label that contradicts all others. If a share w of the labels was
    changed to another class, ε = w C/(C − 1). Λ is the Fisher information, Σ_c s_c s_cᵀ with s_c =
    (1 − ε) p_c (e_c − p)/√q_c. At ε = 0 it equals Λ of `Classification`. Predictions are of the
    true class, p. Source: the "random label" model of Angluin & Laird 1988 (Machine Learning 2).

    Args:
        noise: ε in [0, 1); 0 if it is neither given nor learned.
        weights: class weights w; the loss of label y counts w_y times.
    """

    name = "noisy_classification"
    has_label_noise = True
    noise: Any = parameter(0.0, above=-math.inf)
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        number = _finite(0.0 if self.noise is None else self.noise)
        if number is None or not 0 <= number < 1:
            raise ValueError(f"noise must be in [0, 1), not {self.noise!r}")
        super().__post_init__()

    def num_vectors(self, C: int) -> int:
        """Return C, or C − 1 without noise."""
        return C if self.parameters["noise"] else C - 1

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """Return −log q_y, w_y times; 0 where y is `IGNORED`."""
        counts = y != IGNORED
        label = y.long().where(counts, 0)[..., None]
        log_p = torch.log_softmax(f, -1)
        log_q = with_label_noise(log_p, self.parameters["noise"].to(log_p), f.shape[-1])
        log_q = log_q.gather(-1, label)
        if self.weights is not None:
            log_q = log_q * f.new_tensor(self.weights)[label]
        return -log_q.where(counts[..., None], 0.0)

    def root(self, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Yield the columns s_c; without noise, exactly the columns of `Classification`."""
        if self._is_without_noise:
            yield from Classification(weights=self.weights).root(f, y)
            return
        p, scale = self._scaled(f)
        for c in range(f.shape[-1]):
            column = -p * scale[..., c, None]
            column[..., c] += scale[..., c]
            yield self._with_weight(column, y)

    def drawn_root(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return Σ_c s_c ε_c; without noise the draw of `Classification`, to the bit."""
        if self._is_without_noise:
            return Classification(weights=self.weights).drawn_root(f, y, generator)
        p, scale = self._scaled(f)
        scaled = scale * _random_signs(f, generator)
        return self._with_weight(scaled - p * scaled.sum(-1, keepdim=True), y)

    def drawn_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return −(1 − ε) p_ŷ (e_ŷ − p)/q_ŷ with labels ŷ drawn from q."""
        p = torch.softmax(f, -1)
        eps = self.parameters["noise"].to(f)
        q = (1 - eps) * p + eps / f.shape[-1]
        labels = _drawn(q.flatten(0, -2), generator).view(*f.shape[:-1], 1)
        share = (1 - eps) * p.gather(-1, labels) / q.gather(-1, labels)
        return self._with_weight((p * share).scatter_add(-1, labels, -share), y)

    @property
    def _is_without_noise(self) -> bool:
        """Whether ε is fixed at 0."""
        noise = self.parameters["noise"]
        return not noise.requires_grad and not noise

    def _scaled(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return p, and (1 − ε) p_c/√q_c; if p underflows the root is 0, not 0/0."""
        p, eps = torch.softmax(f, -1), self.parameters["noise"].to(f)
        p = p.clamp(min=torch.finfo(p.dtype).tiny)
        return p, (1 - eps) * p / ((1 - eps) * p + eps / f.shape[-1]).sqrt()


@dataclass(frozen=True)
class Ordinal(Diagonal, _Labels):
    """Likelihood of one of K ordered classes, by one output f: p(y ≤ k) = s(c_k − f).

    s is the logistic function. Λ is the Fisher information. Source: McCullagh 1980, "Regression
    models for ordinal data".

    Args:
        cuts: the K − 1 cut points c, ascending. They are fixed; the network fits the bias and scale
            of f.
    """

    name = "ordinal"
    has_probit = False
    cuts: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        cuts = self.options["cuts"]
        points = _finite(cuts, is_list=True)
        if points is None or not (points.diff() > 0).all():
            raise ValueError(f"cuts must be a list of finite, ascending numbers, not {cuts!r}")

    def _intervals(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper cut point of each class, (K,)."""
        points = f.new_tensor([-math.inf, *self.cuts, math.inf])
        return points[:-1], points[1:]

    def check(self, f: Tensor, y: Tensor, may_ignore: bool = False) -> None:
        if f.shape[-1] != 1:
            raise ValueError(
                f"likelihood '{self}' needs one output, but the model has {f.shape[-1]}. Return "
                "(N, 1): the cut points divide this output into classes."
            )
        K = len(self.cuts) + 1
        Classification().check(f.expand(*f.shape[:-1], K), y, may_ignore)

    def log_probabilities(self, f: Tensor) -> Tensor:
        """Return log (s(c_k − f) − s(c_{k−1} − f)) without cancellation, (*terms, K)."""
        low, high = self._intervals(f)
        width = torch.log1p(-(low - high).exp())
        return F.logsigmoid(high - f) + F.logsigmoid(f - low) + width

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """Return −log p_y, 0 where the label does not count; (*terms, 1)."""
        # `check` reports labels out of range, perhaps later, and they must not stop a GPU now.
        labels = y.long().clamp(0, len(self.cuts)).expand(f.shape[:-1])[..., None]
        return -self.log_probabilities(f).gather(-1, labels).where((y != IGNORED)[..., None], 0.0)

    def diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        """Return E[(dℓ/df)²], over the classes."""
        low, high = self._intervals(f)
        slopes = torch.sigmoid(f - high) - torch.sigmoid(low - f)
        return (self.log_probabilities(f).exp() * slopes.square()).sum(-1, keepdim=True)


class Regression(Diagonal):
    """Likelihood of a number for each output: N(y; f, σ²).

    At σ = 1 its loss is ½‖y − f‖², without constants.
    """

    name = "regression"
    has_sigma = True

    def _relative_noise(self, f: Tensor) -> Tensor:
        """Return the factor s of an output with noise σ s."""
        return f.new_ones(())

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ½(y − f)²/s² of each output."""
        return 0.5 * (f - y.to(f)).square() / self._relative_noise(f).square()

    def diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        """Return 1/s², the Hessian at σ = 1."""
        return self._relative_noise(f).square().reciprocal().expand_as(f)

    def moments(self, f: Tensor, variance: Tensor, sigma: Tensor) -> Moments:
        """Return the means f, σ²s² and the outputs' variance."""
        noise = sigma.to(f) * self._relative_noise(f)
        return f, noise.square().expand_as(f), variance


@dataclass(frozen=True)
class RegressionPerOutput(Regression):
    """Likelihood of a number for each output, with separate noises: N(y_c; f_c, σ² s_c²).

    `PriorLearner` learns σ as for "regression".

    Args:
        noise: s, one number for each output, divided by their geometric mean, which σ contains. So
            Σ log s_c = 0, and the evidence has the same constants as for "regression". All equal by
            default.
    """

    name = "regression_per_output"
    noise: Sequence[float] | None = parameter([1.0])

    def __post_init__(self) -> None:
        super().__post_init__()
        noise = self.parameters["noise"]
        object.__setattr__(self, "parameters", {"noise": noise / noise.log().mean().exp()})

    def check(self, f: Tensor, y: Tensor, may_ignore: bool = False) -> None:
        super().check(f, y)
        if len(self.parameters["noise"]) not in (1, f.shape[-1]):
            raise ValueError(
                f"likelihood '{self}' has noises for {len(self.parameters['noise'])} outputs, but "
                f"the model has {f.shape[-1]}. Pass one noise for each output, or omit them."
            )

    def _relative_noise(self, f: Tensor) -> Tensor:
        return self.parameters["noise"].to(f)


class KnownNoise(Regression):
    """Likelihood of a number for each output with known noise: N(y; f, n²), targets [y, n].

    The targets' last axis has the C numbers and then their C standard deviations. Predictions are
    of numbers without noise; metrics add the noise of each test example.
    """

    name = "known_noise"
    has_sigma = False
    needs_targets = True

    def target_shape(self, f: Tensor) -> Sequence[int]:
        return *f.shape[:-1], 2 * f.shape[-1]

    def check(self, f: Tensor, y: Tensor, may_ignore: bool = False) -> None:
        super().check(f, y)
        noise = y.chunk(2, -1)[1]
        if not (noise > 0).all():
            raise ValueError(
                f"likelihood '{self}' needs positive standard deviations, not {noise.min():g}. "
                "They are the second half of the targets' last axis."
            )

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ½(y − f)²/n² + log n + ½ log 2π of each output."""
        number, noise = y.to(f).chunk(2, -1)
        return -self.log_density(number, f, noise.square())

    def diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        """Return 1/n², the Hessian."""
        return y.to(f).chunk(2, -1)[1].square().reciprocal()

    def moments(self, f: Tensor, variance: Tensor, sigma: Tensor) -> Moments:
        """Return the means f, no noise, and the outputs' variance."""
        return f, torch.zeros_like(f), variance

    def observed(self, y: Tensor, variance: Tensor) -> Observed:
        """Return the numbers, and the variance with their known noise."""
        number, noise = y.chunk(2, -1)
        return number, variance + noise.square(), None


@dataclass(frozen=True)
class Heteroscedastic(Diagonal):
    """Likelihood of a number with noise from the input: N(y; m, n² exp(k u)), f = [m, u].

    The last axis of the outputs has the C means m and then C numbers u, which are log variances at
    n = k = 1. Λ is the Fisher information diag(1/(n² exp(k u)), k²/2), because the Hessian is
    indefinite. Source: Immer et al. 2023 (arXiv:2301.05183), there with natural parameters.

    `PriorLearner` learns n and k, both from 1. k acts on u like a separate prior precision: the
    means and u share the prior precision of the last layer. Do not start with a small k: Adam's
    steps on u then change the variance k times less, and at k = 0 neither u nor k has a gradient.

    Args:
        noise: n.
        strength: k.
    """

    name = "heteroscedastic"
    noise: float | None = parameter(1.0)
    strength: float | None = parameter(1.0)

    def target_shape(self, f: Tensor) -> Sequence[int]:
        if f.shape[-1] % 2:
            raise ValueError(
                f"likelihood '{self}' needs two outputs for each number, but the model has "
                f"{f.shape[-1]}. Return all means, then one value for each noise: (N, 2C)."
            )
        return *f.shape[:-1], f.shape[-1] // 2

    def mean_and_log_variance(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means m and the log variances s = 2 log n + k u, each (*terms, C)."""
        mean, u = f.chunk(2, -1)
        return mean, 2 * self.parameters["noise"].log().to(f) + self._strength(f) * u

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ½((y − m)² exp(−s) + s + log 2π) of each number."""
        mean, s = self.mean_and_log_variance(f)
        return 0.5 * ((y.to(f) - mean).square() * (-s).exp() + s + math.log(2 * math.pi))

    def diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the diagonal exp(−s), k²/2."""
        _, s = self.mean_and_log_variance(f)
        return torch.cat([(-s).exp(), (0.5 * self._strength(f).square()).expand_as(s)], -1)

    def moments(self, f: Tensor, variance: Tensor, sigma: Tensor) -> Moments:
        """Return the means m, E exp(s), and the means' variance."""
        mean, s = self.mean_and_log_variance(f)
        of_mean, of_u = variance.chunk(2, -1)
        return mean, (s + 0.5 * self._strength(f).square() * of_u).exp(), of_mean

    def _strength(self, f: Tensor) -> Tensor:
        return self.parameters["strength"].to(f)


class Poisson(Diagonal):
    """Likelihood of a count for each output, with rate exp(f); Λ = exp(f) is the Hessian.

    Predictions have the negative binomial's family, a Poisson distribution with a gamma rate.
    """

    name = "poisson"
    is_count = True

    def check(self, f: Tensor, y: Tensor, may_ignore: bool = False) -> None:
        super().check(f, y)
        is_count = (y >= 0) & (y == y.round())
        if not is_count.all():
            raise ValueError(
                f"likelihood '{self}' needs counts 0, 1, 2, ... as targets, not "
                f"{float(y[~is_count][0]):g}. Do not standardise them, or use 'regression'."
            )

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """Return exp(f) − y f + log y! of each output."""
        y = y.to(f)
        return f.exp() - y * f + torch.lgamma(y + 1)

    def diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        return f.exp()

    def moments(self, f: Tensor, variance: Tensor, sigma: Tensor) -> Moments:
        """Return the moments of y for a log-normal rate."""
        mean = (f + 0.5 * variance).exp()
        return mean, mean, mean.square() * variance.expm1()

    def log_density(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the negative binomial's log density, or Poisson's where variance = mean."""
        r = mean.square() / (variance - mean).clamp(min=1e-6 * mean)
        return -_negative_binomial(y, mean, r)

    def cdf(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        with extra("statistics"):
            from scipy import stats  # imported here, because it takes a second

        spare = (variance - mean).clamp(min=1e-6 * mean)
        cumulative = stats.nbinom.cdf(y, mean.square() / spare, mean / (mean + spare))
        return torch.as_tensor(cumulative).to(mean)


@dataclass(frozen=True)
class NegativeBinomial(Poisson):
    """Likelihood of a count for each output, with mean μ = exp(f) and variance μ + μ²/r.

    Λ = μ r/(μ + r) is the Fisher information.

    Args:
        r: large values approach the Poisson distribution.
    """

    name = "negative_binomial"
    r: float | None = parameter(1.0)

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        return _negative_binomial(y.to(f), f.exp(), self.parameters["r"].to(f))

    def diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        r = self.parameters["r"].to(f)
        return r * torch.sigmoid(f - r.log())

    def moments(self, f: Tensor, variance: Tensor, sigma: Tensor) -> Moments:
        """Return the moments of y for a log-normal μ."""
        mean, noise, of_mean = super().moments(f, variance, sigma)
        return mean, noise + (mean.square() + of_mean) / self.parameters["r"].to(f), of_mean


@dataclass(frozen=True)
class StudentT(Diagonal):
    """Likelihood of a number for each output with outliers: Student's t around f.

    Λ = (ν + 1)/((ν + 3) s²) is the Fisher information; the Hessian is negative at outliers.

    `PriorLearner` learns s and ν. With Adam, s starts at 0.1, like the σ of "regression". A larger
    s has little curvature, so the first updates raise the weight decays, and the network fits less.
    ν starts at 30, almost a Gaussian. With heavy tails, targets that the network does not fit yet
    would count as outliers, and would have small gradients (`experiments.uci.likelihoods`). SGD's
    steps would be too large at such a small s. With SGD and optimisers that are not known, both
    start at their defaults 1 and 4.

    Args:
        df: ν > 2, degrees of freedom; large values approach a Gaussian.
        scale: s, in units of the targets.
    """

    name = "student_t"
    df: float | None = parameter(4.0, start=30.0, above=2.0)
    scale: float | None = parameter(1.0, start=0.1)

    def _noise(self, f: Tensor) -> Tensor:
        """Return the variance s²ν/(ν − 2) around f."""
        df, scale = self.parameters["df"].to(f), self.parameters["scale"].to(f)
        return (scale.square() * df / (df - 2)).expand_as(f)

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        return -self.log_density(y.to(f), f, self._noise(f))

    def diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        df, scale = self.parameters["df"].to(f), self.parameters["scale"].to(f)
        return ((df + 1) / ((df + 3) * scale.square())).expand_as(f)

    def step_scale(self) -> float:
        """Return 1/Λ, like the σ² of "regression"."""
        df, scale = self.parameters["df"].item(), self.parameters["scale"].item()
        return (df + 3) / (df + 1) * scale**2

    def moments(self, f: Tensor, variance: Tensor, sigma: Tensor) -> Moments:
        """Return the means f, s²ν/(ν − 2) and the outputs' variance."""
        return f, self._noise(f), variance

    def log_density(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        v = self.parameters["df"].to(mean)
        scale = (variance * (v - 2) / v).sqrt()
        return torch.distributions.StudentT(v, mean, scale, validate_args=False).log_prob(y)

    def cdf(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        with extra("statistics"):
            from scipy import stats

        df = float(self.parameters["df"])
        scale = (variance * (df - 2) / df).sqrt()
        return torch.as_tensor(stats.t.cdf((y - mean) / scale, df)).to(mean)


@dataclass(frozen=True)
class Weibull(Diagonal):
    """Likelihood of the time t > 0 until an event, with censored times.

    A censored event had not happened by time t. t has Weibull's distribution with shape k and scale
    exp(f): P(> t) = exp(−eᶻ), z = k (log t − f). So ℓ = eᶻ − d (z + log k) of log t, with d = 1 for
    an event and 0 if censored. Λ = k² eᶻ is the Hessian, which is positive. Targets are [t, d]: the
    last axis has the C times and then C ones or zeros. Predictions are of log t, in Gumbel's
    family.

    Args:
        shape: k; for k > 1 events become more frequent with time.
    """

    name = "weibull"
    needs_targets = True
    shape: float | None = parameter(1.0)

    def target_shape(self, f: Tensor) -> Sequence[int]:
        return *f.shape[:-1], 2 * f.shape[-1]

    def check(self, f: Tensor, y: Tensor, may_ignore: bool = False) -> None:
        super().check(f, y)
        t, d = y.chunk(2, -1)
        if not (t > 0).all() or not ((d == 0) | (d == 1)).all():
            raise ValueError(
                f"likelihood '{self}' needs targets (N, 2C): times above 0, then 1 (event) or 0 "
                f"(censored). The smallest time is {t.min():g}, and the marks are from {d.min():g} "
                f"to {d.max():g}."
            )

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """Return eᶻ − d (z + log k) of each output."""
        t, d = y.to(f).chunk(2, -1)
        k = self.parameters["shape"].to(f)
        z = k * (t.log() - f)
        return z.exp() - d * (z + k.log())

    def diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        t, _ = y.to(f).chunk(2, -1)
        k = self.parameters["shape"].to(f)
        return k.square() * (k * (t.log() - f)).exp()

    def moments(self, f: Tensor, variance: Tensor, sigma: Tensor) -> Moments:
        """Return moments of log t: f − γ/k with Euler's γ, π²/(6k²), and the outputs' variance."""
        k = self.parameters["shape"].to(f)
        return f - EULER / k, (math.pi**2 / 6 / k.square()).expand_as(f), variance

    def observed(self, y: Tensor, variance: Tensor) -> Observed:
        """Return log t, and the mask of censored times."""
        t, d = y.chunk(2, -1)
        return t.log(), variance, d == 0

    def log_density(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return Gumbel's log density z − eᶻ + log k of log t."""
        z, k = self._z(y, mean, variance)
        return z - z.exp() + k.log()

    def cdf(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return 1 − exp(−eᶻ) of log t."""
        return -torch.special.expm1(-self._z(y, mean, variance)[0].exp())

    def _z(self, y: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        k = math.pi / (6 * variance).sqrt()
        return k * (y - mean) - EULER, k


class Bernoulli(Diagonal):
    """Likelihood of yes or no for each output, p = s(f); targets in [0, 1].

    The loss is summed over outputs.
    """

    name = "bernoulli"
    kind = "binary"

    def check(self, f: Tensor, y: Tensor, may_ignore: bool = False) -> None:
        super().check(f, y)
        if not ((y >= 0) & (y <= 1)).all():
            raise ValueError(
                f"likelihood '{self}' needs targets in [0, 1], but they are from {y.min():g} to "
                f"{y.max():g}. For classes 0 to C - 1 use 'classification'."
            )

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """Return −y log p − (1 − y) log(1 − p) of each output."""
        return F.binary_cross_entropy_with_logits(f, y.to(f).expand_as(f), reduction="none")

    def diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(f) * torch.sigmoid(-f)

    def drawn_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the gradient p − ŷ with ŷ drawn from p."""
        p = torch.sigmoid(f)
        # Drawing from NaN may end the process on a GPU. The pass reports NaN when it reads its
        # checks.
        return p - torch.bernoulli(p.nan_to_num(), generator=generator)

    def log_probabilities(self, f: Tensor) -> Tensor:
        """Return the log probabilities of no, s(−f), and yes, s(f)."""
        return F.logsigmoid(torch.stack([-f, f], -1))


@dataclass(frozen=True)
class Weighted(Likelihood):
    """Another likelihood with a weight w for each example or loss term.

    The targets' last axis has the other likelihood's targets (a label is one number), and then w.
    Loss and Λ are multiplied by w. Predictions and metrics have no weights. The normaliser of a
    noise σ counts each term once, so with a σ the mean weight should be 1.

    Args:
        of: the other likelihood, or its text, as in "weighted(of='poisson')".
    """

    name = "weighted"
    of: Any

    def __post_init__(self) -> None:
        likelihood = likelihood_of(self.of)
        object.__setattr__(self, "of", likelihood)
        of_class = "kind", "has_sigma", "has_probit", "has_label_noise", "is_count", "num_vectors"
        of_predictions = "predicted", "log_probabilities", "moments", "log_density", "cdf"
        of_learning = "parameters", "lower_bounds", "to_learn", "step_scale"
        for name in (*of_class, *of_predictions, *of_learning):
            object.__setattr__(self, name, getattr(likelihood, name))

    @property
    def options(self) -> dict[str, Any]:
        return {"of": str(self.of)}

    def replace(self, **options: Any) -> Likelihood:
        return Weighted(self.of.replace(**options))

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "Weighted":
        return Weighted(self.of.with_parameters(parameters))

    def target_shape(self, f: Tensor) -> Sequence[int]:
        shape = self.of.target_shape(f)
        return (*shape, 2) if self.of.has_labels else (*shape[:-1], shape[-1] + 1)

    def check(self, f: Tensor, y: Tensor, may_ignore: bool = False) -> None:
        super().check(f, y)
        targets, w = self._parts(y)
        if not (w >= 0).all():
            raise ValueError(
                f"likelihood '{self}' needs weights of at least 0, not {w.min():g}. They are the "
                "last column of the targets."
            )
        if self.of.has_labels and not torch.equal(y[..., 0], targets.to(y)):
            raise ValueError(
                f"likelihood '{self}' needs whole numbers as labels. The targets are (N, 2): "
                "label, then weight."
            )
        self.of.check(f, targets)

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        targets, w = self._parts(y)
        return w.to(f) * self.of.losses(f, targets)

    def root(self, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        targets, w = self._parts(y)
        yield from (w.to(f).sqrt() * column for column in self.of.root(f, targets))

    def drawn_root(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        targets, w = self._parts(y)
        return w.to(f).sqrt() * self.of.drawn_root(f, targets, generator)

    def drawn_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        targets, w = self._parts(y)
        return w.to(f).sqrt() * self.of.drawn_gradient(f, targets, generator)

    def observed(self, y: Tensor, variance: Tensor) -> Observed:
        return self.of.observed(self._parts(y)[0], variance)

    def _parts(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Split targets into the other likelihood's targets and weights (*terms, 1)."""
        return y[..., 0].long() if self.of.has_labels else y[..., :-1], y[..., -1:]


def likelihood_of(likelihood: Likelihood | str) -> Likelihood:
    """Return the likelihood of a text such as "student_t(df=4)", or a likelihood itself.

    Raises:
        ValueError: an unknown name (the message lists the known ones), or options that the
            likelihood does not have.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    # The string itself, also for an enumeration such as laplace-torch's.
    text = likelihood[:] if isinstance(likelihood, str) else ""
    name, bracket, options = text.partition("(")
    if name not in Likelihood._by_name:
        names = ", ".join(map(repr, Likelihood._by_name))
        # An array would fill the screen.
        value = repr(likelihood) if text else f"a {type(likelihood).__name__}"
        raise ValueError(f"likelihood={value} is not supported; choose one of {names}.")
    of_class = Likelihood._by_name[name]
    try:
        return of_class(**_keywords(options) if bracket else {})
    # The parser raises the last two for thousands of nested brackets.
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError) as error:
        options = ", ".join(option.name for option in fields(of_class))
        way_out = f"write {name}(option=value), with options {options}"
        reason = getattr(error, "msg", str(error)) or type(error).__name__
        raise ValueError(
            f"likelihood={text!r:.200} is not understood ({reason}); "
            f"{way_out if options else f'{name!r} has no options'}."
        ) from error


def loss_sum(f: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """Return Σ ℓ over all examples and terms that count, a scalar (nats), at least in float32."""
    return likelihood.loss(at_least_float32(f), y)


def counted_terms(y: Any, likelihood: Likelihood) -> Tensor | None:
    """Return a mask of the labels that count; None for other targets, which all count."""
    return y != IGNORED if likelihood.has_labels and isinstance(y, Tensor) else None


def num_counted_terms(
    f: Float[Tensor, "*terms C"], y: Tensor, likelihood: Likelihood
) -> int | Int[Tensor, ""]:
    """Return the number of loss terms that count; for labels it stays on their device."""
    counted = counted_terms(y, likelihood)
    return f.shape[:-1].numel() if counted is None else counted.sum()


def check_targets(
    f: object, y: object, likelihood: Likelihood, *, may_ignore: bool = False
) -> None:
    """Raise an error unless the targets y fit the outputs f.

    With ``may_ignore`` labels may be `IGNORED`; otherwise that label is out of range.

    Raises:
        TypeError: outputs or targets of a wrong type or dtype.
        ValueError: a wrong shape, a label out of range, targets that are not finite.
    """
    if not isinstance(f, Tensor) or not isinstance(y, Tensor):
        raise TypeError(
            f"The model returned {type(f).__name__} and the targets are {type(y).__name__}, but "
            "both must be tensors. Wrap a model that returns another object, so that it returns "
            "logits."
        )
    if f.dim() < 2:
        raise ValueError(
            f"The model's output has shape {tuple(f.shape)}, but (N, ..., C) is needed. One output "
            "per example is (N, 1): omit squeeze(-1)."
        )
    likelihood.check(f, y, may_ignore)


def _keywords(text: str) -> dict[str, Any]:
    """Return the keywords of a call from the text after its opening bracket, ignoring nothing.

    Raises:
        SyntaxError: the text is no Python.
        ValueError: it is more than the keywords of one call, or a value is no literal.
    """
    line = "f(" + text.replace("\r", " ").replace("\n", " ").rstrip()
    call = ast.parse(line, mode="eval").body
    # On one line a comment, which Python drops, can only stand after the call's end.
    is_whole = call.end_col_offset == len(line.encode())
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or not is_whole:
        raise ValueError("there is text after the closing bracket")
    names = [keyword.arg for keyword in call.keywords]
    if call.args or None in names:
        raise ValueError("an option is given without its name")
    if len(set(names)) < len(names):
        raise ValueError("an option is given twice")
    try:
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        raise ValueError("a value is not a number, a text or a list of them") from None
    if without := [name for name, value in values.items() if value is None]:
        raise ValueError(f"{without[0]} is None; omit it for its default, or to learn it")
    return values


def _plain(value: Any) -> Any:
    """Return an option with plain numbers and tuples instead of arrays, tensors and lists."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _finite(value: Any, is_list: bool = False) -> Tensor | None:
    """Return a finite number, or a non-empty list of them, in float64; None for other values."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return None
    is_right = numbers.dim() == is_list and numbers.numel() and not isinstance(value, bool)
    return numbers if is_right and numbers.isfinite().all() else None


def with_label_noise(log_p: Tensor, noise: Tensor, num_classes: int) -> Tensor:
    """Return log((1 − ε) p + ε/C) from log probabilities of C classes, without underflow."""
    if not noise.requires_grad and not noise:
        return log_p
    noise = noise + torch.finfo(noise.dtype).tiny  # the logarithm of 0 has no derivative
    return torch.logaddexp(log_p + torch.log1p(-noise), noise.log() - math.log(num_classes))


def _negative_binomial(y: Tensor, mean: Tensor, r: Tensor) -> Tensor:
    """Return −log p(y) of counts with this mean and variance mean + mean²/r (nats)."""
    # In float64: for large r, close to Poisson, it is a difference of terms like r log r.
    of_y, of_r = y.double(), r.double()
    constant = torch.lgamma(of_y + 1) + torch.lgamma(of_r) - torch.lgamma(of_y + of_r)
    return constant.to(mean) + r * torch.log1p(mean / r) + torch.xlogy(y, (r + mean) / mean)


def _random_signs(f: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return −1 or 1 for each output, in int8."""
    bits = torch.randint(2, f.shape, generator=generator, dtype=torch.int8, device=f.device)
    return bits.mul_(2).sub_(1)


def _drawn(p: Float[Tensor, "M C"], generator: torch.Generator | None) -> Int[Tensor, "M 1"]:
    """Return a label for each row, drawn by inverting the distribution function.

    This takes one random number for each label, whereas `torch.multinomial` draws one for each
    class: 4,096 rows of 256 classes take 3 instead of 22 ms (one x86-64 core).
    """
    # Some rows at a time, because the cumulative sums in float64 take twice the memory of the
    # outputs.
    rows = max(1, LARGEST_DRAW // p.shape[1])
    draw = _drawn_of_few if p.shape[1] < MANY_CLASSES else _drawn_of_many
    return torch.cat([draw(some, generator) for some in p.split(rows)])


def _drawn_of_few(p: Float[Tensor, "M C"], generator: torch.Generator | None) -> Int[Tensor, "M 1"]:
    # A share of the last sum, which differs from 1 by rounding: a point beyond it has no label.
    up_to = p.cumsum(1, dtype=torch.float64)
    point = _share_of(up_to[:, -1:], generator)
    return torch.searchsorted(up_to, point, right=True).clamp_(max=p.shape[1] - 1)


def _share_of(
    total: Float[Tensor, "M 1"], generator: torch.Generator | None
) -> Float[Tensor, "M 1"]:
    """Return each total times a random number from [0, 1)."""
    return total * torch.rand(
        total.shape, generator=generator, dtype=total.dtype, device=total.device
    )


def _drawn_of_many(
    p: Float[Tensor, "M C"], generator: torch.Generator | None
) -> Int[Tensor, "M 1"]:
    """Draw like `_drawn_of_few`, but first a block of classes, and then a class of this block.

    This avoids cumulative sums over all classes.
    """
    C, size = p.shape[1], CLASSES_OF_BLOCK
    whole = C - C % size
    # Step 1: draw the block from the sums of all blocks; the last one may be shorter. In float64,
    # because differences of a float32 sum are wrong by a percent at p = 1e-5.
    blocks = p[:, :whole].unflatten(1, (-1, size)).sum(2, dtype=torch.float64)
    rest = p[:, whole:].sum(1, keepdim=True, dtype=torch.float64)
    sums = torch.cat([blocks, rest], 1)
    up_to = sums.cumsum(1)
    point = _share_of(up_to[:, -1:], generator)
    block = torch.searchsorted(up_to, point, right=True).clamp_(max=sums.shape[1] - 1)
    point -= up_to.gather(1, block) - sums.gather(1, block)
    # Step 2: draw the class within the block, with the rest of the random point.
    classes = block * size + torch.arange(size, device=p.device)  # (M, size)
    inside = p.gather(1, classes.clamp(max=C - 1)).masked_fill_(classes >= C, 0.0)
    place = torch.searchsorted(inside.cumsum(1, dtype=torch.float64), point, right=True)
    return (block * size + place.clamp_(max=size - 1)).clamp_(max=C - 1)
