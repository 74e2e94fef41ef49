"""Suspicious labels: what the network predicted for each training example while it was trained.

A network learns what most labels say before it learns single wrong ones, and under a learned weight
decay it may never learn these. So p̄_n, the mean over epochs of the softmax p(·|x_n) that the
training steps compute anyway, disagrees with a wrong label. The score is the surprise that the
label is, over the surprise that p̄_n itself expects, the entropy:

    s_n = −log p̄_n,y_n / −Σ_c p̄_nc log p̄_nc

Without the denominator, honest labels of hard examples come before wrong labels of easy ones.

Of two classes this is above 1 wherever the prediction is the other class, and says no more. There
the score is −log p̄_y / log 2, in the order of the label's probability of being wrong, and
`SuspiciousLabels.number` counts the labels beyond chance: labels drawn from p̄ contradict the
prediction Σ_n q_n times on average, q_n = min(p̄_n, 1 − p̄_n), with the variance Σ_n q_n (1 − q_n).

With a share ε of labels that were drawn at random from C classes, as calibration finds it, each
label also has a probability of being wrong. Of labels that p̄ has not seen it is (ε/C)(1 − p̄_y)/
((1 − ε) p̄_y + ε/C), odds of κ (1 − p̄_y)/p̄_y with κ = (ε/C)/(1 − ε + ε/C). Training has seen them,
also the wrong ones, and made each more probable than it was. So κ is the one with which as many
labels are expected to be wrong as held-out labels say, N ε (C − 1)/C: held-out labels say how many
are wrong, and the training which.
Sources: Pleiss et al. 2020 (arXiv:2001.10528) average margins of logits over epochs, Swayamdipta et
al. 2020 (arXiv:2009.10795) probabilities; the quotient was chosen by our own study.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Float, Int64
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from kfac_backend.likelihoods import Likelihood
from kfac_backend.precision import at_least_float32
from kfac_backend.ranks import Ranks
from marglik.data.batches import Batches

DEVIATIONS = 2.0
"""Standard deviations by which contradicted labels of two classes exceed their mean by chance."""
LARGEST_RECORD = 2**26
"""Most numbers p̄ that a run keeps: 512 MiB, and as much in each checkpoint."""


@dataclass(frozen=True)
class SuspiciousLabels:
    """All examples whose label could be judged, the most suspicious first; each field (M,)."""

    index: Int64[Tensor, " M"]
    """Positions in the training data."""
    label: Int64[Tensor, " M"]
    """The labels that were given."""
    predicted: Int64[Tensor, " M"]
    """The classes that the network preferred in the mean over epochs."""
    score: Float[Tensor, " M"]
    """The label's surprise, over what the network expects, of two classes over log 2: at most 1
    where the network agrees with the label. Of more classes 1 on average for draws from p̄."""
    wrong: Float[Tensor, " M"] | None = None
    """The probability that the label is wrong; None if ε is not known, or 0."""
    number: int = 0
    """How many of the first to look at: labels that the network contradicts, and not for doubt.

    Of more than two classes those with a score above 1. Of two classes the expected number of wrong
    labels, Σ ``wrong``; where ε is not known, the contradicted labels beyond what chance explains.
    Of a network that predicts most labels well, nearly all of them are wrong. Others are hard
    examples, of which it is wrongly sure."""

    @property
    def agreement(self) -> float:
        """Share of the labels that the network predicts in the mean over epochs."""
        return (self.predicted == self.label).double().mean().item()


def suspicious_labels(
    labels: Tensor | ArrayLike,
    probabilities: Tensor | ArrayLike,
    label_noise: float | None = None,
    output_temperature: float = 1.0,
) -> SuspiciousLabels:
    """The training examples in the order in which their labels should be looked at.

    Use it on ``OnlineResult.training_probabilities.mean()``, or on probabilities that a loop of
    your own keeps: the softmax of each example's outputs at each step, or of networks that were
    trained on other folds.

    Args:
        labels: the given labels, (N,), a tensor or an array.
        probabilities: of the classes, (N, C), or (epochs, N, C), of which the mean is taken.
            Examples with NaN (never seen) are left out.
        label_noise: ε, for each label's probability of being wrong: the ``label_noise`` of a
            calibration, or the ``noise`` of likelihood "noisy_classification". The probabilities
            add up to N ε (C − 1)/C; of 0, as of None, there are none.
        output_temperature: τ of that calibration: these probabilities are of p̄^(1/τ), normalised.

    Raises:
        ValueError: shapes that do not fit, labels that are no classes, or no probabilities.
    """
    labels, probabilities = torch.as_tensor(labels), torch.as_tensor(probabilities)
    p = probabilities.detach().double()
    p = p.mean(0) if p.dim() == 3 else p
    if p.dim() != 2 or labels.shape != p.shape[:1]:
        raise ValueError(
            f"Labels have shape {tuple(labels.shape)} and probabilities "
            f"{tuple(probabilities.shape)}. Pass labels (N,), and probabilities (N, C) or (epochs, "
            "N, C)."
        )
    index = (~p.isnan().any(1)).nonzero().flatten()
    p, label = p[index], labels.to(p.device)[index].long()
    if len(label) and not 0 <= int(label.min()) <= int(label.max()) < p.shape[1]:
        raise ValueError(
            f"Labels range from {int(label.min())} to {int(label.max())}, but there are "
            f"probabilities of {p.shape[1]} classes. Pass labels in 0..{p.shape[1] - 1}."
        )
    tolerance = max(1e-3, 4 * torch.finfo(probabilities.dtype).eps)
    if not ((p >= 0).all() and ((p.sum(1) - 1).abs() < tolerance).all()):
        raise ValueError(
            "The probabilities of some examples are negative or do not sum to 1. Pass the softmax "
            "of the network's outputs."
        )
    log_p = p.clamp_min(1e-12).log()  # (M, C)
    surprise = -log_p.gather(1, label[:, None]).squeeze(1)
    is_binary = p.shape[1] == 2
    expected = surprise.new_tensor(math.log(2)) if is_binary else -(p * log_p).sum(1)
    score = surprise / expected.clamp_min(1e-12)
    order = score.argsort(descending=True, stable=True)
    wrong, number = None, int((score > 1).sum())
    if label_noise:
        own = (log_p / output_temperature).softmax(1).gather(1, label[:, None]).squeeze(1)
        odds = -own.logit(1e-12)  # of another class, in logarithms
        wrong = _with_mean(odds, label_noise * (1 - 1 / p.shape[1]))[order]
    if is_binary and wrong is not None:
        number = min(number, round(wrong.sum().item()))
    elif is_binary:
        q = p.amin(1)  # the probability that a draw from p̄ contradicts the prediction
        chance = q.sum() + DEVIATIONS * (q * (1 - q)).sum().sqrt()
        number = max(0, number - math.ceil(chance.item()))
    of_order = index[order], label[order], p.argmax(1)[order], score[order]
    return SuspiciousLabels(*of_order, wrong, number)


def _with_mean(odds: Float[Tensor, " M"], mean: float) -> Float[Tensor, " M"]:
    """Probabilities whose log odds are these and one number, log κ, with the mean that is given."""
    low, high = -60.0, 60.0  # bounds of log κ; it halves until float64 has no number between
    for _ in range(60):
        middle = (low + high) / 2
        if (odds + middle).sigmoid().mean() < mean:
            low = middle
        else:
            high = middle
    return (odds + low).sigmoid()


class TrainingProbabilities:
    """p̄ of each training example, added up from the outputs of the training steps.

    Steps see examples in random order, so batches must come with indices: those of `Batches`
    (marglik's own data), and of DataLoaders, whose sampler is asked on the way. Where they cannot
    be known, nothing is kept, and `mean` says why.

    Args:
        loader: the training batches.
        likelihood: of the targets; "classification" is supported.
        ranks: the ranks that each have a part of the data.
    """

    def __init__(self, loader: Iterable[Any], likelihood: Likelihood, ranks: Ranks) -> None:
        self._loader: Any = loader
        self._ranks = ranks
        self.unknown: str = _why_unknown(loader, likelihood, ranks)
        """Why nothing is kept; empty if all is well."""
        # (N, C + 1), Σ p over visits, then their number: of epochs that ended, on all ranks, ...
        self._sums: Tensor | None = None
        # ... and the indices and outputs of this rank's steps in the present epoch.
        self._steps: list[tuple[Tensor, Tensor]] = []

    def mean(self) -> Tensor:
        """p̄, (N, C) in the order of the data set; NaN for examples that were never seen.

        Raises:
            ValueError: the loader does not tell which examples it yields, or the likelihood or the
                targets are not supported.
        """
        if self.unknown or self._sums is None:
            why = self.unknown or "there was no epoch"
            raise ValueError(f"Suspicious labels are not available: {why}.")
        return self._sums[:, :-1] / self._sums[:, -1:]

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[tuple[Tensor | None, Any]]:
        """One epoch of (indices, batch); indices are None if they are not known."""
        loader, self._steps = self._loader, []
        if self.unknown:
            return ((None, batch) for batch in loader)
        if isinstance(loader, Batches):
            batches = iter(loader)  # draws the order
            return zip(loader.order, batches, strict=True)
        # A DataLoader yields batches in the order of its sampler, though workers read ahead. The
        # copy shares all but the sampler with it, and so draws the same random numbers.
        noting, keys_of_batches = copy(loader), deque()

        def noted() -> Iterator[Any]:
            for keys in loader.batch_sampler:
                keys_of_batches.append(keys)
                yield keys

        noting.__dict__["batch_sampler"] = noted()
        return ((self._indices(keys_of_batches.popleft()), batch) for batch in noting)

    def _indices(self, keys: Any) -> Tensor | None:
        """A sampler's batch as indices (B,); None, and nothing is kept, if it has other keys."""
        size = len(self._loader.dataset)
        if all(isinstance(key, Integral) and 0 <= int(key) < size for key in keys):
            return torch.tensor([int(key) for key in keys])
        self.unknown = "the sampler yields keys other than 0..N - 1"
        return None

    def add(self, indices: Tensor | None, f: Tensor) -> None:
        """Add the outputs (B, C) of a step."""
        if self.unknown or indices is None:
            return
        if f.dim() != 2:
            self.unknown = "examples with several labels are not supported"
        elif len(indices) != len(f):
            self.unknown = (
                f"the loader's collate_fn returned {len(f)} examples for {len(indices)} indices"
            )
        elif len(self._loader.dataset) * (f.shape[1] + 1) > LARGEST_RECORD:
            self.unknown = (
                f"the number of examples times classes exceeds {LARGEST_RECORD:,}, which takes too "
                "much memory"
            )
        else:
            # Added up once: steps shall be quick. Copies, as outputs may be views of more.
            self._steps.append((indices, f.detach().clone()))

    def end_epoch(self) -> None:
        """Add the epoch's sums to those of the earlier ones; collective."""
        if self._ranks.size > 1:
            whys = self._ranks.gather(self.unknown)
            self.unknown = next(filter(None, whys), "")
        if not self.unknown and self._steps:
            indices, outputs = map(torch.cat, zip(*self._steps, strict=True))
            p = at_least_float32(outputs).softmax(-1)
            visits = torch.cat([p, torch.ones_like(p[:, :1])], 1)
            epoch = visits.new_zeros(len(self._loader.dataset), visits.shape[1])
            epoch.index_add_(0, indices.to(p.device), visits)
            self._ranks.sum_([epoch])
            self._sums = epoch if self._sums is None else self._sums + epoch
        self._steps = []

    def state_dict(self) -> dict[str, Any]:
        """What is kept between epochs, the same on all ranks."""
        return {"sums": self._sums, "unknown": self.unknown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._sums, self.unknown = state["sums"], state["unknown"]


def _why_unknown(loader: Any, likelihood: Likelihood, ranks: Ranks) -> str:
    """Why the examples of batches, or suspicious labels, are not known; empty if they are."""
    if likelihood.name not in ("classification", "noisy_classification"):
        return f"the likelihood is {likelihood}, but only classification is supported"
    if isinstance(loader, Batches):
        return ""
    if (
        not isinstance(loader, DataLoader)
        or type(loader).__iter__ is not DataLoader.__iter__
        or loader.batch_sampler is None
        or not hasattr(loader.dataset, "__len__")
        or loader.persistent_workers
        or not getattr(loader, "in_order", True)
    ):
        return (
            f"the indices of the examples of this {type(loader).__name__} are unknown; train with "
            "a DataLoader over a data set with a length, in order and without persistent_workers"
        )
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    if ranks.size > 1 and not any(isinstance(one, DistributedSampler) for one in samplers):
        return "on several ranks, the indices are known only with a DistributedSampler"
    return ""
