"""Choose the inputs to label next (active learning).

The default score is the mutual information between a label and the parameters,
I(y; θ | x) = H(E p(y|x, θ)) − E H(p(y|x, θ)) in nats, under the uncalibrated posterior. For
regression with Gaussian noise it is ½ log det(I + J Σ Jᵀ/σ²). An ambiguous input has a high entropy
but little mutual information, because its label hardly informs about the parameters.
Sources: Houlsby et al. 2011 (arXiv:1112.5745); Kirsch, van Amersfoort & Gal 2019
(arXiv:1906.08158) for the joint choice of several inputs. They weigh samples of the parameters for
each joint label. Ours conditions the outputs' covariance instead, see `choose_by_outputs`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kfac_backend.engine.batches import examples, num_examples
from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.options import check_option, check_positive
from kfac_backend.sharding import is_sharded
from marglik.posterior.posterior import Posterior
from marglik.prediction.links import Prediction
from marglik.prediction.predictive import (
    LayersOption,
    ModelPredictive,
    Predictive,
    PredictiveConfig,
    label_noise_of,
    laplace_predictive,
)

AcquisitionMethod = Literal["mutual_information", "entropy", "margin", "random"]

MOST_CANDIDATES = 500
"""Number of candidates of a joint choice: the inputs with the highest scores."""


@dataclass(frozen=True)
class Acquisition:
    """Inputs to label, and the score of each input of the pool."""

    index: Int64[Tensor, " number"]
    """Positions of the chosen inputs in the pool, in the order of choice."""
    gain: Float[Tensor, " number"]
    """Score of each chosen input. For a joint choice it is the mutual information (nats) that its
    label adds to the labels of the inputs chosen before."""
    scores: Float[Tensor, " M"]
    """Score of each input of the pool on its own; NaN for inputs that already have labels."""


def acquire(
    source: Posterior | Predictive,
    pool: Any,
    number: int,
    method: AcquisitionMethod = "mutual_information",
    *,
    labelled: Any = None,
    joint: bool | None = None,
    samples: int = 256,
    layers: LayersOption = "auto",
    batch_size: int = 256,
    generator: torch.Generator | None = None,
) -> Acquisition:
    """Choose the inputs of a pool to label next.

    If several inputs have equal scores, it chooses the first.

    Args:
        source: the posterior, or a predictive such as an `Ensemble` or ``map_predictive(model)``.
            The mutual information of a predictive is its epistemic uncertainty. It is computed
            without the calibration by `calibrate`, which removes epistemic uncertainty.
        pool: the inputs: a tensor, an array or a mapping of tensors with M examples; or a loader
            with a fixed order, whose batches are inputs, or tuples that begin with the inputs.
        number: number of inputs to choose.
        method: the score. "mutual_information" is between the label and the parameters (nats,
            summed over the outputs if each has its own target). "entropy" is the entropy of the
            predicted class probabilities (nats). "margin" is minus the difference of the two
            largest class probabilities. "random" draws uniform random numbers.
        labelled: indices, or a mask (M,), of inputs that must not be chosen.
        joint: whether each choice accounts for the labels of the inputs chosen before, so that two
            inputs are not chosen for the same information. The choice is greedy among the 500
            inputs with the highest scores. It maximises the mutual information between all chosen
            labels and the parameters of all layers. It needs the posterior. For classes it uses
            ``samples`` of the linearised network, and the expected covariance of their outputs
            given the labels chosen before. For regression it is exact and needs vectors (M, d).
            None chooses jointly if this is supported and ``layers`` selects all layers. Pools as
            loaders, and more than 500 inputs, are then chosen by their own scores.
        samples: number of samples of the outputs, for classes.
        layers: layers whose uncertainty is included, see `PredictiveConfig`.
        batch_size: number of inputs per batch.
        generator: random generator on the model's device. None draws the same numbers at each call.

    Raises:
        ValueError: the method is unknown or does not fit the likelihood, the pool has fewer
            unlabelled inputs than ``number``, or ``labelled`` does not fit the pool.
        NotImplementedError: outputs (N, ..., C) have several positions, or a joint choice has a
            likelihood other than regression or classes.
    """
    check_option("method", method, AcquisitionMethod)
    check_positive("number", number)
    if hasattr(pool, "__array__") and not isinstance(pool, Tensor):
        pool = torch.as_tensor(pool)
    if joint is None:
        joint = number > 1 and _chooses_jointly(source, pool, number, method, layers)
    if joint and (method != "mutual_information" or not isinstance(source, Posterior)):
        raise ValueError(
            f"joint=True needs method 'mutual_information' and a Posterior, not {method!r} and "
            f"{type(source).__name__}. Pass the posterior, or joint=False."
        )
    if generator is None:
        device = source.mean.device if isinstance(source, Posterior) else "cpu"
        generator = torch.Generator(device).manual_seed(0)
    # Step 1: compute the score of each input on its own.
    score_of = _scores_of(source, method, samples, layers, generator)
    with torch.no_grad():
        scores = torch.cat([score_of(x).double().cpu() for x in _batches(pool, batch_size)])
    scores = scores.masked_fill(_mask(labelled, len(scores)), torch.nan)
    num_left = int((~scores.isnan()).sum())
    if number > num_left:
        raise ValueError(
            f"number={number} is too large: the pool has {num_left} unlabelled inputs of "
            f"{len(scores)}. Choose fewer, or add inputs."
        )
    # Step 2: take the highest scores; NaN counts as the lowest.
    order = scores.nan_to_num(-torch.inf).argsort(descending=True, stable=True)
    if not joint:
        return Acquisition(order[:number], scores[order[:number]], scores)
    assert isinstance(source, Posterior)
    if number > MOST_CANDIDATES:
        raise ValueError(
            f"number={number} exceeds the {MOST_CANDIDATES} candidates of a joint choice. Choose "
            "fewer, or pass joint=False."
        )
    if num_examples(pool) != len(scores):
        raise ValueError(
            "A joint choice needs the pool as a tensor or a mapping of tensors. Pass one, or "
            "joint=False."
        )
    candidates = order[: min(MOST_CANDIDATES, num_left)].sort()[0]
    choose = _choose_labels if source.likelihood.kind == "classes" else _choose_numbers
    with torch.no_grad():
        chosen, gain = choose(source, examples(pool, candidates), number, samples, generator)
    return Acquisition(candidates[chosen], torch.stack(gain).double().cpu(), scores)


def _chooses_jointly(
    source: Posterior | Predictive, pool: Any, number: int, method: str, layers: LayersOption
) -> bool:
    """Return whether a joint choice is the default: where it is supported and takes seconds.

    It uses the parameters of all layers, at three forward passes for each candidate and sample. In
    a network whose own scores are from the last layer alone this can take hours.
    """
    if method != "mutual_information" or not isinstance(source, Posterior):
        return False
    if number > MOST_CANDIDATES or not isinstance(pool, Tensor | Mapping):
        return False
    if is_sharded(source.model):  # has no samples of the parameters
        return False
    if PredictiveConfig(layers=layers).for_posterior(source).layers != "all":
        return False
    if source.likelihood.kind == "classes":
        return True
    return source.likelihood.name == "regression" and isinstance(pool, Tensor) and pool.dim() == 2


def _batches(pool: Any, batch_size: int) -> Iterator[Any]:
    """Yield the pool's inputs in batches."""
    if isinstance(pool, Tensor | Mapping):
        N = num_examples(pool)
        if not N:
            raise ValueError(
                "The pool is empty, or its tensors differ in length. Pass inputs with the same "
                "first axis."
            )
        for start in range(0, N, batch_size):
            yield examples(pool, slice(start, start + batch_size))
        return
    for batch in pool:
        yield batch[0] if isinstance(batch, list | tuple) else batch


def _mask(labelled: Any, M: int) -> Tensor:
    """Return the mask (M,) of inputs that already have labels."""
    mask = torch.zeros(M, dtype=torch.bool)
    if labelled is None:
        return mask
    index = torch.as_tensor(labelled).cpu()
    if index.dtype == torch.bool and index.shape == mask.shape:
        return index
    if index.dtype == torch.bool or (len(index) and not -1 < index.min() <= index.max() < M):
        raise ValueError(
            f"labelled has shape {tuple(index.shape)} and dtype {index.dtype}. Pass a mask "
            f"({M},), or indices of the pool's inputs from 0 to {M - 1}."
        )
    mask[index.long()] = True
    return mask


def _scores_of(
    source: Posterior | Predictive,
    method: AcquisitionMethod,
    samples: int,
    layers: LayersOption,
    generator: torch.Generator,
) -> Callable[[Any], Tensor]:
    """Return the function from inputs (n, ...) to scores (n,)."""
    if method == "random":
        return lambda x: torch.rand(
            num_examples(x) or len(x), generator=generator, device=generator.device
        )
    likelihood = likelihood_of(getattr(source, "likelihood", "classification"))
    if likelihood.kind == "continuous" and method != "mutual_information":
        raise ValueError(
            f"method={method!r} is for class probabilities, but the likelihood is '{likelihood}'. "
            "Pass method='mutual_information'."
        )
    if method == "margin" and likelihood.kind != "classes":
        raise ValueError(
            f"method='margin' is for classes, but the likelihood is '{likelihood}'. Pass "
            "method='entropy'."
        )
    predict = source
    if isinstance(source, Posterior):
        # Score the recorded label, which has less information if labels may be wrong.
        config = PredictiveConfig(
            "mc", samples, layers=layers, calibration="none", labels="observed"
        ).for_posterior(source)
        if likelihood.name == "regression":
            return lambda x: _information_of_numbers(source, x, config)
        predict = laplace_predictive(source, config, generator)
    elif method == "mutual_information":
        predict = getattr(source, "uncalibrated", source)
        fit = predict.calibration if isinstance(predict, ModelPredictive) else None
        if fit is not None and (fit.covariance_scale, fit.output_temperature) != (1, 1):
            raise ValueError(
                "This predictive is calibrated, which changes its epistemic uncertainty. Pass the "
                "posterior, or the predictive that calibrate returned."
            )

    def score(x: Any) -> Tensor:
        prediction: Prediction = predict(x)  # pyright: ignore[reportCallIssue]
        if prediction.mean.dim() != 2:
            raise NotImplementedError(
                f"Predictions have shape {tuple(prediction.mean.shape)}, but acquire supports "
                "outputs (N, C). For sequences, compute scores from the predictive's Prediction "
                "and sum them over positions."
            )
        if method == "margin":
            largest = prediction.mean.topk(2, -1).values
            return largest[:, 1] - largest[:, 0]
        if method == "entropy":
            scores = prediction.entropy
        elif likelihood.kind == "continuous":  # the formula of a Gaussian with the same moments
            scores = 0.5 * (prediction.epistemic / prediction.aleatoric).log1p()
        else:
            scores = prediction.epistemic
        return scores.flatten(1).sum(1) if scores.dim() > 1 else scores

    return score


def _information_of_numbers(posterior: Posterior, x: Any, config: PredictiveConfig) -> Tensor:
    """Return ½ log det(I + J Σ Jᵀ/σ²), (n,)."""
    layers: Any = config.layers
    f, covariance = posterior.output_distribution(x, layers)
    if f.dim() != 2:
        raise NotImplementedError(
            f"Outputs have shape {tuple(f.shape)}, but acquire supports outputs (N, C)."
        )
    return _half_log_det(covariance.double() / posterior.sigma_noise.double().square())


def _half_log_det(V: Float[Tensor, "*n C C"]) -> Float[Tensor, "*n"]:
    """Return ½ log det(I + V)."""
    return 0.5 * torch.logdet(V + torch.eye(V.shape[-1]).to(V))


# For regression, a greedy joint choice has at least 63 % of the information of the best choice,
# because the information of labels that are independent given θ is submodular.


def _choose_numbers(
    posterior: Posterior, x: Any, number: int, samples: int, generator: torch.Generator
) -> tuple[list[int], list[Tensor]]:
    """Choose by the joint covariance of the candidates' outputs, for regression."""
    if posterior.likelihood.name != "regression" or not isinstance(x, Tensor) or x.dim() != 2:
        raise NotImplementedError(
            "joint=True supports likelihoods of classes, and 'regression' with a pool of vectors "
            f"(M, d). The likelihood is '{posterior.likelihood}'. Pass joint=False."
        )
    f, covariance = posterior.joint_output_distribution(x.to(posterior.mean.device)[None])
    T, C = f.shape[1:]
    V = covariance[0].double() / posterior.sigma_noise.double().square()
    V = V.view(T, C, T, C).transpose(1, 2)  # (T, T, C, C)
    chosen, gains = [], []
    for _ in range(number):
        gain = _half_log_det(V.diagonal(dim1=0, dim2=1).movedim(-1, 0))
        best = _first_of_largest(gain, chosen)
        # Condition the covariance on the target of the chosen input, which has noise I.
        noisy = V[best, best] + torch.eye(C).to(V)
        V = V - V[:, None, best] @ torch.linalg.solve(noisy, V[best])[None]
        chosen.append(best)
        gains.append(gain[best])
    return chosen, gains


def _choose_labels(
    posterior: Posterior, x: Any, number: int, samples: int, generator: torch.Generator
) -> tuple[list[int], list[Tensor]]:
    """Choose by samples of the outputs, conditioned on the chosen labels (classes)."""
    try:
        f = posterior.linearised_outputs(posterior.sample(samples, generator), x)  # (S, T, C)
    except NotImplementedError as error:
        raise NotImplementedError(f"{error} Or pass joint=False.") from error
    if f.dim() != 3:
        raise NotImplementedError(
            f"Outputs have shape {tuple(f.shape[1:])}, but acquire supports outputs (N, C)."
        )
    return choose_by_outputs(f, number, partial(_probabilities, posterior.likelihood))


def _probabilities(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Return the probabilities of the recorded labels."""
    p, noise = likelihood.log_probabilities(f).exp(), label_noise_of(likelihood, None)
    return (1 - noise) * p + noise / p.shape[-1]


def choose_by_outputs(
    f: Float[Tensor, "S T C"], number: int, probabilities: Callable[[Tensor], Tensor]
) -> tuple[list[int], list[Tensor]]:
    """Choose inputs greedily by their mutual information, given the labels of earlier choices.

    The outputs keep their means, and a choice replaces their covariance by the expected covariance
    given its label, see `given_label`. Weights of the same samples for each joint label, as in
    BatchBALD, are exact, but contain at most log S nats, which ten labels exhaust.

    Args:
        f: joint samples of the outputs of T candidates.
        number: number of inputs to choose.
        probabilities: function from outputs (S, T, C) to the probabilities of labels (S, T, K).

    Returns:
        Indices of the chosen candidates, in order, and the information that each adds (nats).
    """
    mean = f.mean(0)
    deviations = f - mean
    chosen, gains = [], []
    for _ in range(number):
        p = probabilities(mean + deviations)
        of_mean = torch.special.entr(p.mean(0)).sum(-1)
        gain = of_mean - torch.special.entr(p).sum(-1).mean(0)
        best = _first_of_largest(gain, chosen)
        chosen.append(best)
        gains.append(gain[best].clamp(min=0))
        deviations = given_label(deviations, p[:, best])
    return chosen, gains


def given_label(
    deviations: Float[Tensor, "S *shape"], p: Float[Tensor, "S K"]
) -> Float[Tensor, "S *shape"]:
    """Return deviations whose covariance is E_y Cov(f | y), for a label y with y ~ p_s in sample s.

    By the law of total covariance E_y Cov(f | y) = Cov(f) − Cov_y(E(f | y)). With p̄ the mean of p
    over S samples and U_sy = (p_sy − p̄_y)/√(S p̄_y), it is Dᵀ (I − U Uᵀ) D/S for deviations D. The
    result is (I − U Uᵀ)^½ D.
    """
    S, mean = len(p), p.mean(0)
    U = (p - mean) / (S * mean.clamp(min=torch.finfo(p.dtype).tiny)).sqrt()
    Q, s, _ = torch.linalg.svd(U, full_matrices=False)  # (S, K), (K,)
    shrink = 1 - (1 - s.square()).clamp(min=0).sqrt()
    D = deviations.flatten(1)
    return (D - (Q * shrink) @ (Q.T @ D)).view_as(deviations)


def _first_of_largest(gain: Tensor, chosen: Iterable[int]) -> int:
    """Return the first index, not chosen yet, with the largest gain up to rounding."""
    gain = gain.clone()
    gain[list(chosen)] = -torch.inf
    largest = gain.max()
    rounding = 64 * torch.finfo(gain.dtype).eps * largest.abs()
    return int((gain >= largest - rounding).nonzero()[0])
