"""All options of the learner: `LearnerOptions`, with a `Schedule`, a `DecayPolicy` and a curvature.

The schedule decides when the prior is updated, and which parameters the training returns. Learning
converges if the network can follow changes of the weight decays. This needs a learning rate that
stays high, and bounded updates during the whole training. The average of the parameters removes the
noise of the high rate. If the rate falls to zero early, the network stops before its weight decays
have converged, and an average cannot correct this.

With `DecayPolicy.off()`, no average and ``curvature_from="pass"`` the learner is exactly algorithm
1 of Immer et al. 2021 (arXiv:2104.04975).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any, Literal, Self

from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.optimizer.loss_check import MeanOver
from kfac_backend.options import CurvatureOptions, check_option, check_positive
from marglik.posterior.jacobian_ggn import Structure
from marglik.posterior.posterior import check_structure
from marglik.posterior.prior import PriorStructure, UpdateMethod

Keep = Literal["best", "last"]
Average = Literal["last"]
"""The average of the parameters over all steps, with the largest weights on late steps; see
`marglik.training.average`."""
CurvatureFrom = Literal["auto", "pass"]
"""The data of an update's curvature pass. "auto" uses a sample, with random signs if exact passes
would take longer than the training; see `marglik.training.samples`."""
LateFit = Literal["warn", "hold"]

WEIGHT_DECAY = 5e-4
"""The initial weight decay of all groups."""
LATE_SHARE = 1 / 3
"""Share of the epochs, at the end of the training, in which label noise is learned."""


@dataclass(frozen=True)
class Schedule:
    """Schedule of the prior's updates, and choice of the final parameters.

    If ``every`` is None and the number of epochs is unknown or exceeded, each of the first epochs
    ends with an update. Later the interval is between 1/``updates`` and 2/``updates`` of the epochs
    so far, and a change of the learning rate also causes an update.

    Args:
        epochs: number of passes over the training data; None if it is not known.
        every: number of epochs between updates. None (null) spreads 20 updates over the epochs.
        burn_in: number of the first epoch that may end with an update. Epochs are counted from 1,
            so 0 and 1 have the same effect.
        steps: number of hyperparameter steps in each update. The number bounds the change in one
            update: 10 steps of Adam with step size 0.1 on log δ change a weight decay by at most a
            factor of e.
        keep: network to return. "last" returns the final network, and updates its weight decays
            once more after the last epoch. "best" returns the parameters of the update with the
            highest evidence, like laplace-torch. This may be an early update, because the evidence
            can be high before the network fits the data.
        updates: number of updates if ``every`` is None, at most one per epoch, without the final
            one. 0 keeps the initial weight decays and fits no posterior.
        average: parameters of the network to return. "last" averages the parameters over the steps,
            with the largest weights on late steps. None (null) takes the parameters of the last
            step. There is no average with keep="best". There is also no average if an epoch is a
            single step, because a full batch has no noise.

    Raises:
        ValueError: a number is too small, or an option is not supported.
    """

    epochs: int | None = 100
    every: int | None = None
    burn_in: int = 0
    steps: int = 10
    keep: Keep = "last"
    updates: int = 20
    average: Average | None = "last"

    def __post_init__(self) -> None:
        least_values = {"epochs": 1, "every": 1, "burn_in": 0, "steps": 0, "updates": 0}
        for name, least in least_values.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}.")
        check_option("keep", self.keep, Keep)
        if self.average is not None:
            check_option("average", self.average, Average)

    def is_due(self, epoch: int) -> bool:
        """Return whether an update follows this epoch, from 1, not counting the final update."""
        if epoch < self.burn_in or not self.updates:
            return False
        if self.every is not None:
            return epoch % self.every == 0
        if self.epochs is not None and epoch <= self.epochs:
            # The k-th update follows the first epoch that reaches the share k/U of all.
            passed, then = (e * self.updates // self.epochs for e in (epoch, epoch - 1))
            return passed > then
        spacing = 1 << max(0, (2 * epoch // self.updates).bit_length() - 1)
        return epoch % spacing == 0

    def is_due_within(self, epoch: int) -> bool:
        """Return whether an update follows this epoch, and it is not the last one."""
        return self.is_due(epoch) and epoch != self.epochs

    def is_late(self, epoch: int) -> bool:
        """Return whether this epoch, from 1, ends at the start of the last third or within it.

        If the number of epochs is unknown, epochs are late after as many as there are ``updates``.
        """
        if self.epochs is None:
            return epoch >= self.updates
        return epoch >= self.epochs - round(LATE_SHARE * self.epochs)

    @property
    def num_early(self) -> int:
        """Number of epochs before the first late one."""
        return next(epoch for epoch in count(1) if self.is_late(epoch)) - 1

    @property
    def averages(self) -> bool:
        """Whether the parameters are averaged if an epoch has several steps."""
        return self.average is not None and self.keep == "last"


@dataclass(frozen=True)
class DecayPolicy:
    """Rules of the weight decays beyond the evidence; None (null) or False turns a rule off.

    Args:
        invariant_limit: largest weight decay of scale-invariant weights during the training. A
            normalisation follows such a weight, so its norm does not affect the outputs. The rule
            finds these weights in the first ten steps: the gradient is orthogonal to the weight,
            alone or with its bias. A weight decay λ only turns the direction of the weight, by up
            to sqrt(2 η λ) in a step. The evidence does not include this effect, and raises δ as ‖w‖
            falls. Without the limit three of ten networks broke down after some updates, on clean
            labels. A limit of 1e-3 instead costs 0.2 nats after LayerNorm with wrong labels
            (`experiments.weight_decay.default_options`).
        raised_start: initial weight decay of a classifier's weights, if SGD trains them and they
            have the default 5e-4. The weight decays then decrease to their learned values instead
            of increasing to them. A high start keeps the network from fitting wrong labels early.
            Once it has fitted a label, the label has no curvature, and the evidence cannot
            distinguish right labels from wrong ones. Scale-invariant weights keep 5e-4. The rule
            limits the start, so that log ‖w‖ decreases by at most 0.5 before the first update. It
            lowers the NLL by 0.005 on average. The largest decrease is 0.035, and the largest
            increase is 0.007. With Adam it would raise the NLL of a transformer by 0.02
            (`experiments.weight_decay.default_options`).
        stability_limit: whether SGD's weight decays are limited to 1 / learning rate, at which a
            plain step sets the parameter to zero. Without the limit, the δ of a group that the data
            does not need grows without bound, and SGD diverges. Its step on the penalty overshoots
            if rate times weight decay exceeds 2 (1.36 with Nesterov's momentum of 0.9). A warning
            names the parameters.
        clip: largest norm of a step's gradient, including the prior's, relative to the running mean
            of this norm. A high, constant rate is close to instability, and a change of a weight
            decay sometimes makes a network unstable. Without the limit this causes a few large
            steps, from which the network may never recover.
        settles_noise: whether the last update sets a learned σ to its fixed point.
        rest: size of an update below which the learner skips the next one, because the weight
            decays have converged. After the second small update in a row it skips two, then four,
            and so on, until the weight decays change again. The size is the mean of |Δ log δ| over
            the groups, weighted by their effective parameters γ. An update is also small if it
            nearly cancels the update before it, as the noise of samples does. The rule applies only
            if ``updates`` determines the number of updates and they learn nothing else.
            The learner also skips an update if the weight decays hardly change any more, and its
            sample must be so large that too few steps have been made since the last one, see
            `samples.is_too_large`. None turns both off.
        late_fit: rule for a network that does not fit yet, because large weight decays keep it from
            fitting. From the second update on, the rule checks two conditions. At least half of the
            decrease of the training loss came in the second half of the epochs so far. The whole
            decrease (nats, a sum over the data) exceeds γ/2, by which γ parameters that fit only
            noise lower the loss. "warn" logs a warning at the first update in the second half of
            the epochs, if both hold. "hold" also lets no weight decay rise while both hold, and
            reverts a raised start. It lowers the NLL by 0.04 for convolutions with GroupNorm in
            batches of 128. It is not the default, because a network that fits late can also gain
            from high weight decays (`experiments.weight_decay.late_fit`).
        raise_limit: largest c of a common factor e^c on the decays of all weights, chosen by the
            held-out labels of a classifier; None for no such factor. At each update except the
            last, the rule evaluates the average of the parameters on the held-out data, with τ and
            ε fitted there. c rises by 0.5 if three conditions hold, and falls by a tenth otherwise.
            A third of the epochs has ended. The mean loss exceeds its best value so far by more
            than a standard error. The gradient shows that higher decays would lower the loss, by
            more than a standard error over ten parts of the data (`held_out`). The evidence
            alone cannot show this, because it is higher for a network that memorises wrong labels.
            The rule does nothing without held-out labels, with other likelihoods, with a
            ``hessian_structure`` other than "kron", and under ``fully_shard``. For
            convolutions on 4,000 images of CIFAR-10 with 40 % wrong labels, it lowers the NLL by
            0.14. On ten problems with 100 to 150 held-out labels, the NLL changes by −0.003 ± 0.001
            (`experiments.weight_decay.held_out_labels`).
        lowering: whether, at updates that do not raise c, the held-out gradient in log δ is added
            to the gradient of the evidence. Only its part towards lower decays is added, as far as
            ten parts of the held-out data agree. Large decays can keep a network from fitting.
            The rule lowers the NLL of a transformer trained by Adam by 0.1. It raises the NLL of
            convolutions on digits by 0.006 (`experiments.weight_decay.held_out_labels`).

    Raises:
        ValueError: a clip that is not above 1, a limit that is not above 0, or another
            ``late_fit``.
    """

    invariant_limit: float | None = 0.1
    raised_start: float | None = 1e-2
    stability_limit: bool = True
    clip: float | None = 2.0
    settles_noise: bool = True
    rest: float | None = 0.1
    late_fit: LateFit | None = "warn"
    raise_limit: float | None = 1.2
    lowering: bool = False

    def __post_init__(self) -> None:
        if self.raise_limit is not None and not self.raise_limit > 0:
            raise ValueError(
                f"raise_limit must be above 0, such as 1.2, or None for no factor, not "
                f"{self.raise_limit}."
            )
        if self.clip is not None and not self.clip > 1:
            raise ValueError(f"clip must be above 1, or None for no limit, not {self.clip}.")
        if self.late_fit is not None:
            check_option("late_fit", self.late_fit, LateFit)

    @classmethod
    def off(cls) -> Self:
        """Return a policy without rules: only the evidence determines the weight decays."""
        return cls(None, None, False, None, False, None, None, None, False)


@dataclass(frozen=True)
class LearnerOptions:
    """Options of the learner.

    Args:
        likelihood: likelihood of the loss.
        curvature: all options of the curvature pass.
        schedule: schedule of the updates, and choice of the average.
        policy: rules that go beyond the evidence.
        weight_decay: initial weight decay of all groups.
        structure: the groups of parameters that share a weight decay, see `PriorGroups.from_model`.
        method: "adam" or "mackay".
        lr: Adam's step size on the logarithm of the precision.
        temperature: T; the likelihood is raised to the power 1/T.
        sigma_noise: fixed σ of regression. None learns it, starting from 0.1, or fixes it at 1 if
            nothing is learned, as with updates=0.
        learn_sigma_noise: True learns σ, starting from ``sigma_noise``; False fixes it, at 1 if
            ``sigma_noise`` is None.
        loss_mean_over: "examples" if the loss is a mean over examples, as for a classifier; "terms"
            if it is a mean over all loss terms, as for a language model.
        loss_scale: factor between the loss of an example, or of a term, and −log p(y|f) at σ = 1.
            For ``F.mse_loss`` of C outputs it is 2/C, because −log p is ½‖y − f‖².
        curvature_from: "pass" uses all data in each update, with the options of ``curvature``;
            "auto" may use a sample and random signs, see `marglik.training.samples`.
        hessian_structure: structure of the curvature: "kron", or, from Jacobians, "full", "diag" or
            "lowrank", as for `Posterior`, by passes over all data with the options of
            ``curvature``.

    Raises:
        ValueError: a value is not supported.
    """

    likelihood: Likelihood
    curvature: CurvatureOptions
    schedule: Schedule
    policy: DecayPolicy
    weight_decay: float = WEIGHT_DECAY
    structure: PriorStructure | Mapping[str, str] = "per_tensor"
    method: UpdateMethod = "adam"
    lr: float = 0.1
    temperature: float = 1.0
    sigma_noise: float | None = None
    learn_sigma_noise: bool | None = None
    loss_mean_over: MeanOver = "examples"
    loss_scale: float = 1.0
    curvature_from: CurvatureFrom = "auto"
    hessian_structure: Structure = "kron"

    def __post_init__(self) -> None:
        self.curvature.check(self.likelihood)
        check_option("loss_mean_over", self.loss_mean_over, MeanOver)
        check_option("curvature_from", self.curvature_from, CurvatureFrom)
        check_structure(self.curvature, self.hessian_structure, "hessian_structure")
        for name in ("weight_decay", "temperature", "loss_scale"):
            check_positive(name, getattr(self, name))
        if self.method == "mackay" and self.policy.lowering:
            raise ValueError(
                "lowering=True needs steps along the gradient in log δ, but method='mackay' takes "
                "none. Pass method='adam', or lowering=False."
            )
        if self.learn_sigma_noise and not self.likelihood.has_sigma:
            raise ValueError(
                f"learn_sigma_noise=True needs likelihood 'regression', not '{self.likelihood}'."
            )
        if self.likelihood.has_label_noise and self.likelihood.to_learn() and not self.learns:
            raise ValueError(
                f"Likelihood '{self.likelihood}' would keep a share of wrong labels of 0, because "
                "no update learns it (updates=0, or none before the end). Pass the share, for "
                "example 'noisy_classification(noise=0.2)', or choose 'classification', whose "
                "calibration fits the share."
            )

    @classmethod
    def of(
        cls,
        likelihood: Likelihood | str,
        curvature: CurvatureOptions,
        schedule: Schedule,
        policy: DecayPolicy,
        options: Mapping[str, Any],
    ) -> "LearnerOptions":
        """Return these options with single fields from ``options``, also of the inner objects.

        Raises:
            TypeError: a name is not a field of any of them.
        """
        inside: dict[str, Any] = {"schedule": schedule, "policy": policy, "curvature": curvature}
        own = [f.name for f in fields(cls) if f.name not in ("likelihood", *inside)]
        names = {part: [f.name for f in fields(value)] for part, value in inside.items()}
        for name in options:
            if not any(name in one for one in (own, *names.values())):
                objects = " and ".join(
                    f"the options of {type(inside[part]).__name__} ({', '.join(one)})"
                    for part, one in names.items()
                )
                raise TypeError(
                    f"{name!r} is not an option of PriorLearner. Its options are {', '.join(own)} "
                    f"and {objects}."
                )
        for part, one in names.items():
            if values := {name: value for name, value in options.items() if name in one}:
                inside[part] = replace(inside[part], **values)
        of_learner = {n: v for n, v in options.items() if n in own}
        return cls(likelihood_of(likelihood), **inside, **of_learner)

    @property
    def learns(self) -> bool:
        """Whether there will be a hyperparameter step."""
        s = self.schedule
        return bool(s.updates and s.steps and (s.epochs is None or s.burn_in <= s.epochs))
