"""Suspicious labels: compare each training label with the predictions during the training.

A network learns most labels before it learns single wrong labels. With a learned weight decay it
may never learn them. The mean p̄_n over epochs of the softmax p(·|x_n), which the training steps
compute anyway, therefore disagrees with a wrong label. The score is the surprise of the label,
divided by the expected surprise under p̄_n, the entropy:

    s_n = −log p̄_n,y_n / −Σ_c p̄_nc log p̄_nc

Without the denominator, right labels of hard examples would have higher scores than wrong labels of
easy examples.

With two classes, s_n only tells whether the prediction is the other class (s_n > 1). The score is
then −log p̄_y / log 2, which sorts labels by their probability of being wrong.
`SuspiciousLabels.number` then counts the contradicted labels beyond chance. Labels drawn from p̄
contradict the prediction Σ_n q_n times on average, with q_n = min(p̄_n, 1 − p̄_n) and the variance
Σ_n q_n (1 − q_n).

If calibration finds a share ε of random labels from C classes, each label also has a probability of
being wrong. For labels that were not used for training it is (ε/C)(1 − p̄_y)/((1 − ε) p̄_y + ε/C).
The odds are κ (1 − p̄_y)/p̄_y with κ = (ε/C)/(1 − ε + ε/C). Training increases the probabilities of
all training labels, including wrong labels. κ is therefore chosen so that the expected number of
wrong labels is N ε (C − 1)/C, as for the held-out labels. Held-out labels thus determine the number
of wrong labels, and the training determines which labels are wrong.

Sources: Pleiss et al. 2020 (arXiv:2001.10528) average margins of logits over epochs. Swayamdipta et
al. 2020 (arXiv:2009.10795) average probabilities. We chose the quotient in our own study.
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
"""Number of standard deviations by which the count of contradicted labels of two classes may exceed
its mean by chance."""
LARGEST_RECORD = 2**26
"""Maximum number of stored entries of p̄: 512 MiB in memory and in each checkpoint."""


@dataclass(frozen=True)
class SuspiciousLabels:
    """Examples with known predictions, the most suspicious first. Tensors have the shape (M,)."""

    index: Int64[Tensor, " M"]
    """Indices in the training data."""
    label: Int64[Tensor, " M"]
    """The given labels."""
    predicted: Int64[Tensor, " M"]
    """The most probable classes in the mean over epochs."""
    score: Float[Tensor, " M"]
    """Surprise of the label, divided by the expected surprise, or with two classes by log 2. It is
    at most 1 if the network agrees with the label. With more classes it is 1 on average for labels
    drawn from p̄."""
    wrong: Float[Tensor, " M"] | None = None
    """Probability that the label is wrong; None if ε is unknown or 0."""
    number: int = 0
    """Number of suspicious labels, which come first.

    With more than two classes, it is the number of labels with a score above 1. With two classes,
    it is the expected number of wrong labels, Σ ``wrong``, or if ε is unknown, the number of
    contradicted labels beyond chance. If the network predicts most labels well, nearly all
    suspicious labels are wrong. The others are hard examples, for which the network is confident
    but wrong.
    """
    self_influence: Float[Tensor, " M"] | None = None
    """The change of the example's own loss if it is left out, in nats, see
    `marglik.self_influence`; None if it was not given. It does not affect the order."""

    @property
    def agreement(self) -> float:
        """Share of the labels that are the most probable class in the mean over epochs."""
        return (self.predicted == self.label).double().mean().item()


def suspicious_labels(
    labels: Tensor | ArrayLike,
    probabilities: Tensor | ArrayLike,
    label_noise: float | None = None,
    output_temperature: float = 1.0,
    self_influence: Tensor | ArrayLike | None = None,
) -> SuspiciousLabels:
    """Return the training examples, sorted by how suspicious their labels are.

    Use it on ``OnlineResult.training_probabilities.mean()``, or on probabilities of your own
    training loop: the softmax of each example's outputs at each step, or of networks that were
    trained on other folds.

    Args:
        labels: the given labels, (N,), a tensor or an array.
        probabilities: class probabilities (N, C), or (epochs, N, C), which are averaged over
            epochs. Examples with NaN (never used) are omitted.
        label_noise: ε, to compute ``wrong``: the ``label_noise`` of a calibration, or the ``noise``
            of likelihood "noisy_classification". The probabilities ``wrong`` sum to N ε (C − 1)/C.
            With 0 or None they are not computed.
        output_temperature: τ of the calibration. ``wrong`` uses p̄^(1/τ), normalised.
        self_influence: the result of `marglik.self_influence` for the same examples, (N,). It
            becomes a field in the same order.

    Raises:
        ValueError: shapes do not fit, labels are not classes, or probabilities are invalid.
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
    of_self = None if self_influence is None else torch.as_tensor(self_influence).to(p.device)
    if of_self is not None and of_self.shape != labels.shape:
        raise ValueError(
            f"self_influence has shape {tuple(of_self.shape)}, but there are {len(labels)} labels. "
            "Pass one value for each label, in the same order."
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
        odds = -own.logit(1e-12)  # log odds of another class
        wrong = _with_mean(odds, label_noise * (1 - 1 / p.shape[1]))[order]
    if is_binary and wrong is not None:
        number = min(number, round(wrong.sum().item()))
    elif is_binary:
        q = p.amin(1)  # the probability that a draw from p̄ contradicts the prediction
        chance = q.sum() + DEVIATIONS * (q * (1 - q)).sum().sqrt()
        number = max(0, number - math.ceil(chance.item()))
    of_order = index[order], label[order], p.argmax(1)[order], score[order]
    of_self = None if of_self is None else of_self[index[order]]
    return SuspiciousLabels(*of_order, wrong, number, of_self)


def _with_mean(odds: Float[Tensor, " M"], mean: float) -> Float[Tensor, " M"]:
    """Return probabilities with log odds ``odds`` + log κ, for the κ that gives this mean."""
    low, high = -60.0, 60.0  # bounds of log κ; bisect down to the resolution of float64
    for _ in range(60):
        middle = (low + high) / 2
        if (odds + middle).sigmoid().mean() < mean:
            low = middle
        else:
            high = middle
    return (odds + low).sigmoid()


class TrainingProbabilities:
    """Mean p̄ of each training example, accumulated from the outputs of the training steps.

    The order of the examples is random, so batches need indices. `marglik.data.Batches` and the
    sampler of a DataLoader have them. If the indices are unknown, nothing is stored, and `mean`
    raises an error with the reason.

    Args:
        loader: the training batches.
        likelihood: likelihood of the targets; "classification" and "noisy_classification" are
            supported.
        ranks: the ranks that each have a part of the data.
    """

    def __init__(self, loader: Iterable[Any], likelihood: Likelihood, ranks: Ranks) -> None:
        self._loader: Any = loader
        self._ranks = ranks
        self.unknown: str = _why_unknown(loader, likelihood, ranks)
        """Reason why nothing is stored; empty otherwise."""
        # (N, C + 1) of finished epochs, on all ranks: Σ p over visits, then the number of visits.
        self._sums: Tensor | None = None
        # Indices and outputs of this rank's steps in the current epoch.
        self._steps: list[tuple[Tensor, Tensor]] = []

    def mean(self) -> Tensor:
        """Return p̄, (N, C) in the order of the data set; NaN for examples that were never used.

        Raises:
            ValueError: the indices of the loader's examples are unknown, or the likelihood or the
                targets are not supported.
        """
        if self.unknown or self._sums is None:
            why = self.unknown or "no epoch has ended. Call run() first"
            raise ValueError(f"Suspicious labels are not available: {why}.")
        return self._sums[:, :-1] / self._sums[:, -1:]

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[tuple[Tensor | None, Any]]:
        """Yield one epoch of (indices, batch); indices are None if they are unknown."""
        loader, self._steps = self._loader, []
        if self.unknown:
            return ((None, batch) for batch in loader)
        if isinstance(loader, Batches):
            batches = iter(loader)  # draws the order
            return zip(loader.order, batches, strict=True)
        # A DataLoader yields batches in the order of its sampler, although workers read ahead. The
        # copy shares everything except the sampler, so it draws the same random numbers.
        noting, keys_of_batches = copy(loader), deque()

        def noted() -> Iterator[Any]:
            for keys in loader.batch_sampler:
                keys_of_batches.append(keys)
                yield keys

        noting.__dict__["batch_sampler"] = noted()
        return ((self._indices(keys_of_batches.popleft()), batch) for batch in noting)

    def _indices(self, keys: Any) -> Tensor | None:
        """Return a sampler's batch as indices (B,), or None if its keys are not indices."""
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
            # Sum once per epoch, because steps must be fast. Copy, because outputs may be views.
            self._steps.append((indices, f.detach().clone()))

    def end_epoch(self) -> None:
        """Add the sums of this epoch to the sums of earlier epochs; collective."""
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
        """Return the state between epochs, which is the same on all ranks."""
        return {"sums": self._sums, "unknown": self.unknown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`."""
        self._sums, self.unknown = state["sums"], state["unknown"]


def _why_unknown(loader: Any, likelihood: Likelihood, ranks: Ranks) -> str:
    """Return the reason why indices or labels are unavailable, or an empty string."""
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
