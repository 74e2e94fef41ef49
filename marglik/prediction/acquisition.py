"""Choose the inputs to label next (active learning).

The default score for classes is the mutual information between a label and the parameters,
I(y; θ | x) = H(E p(y|x, θ)) − E H(p(y|x, θ)) in nats, under the uncalibrated posterior. An
ambiguous input has a high entropy but little mutual information, because its label hardly informs
about the parameters. Sources: Houlsby et al. 2011 (arXiv:1112.5745); Kirsch, van Amersfoort & Gal
2019 (arXiv:1906.08158) for the joint choice of several inputs, see `choose_by_outputs`.

For regression with Gaussian noise the mutual information is ½ log det(I + J Σ Jᵀ/σ²). It is largest
for inputs unlike all others, whose labels inform little about the rest of the pool. The default is
LCMD (largest cluster, maximum distance): inputs that are far from all labelled inputs, in regions
with many inputs, see `choose_in_clusters`. Source: Holzmüller et al. 2023 (arXiv:2203.09410). The
expected predictive information gain (EPIG) is the mean over inputs x* of the pool of I(y*; y). It
needs no labelled inputs. Source: Bickford Smith et al. 2023 (arXiv:2304.08151).
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

AcquisitionMethod = Literal[
    "auto", "mutual_information", "epig", "lcmd", "entropy", "margin", "random"
]

MOST_CANDIDATES = 500
"""Number of candidates of a joint choice: the inputs with the highest scores."""
MOST_TARGETS = 250
"""Number of inputs of the pool, drawn at random, over which the EPIG is a mean."""
MOST_CLUSTERED = 1000
"""Number of candidates, and of labelled inputs, for LCMD; larger pools are sampled at random."""


@dataclass(frozen=True)
class Acquisition:
    """Inputs to label, and the score of each input of the pool."""

    index: Int64[Tensor, " number"]
    """Positions of the chosen inputs in the pool, in the order of choice."""
    gain: Float[Tensor, " number"]
    """Score of each chosen input. For a joint choice it is the information (nats) that its label
    adds to the labels of the inputs chosen before; for "lcmd" it is the squared distance (σ²) from
    the nearest labelled or chosen input."""
    scores: Float[Tensor, " M"]
    """Score of each input of the pool on its own; NaN for inputs that already have labels."""
    method: AcquisitionMethod
    """The score, with "auto" resolved."""


def acquire(
    source: Posterior | Predictive,
    pool: Any,
    number: int,
    method: AcquisitionMethod = "auto",
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
            summed over the outputs if each has its own target). "epig" is the mean mutual
            information (nats) between the label and the label of another input of the pool, for
            likelihood "regression"; it is computed with 250 inputs. "lcmd" is the variance of the
            difference between the output and the output of the nearest labelled input, in units of
            σ², for likelihood "regression". "entropy" is the entropy of the predicted class
            probabilities (nats). "margin" is minus the difference of the two largest class
            probabilities. "random" draws uniform random numbers. "auto" is "lcmd" for "regression"
            if this is supported, "epig" without ``labelled`` or for more than 500 inputs, and
            otherwise "mutual_information".
        labelled: indices, or a mask (M,), of the pool's inputs that have labels. They are not
            chosen.
        joint: whether each choice takes into account that the earlier choices will be labelled, so
            that two inputs are not chosen for the same information. The choice is greedy among the
            500 inputs with the highest scores, with the uncertainty of all layers. It needs the
            posterior and a pool in memory. For classes see `choose_by_outputs`. For regression it
            is exact and needs vectors (M, d). For "lcmd" see `choose_in_clusters`; its candidates
            are 1,000 inputs at random. None chooses up to 500 inputs jointly if this is supported
            and ``layers`` selects all layers.
        samples: number of samples of the outputs, for classes.
        layers: layers whose uncertainty is included, see `PredictiveConfig`.
        batch_size: number of inputs per batch.
        generator: random generator on the model's device. None draws the same numbers at each call.

    Raises:
        ValueError: the method is unknown or does not fit the likelihood, the pool has fewer
            unlabelled inputs than ``number``, or ``labelled`` does not fit the pool.
        NotImplementedError: outputs (N, ..., C) have several positions, or a joint choice or "epig"
            is not supported.
    """
    check_option("method", method, AcquisitionMethod)
    check_positive("number", number)
    if hasattr(pool, "__array__") and not isinstance(pool, Tensor):
        pool = torch.as_tensor(pool)
    of_source = _scores_of_joint(source, pool)
    # With the last layer alone in own scores, a joint choice would take hours: it uses all layers.
    is_cheap = False
    if isinstance(source, Posterior) and method in ("auto", *of_source):
        is_cheap = PredictiveConfig(layers=layers).for_posterior(source).layers == "all"
    if method == "auto":
        method = "mutual_information"
        if is_cheap and "epig" in of_source:
            has_labels = bool(_mask(labelled, len(pool)).any())
            method = "lcmd" if has_labels and number <= MOST_CANDIDATES else "epig"
    if joint is None:
        # The first choice of LCMD also depends on the clusters.
        least = 1 if method == "lcmd" else 2
        joint = is_cheap and method in of_source and least <= number <= MOST_CANDIDATES
    is_unsupported = (joint or method in ("epig", "lcmd")) and method not in of_source
    if is_unsupported or (joint and number > MOST_CANDIDATES):
        raise NotImplementedError(
            f"{number} inputs by method={method!r} with joint={joint} are not supported for this "
            f"{type(source).__name__} and pool. joint=True chooses up to {MOST_CANDIDATES} inputs, "
            "and needs a posterior and a pool in memory, of vectors (M, d) for regression. 'epig' "
            "and 'lcmd' are for regression. Pass method='mutual_information' and joint=False."
        )
    if generator is None:
        device = source.mean.device if isinstance(source, Posterior) else "cpu"
        generator = torch.Generator(device).manual_seed(0)
    # Step 1: compute the score of each input on its own.
    targets = None
    if method == "epig":
        targets = pool[_some(torch.arange(len(pool)), MOST_TARGETS, generator).to(pool.device)]
    elif method == "lcmd":
        known = _mask(labelled, len(pool)).nonzero()[:, 0]
        if not len(known):
            raise ValueError(
                "method='lcmd' compares inputs with labelled inputs, but labelled is empty. Pass "
                "the labelled inputs as a part of the pool and their indices as labelled, or pass "
                "method='epig'."
            )
        targets = pool[_some(known, MOST_CLUSTERED, generator).to(pool.device)]
    score_of = _scores_of(source, method, samples, layers, generator, targets)
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
        return Acquisition(order[:number], scores[order[:number]], scores, method)
    assert isinstance(source, Posterior)
    if method == "lcmd":  # at random, so that the clusters have the pool's density
        candidates = _some(order[:num_left], MOST_CLUSTERED, generator)
    else:
        candidates = order[: min(MOST_CANDIDATES, num_left)].sort()[0]
    x = examples(pool, candidates)
    with torch.no_grad():
        if source.likelihood.kind == "classes":
            chosen, gain = _choose_labels(source, x, number, samples, generator)
        elif method == "lcmd":
            assert targets is not None
            D = _distances(_covariances(source, torch.cat([targets, x])))
            chosen, gain = choose_in_clusters(D, len(targets), number)
        else:
            chosen, gain = _choose_numbers(source, x, number, targets)
    return Acquisition(candidates[chosen], torch.stack(gain).double().cpu(), scores, method)


def _scores_of_joint(source: Posterior | Predictive, pool: Any) -> tuple[str, ...]:
    """Return the methods for which the joint distribution of the outputs is supported."""
    if not isinstance(source, Posterior) or is_sharded(source.model):
        return ()
    if source.likelihood.kind == "classes" and isinstance(pool, Tensor | Mapping):
        return ("mutual_information",)
    if source.likelihood.name == "regression" and isinstance(pool, Tensor) and pool.dim() == 2:
        return ("mutual_information", "epig", "lcmd")
    return ()


def _some(index: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Return up to ``number`` of these indices, drawn at random, in ascending order."""
    order = torch.randperm(len(index), generator=generator, device=generator.device).cpu()
    return index[order[:number]].sort()[0]


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
    targets: Tensor | None,
) -> Callable[[Any], Tensor]:
    """Return the function from inputs (n, ...) to scores (n,)."""
    if targets is not None:
        assert isinstance(source, Posterior)
        T = len(targets)
        if method == "lcmd":
            return lambda x: _distances(_covariances(source, torch.cat([targets, x])))[:T, T:].amin(
                0
            )
        return lambda x: _gains(_covariances(source, torch.cat([targets, x])), T)
    if method == "random":
        return lambda x: torch.rand(
            num_examples(x) or len(x), generator=generator, device=generator.device
        )
    likelihood = likelihood_of(getattr(source, "likelihood", "classification"))
    kinds = {"entropy": ["classes", "binary"], "margin": ["classes"]}
    if likelihood.kind not in kinds.get(method, [likelihood.kind]):
        raise ValueError(
            f"method={method!r} is for class probabilities, but the likelihood is '{likelihood}'. "
            "Pass method='mutual_information'."
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


def _choose_numbers(
    posterior: Posterior, x: Tensor, number: int, targets: Float[Tensor, "T d"] | None
) -> tuple[list[int], list[Tensor]]:
    """Choose by the joint covariance of the outputs of all targets and candidates (regression)."""
    T = 0 if targets is None else len(targets)
    V = _covariances(posterior, x if targets is None else torch.cat([targets, x]))
    chosen, gains = [], []
    for _ in range(number):
        gain = _gains(V, T)
        best = _first_of_largest(gain, chosen)
        # Condition the covariance on the target of the chosen input, which has noise I.
        of_best = V[:, T + best]
        noisy = of_best[T + best] + torch.eye(V.shape[-1]).to(V)
        V = V - of_best[:, None] @ torch.linalg.solve(noisy, V[T + best])[None]
        chosen.append(best)
        gains.append(gain[best])
    return chosen, gains


def _covariances(posterior: Posterior, x: Tensor) -> Float[Tensor, "T T C C"]:
    """Return the covariances between the outputs of all inputs, in units of the noise σ²."""
    f, covariance = posterior.joint_output_distribution(x.to(posterior.mean.device)[None])
    T, C = f.shape[1:]
    V = covariance[0].double() / posterior.sigma_noise.double().square()
    return V.view(T, C, T, C).transpose(1, 2)


def _gains(V: Float[Tensor, "T_n T_n C C"], T: int) -> Float[Tensor, " n"]:
    """Return the information of the labels of n inputs, from covariances in units of the noise.

    It is the mean information about the labels of the first T inputs, ½ log det(I + V_t) +
    ½ log det(I + V_n) − ½ log det of both together; or about the parameters if T is 0.
    """
    own = V.diagonal(dim1=0, dim2=1).movedim(-1, 0)
    if not T:
        return _half_log_det(own)
    roots = torch.linalg.cholesky(own + torch.eye(V.shape[-1]).to(V))
    W = torch.linalg.solve_triangular(roots[:T, None], V[:T, T:], upper=False)
    W = torch.linalg.solve_triangular(roots[T:], W.mT, upper=False)
    return -_half_log_det(-W @ W.mT).mean(0)


def _distances(V: Float[Tensor, "T T C C"]) -> Float[Tensor, "T T"]:
    """Return the variance of the difference between the outputs of two inputs, summed over C."""
    traces = V.diagonal(dim1=2, dim2=3).sum(-1)
    own = traces.diagonal()
    return (own[:, None] + own - 2 * traces).clamp(min=0)


def choose_in_clusters(
    D: Float[Tensor, "L_n L_n"], L: int, number: int
) -> tuple[list[int], list[Tensor]]:
    """Choose inputs by LCMD: in the largest cluster, the input at the maximum distance.

    Each candidate belongs to the cluster of the nearest labelled or chosen input. The size of a
    cluster is the sum of its distances. Outliers are few, so their clusters are small, although
    their distances are large.
    Source: Holzmüller et al. 2023 (arXiv:2203.09410), "LCMD" with training data.

    Args:
        D: squared distances between L labelled inputs, then n candidates.
        L: number of labelled inputs.
        number: number of candidates to choose.

    Returns:
        Indices of the chosen candidates, in order, and the distance of each from the nearest
        labelled or chosen input.
    """
    nearest, cluster = D[:L, L:].min(0)
    chosen, gains = [], []
    for step in range(number):
        sizes = nearest.new_zeros(L + number).index_add(0, cluster, nearest)
        is_inside = cluster == sizes.argmax()
        best = _first_of_largest(nearest.where(is_inside, -1.0), chosen)
        chosen.append(best)
        gains.append(nearest[best])
        # The candidates that are nearer to the chosen input form its cluster.
        to_best = D[L + best, L:]
        is_nearer = to_best < nearest
        cluster = cluster.masked_fill(is_nearer, L + step)
        nearest = to_best.where(is_nearer, nearest)
    return chosen, gains


def _choose_labels(
    posterior: Posterior, x: Any, number: int, samples: int, generator: torch.Generator
) -> tuple[list[int], list[Tensor]]:
    """Choose by samples of the outputs, conditioned on the chosen labels (classes)."""
    try:
        f = posterior.linearised_outputs(posterior.sample(samples, generator), x)  # (S, T, C)
    except NotImplementedError as error:
        raise NotImplementedError(f"{error} Or pass joint=False.") from error
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
