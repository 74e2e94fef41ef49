"""Compute the influence of training examples on predictions.

τ(q, n) = ∇m(q)ᵀ (H + P)⁻¹ ∇ℓ_n is, to first order, the change of measurement m of query q if
training example n is left out. H + P is the posterior's precision, block by block. The learned
prior precisions replace the damping that other tools ask for. Two passes compute the scores. The
first one computes the gradients of the queries, and solves (H + P) S_q = ∇m(q). The second one
computes the inner products of each S_q with the training gradients. It stores no training gradient:
it computes the products of a few examples at a time, from the inputs and output gradients of the
layers.

The exact blocks of the GGN are H_b = Σ_n Σ_v g_nv g_nvᵀ, from the stored inputs and output
gradients of all training examples. Conjugate gradients solve the systems of these blocks, with the
EKFAC block as the preconditioner.

Sources: Koh & Liang 2017 (arXiv:1703.04730); Grosse et al. 2023 (arXiv:2308.03296) for EKFAC.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from kfac_backend.atomic_files import sha256_of_tensors
from kfac_backend.blocks.block import decompose
from kfac_backend.covariance.gradients import (
    HeldGradients,
    LayerGradients,
    ParameterGradients,
    PosteriorPrecision,
)
from kfac_backend.eigenvalue_correction import corrected_factors
from kfac_backend.engine.batches import check_read_twice, each_batch, num_examples, split_batch
from kfac_backend.engine.capture import Sink
from kfac_backend.engine.driver import Driver
from kfac_backend.engine.rule_assignment import RuleAssignment, assignment_of_blocks
from kfac_backend.likelihoods import Likelihood, counted_terms
from kfac_backend.options import (
    CurvatureOptions,
    KfacApprox,
    TargetOptions,
    check_option,
    check_positive,
)
from kfac_backend.precision import at_least_float32, full_float32
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import check_whole
from marglik.attribution.store import ScoreStore, data_identity, posterior_identity
from marglik.eval_mode import eval_mode
from marglik.posterior.posterior import Posterior

InfluenceCurvature = Literal["exact", "ekfac", "kfac"]
Blocks = Literal["layer", "tensor"]
Damping = Literal["auto", "evidence", "relative"] | float
Measurement = Literal["loss", "margin", "log_odds"] | Callable[[Tensor, Tensor], Tensor]
Measure = Callable[[Tensor, Tensor], Tensor]
Gradients = dict[str, Tensor]
"""Maps a parameter's name to gradients (Q, P), flattened as PyTorch flattens the parameter."""

AUTO_OF_REGRESSION = 3.0
"""Multiple of δ that damping="auto" uses for regression."""
RELATIVE = 0.1
"""Share of a tensor's mean eigenvalue that damping="relative" uses."""
QUERY_BYTES = 2**30
"""Maximum number of bytes of query gradients that share a pass over the training data."""
ROW_BYTES = 4 * 2**30
"""Maximum number of bytes of inputs and output gradients that exact blocks store."""
DENSE_BYTES = 32 * 2**20
"""Maximum number of bytes of dense gradients in memory at the same time."""
MOST_ITERATIONS = 1000
"""Maximum number of conjugate gradient iterations, after which a warning gives the residual."""


def influence(
    posterior: Posterior,
    queries: Iterable[Any],
    train: Iterable[Any],
    *,
    measurement: Measurement = "loss",
    curvature: InfluenceCurvature = "exact",
    blocks: Blocks | None = None,
    damping: Damping = "auto",
    progress: bool = False,
    store: str | Path | None = None,
) -> Float[Tensor, "Q N"]:
    """Return scores τ(q, n): the change of query q's measurement without training example n.

    A training example with a large positive τ for the loss of q supports the label of q: without
    it, the loss rises. The columns follow the order of ``train``. ``scores.topk(5)`` has the five
    most helpful examples of each query. The score is exact for a quadratic loss up to the leverage
    h_n of example n: the true change is τ / (1 − h_n). This holds for damping="evidence".

    Scores are often summed over many examples that are left out together. Without half of the
    examples the precision is H/2 + δ = (H + 2 δ)/2 for a Gaussian likelihood, so a damping above δ
    is better. In the experiments 3 δ was best. The curvature of a classifier does not halve. With
    less data its predictions are less certain, which increases the curvature of each example, so δ
    is better (measured, see `experiments.attribution`).

    Args:
        posterior: the fitted posterior, at the network's weights.
        queries: batches (x, y), or mappings, as in the fit. There is one pass over the training
            data for each GiB of query gradients.
        train: the data of the fit, in a fixed order and in an iterable that can be read repeatedly.
        measurement: "loss" (−log p(y|f), in nats, summed over an example's terms). For classes and
            outputs (N, C) also "margin" (the output of the label minus the largest other one) and
            "log_odds" (log p/(1 − p) of the label). Or a function of outputs (q, ..., C) and
            targets that returns one number for each example (q,), such as the loss of a token.
        curvature: "exact" uses the exact blocks of the GGN and stores the inputs and output
            gradients of all training examples, also if a learner fitted the posterior with random
            signs. If the posterior has fisher="mc" or "empirical", the blocks belong to that
            matrix. "ekfac" uses the eigenvalue-corrected blocks of the posterior's factors, and
            "kfac" the plain ones.
        blocks: "layer" for one block of all tensors of a module, such as weight and bias (only for
            "exact"); "tensor" for one block per parameter tensor. None uses "layer" for "exact" and
            "tensor" for the others.
        damping: "evidence" uses the posterior's prior precision δ of each tensor. "auto" also uses
            δ, but 3 δ for regression, see above. "relative" uses 0.1 times the mean eigenvalue of
            each tensor's block instead. A number replaces δ for all tensors. Like δ it belongs to
            the loss summed over the data.
        progress: whether to show progress bars.
        store: folder for the scores and the products (H + P)⁻¹ ∇m(q), which are written at most
            once a minute. Another call with the same arguments continues from there. None stores
            nothing.

    Returns:
        Scores (Q, N), on the CPU.

    Raises:
        AttributeError: the posterior is not fitted.
        TypeError: training data that can be read only once.
        ValueError: options that are not supported or do not go together; a posterior that is not
            from Kronecker factors; training data in random order or other data than the fit's;
            weights other than the fit's; a measurement of another shape; a store of another
            computation; ranks with different queries.
        NotImplementedError: a parameter whose curvature is a diagonal without a rule
            (``unsupported="diagonal"``), a model under `fully_shard`.
        MemoryError: exact blocks of more than 4 GiB of rows.
    """
    blocks = _check(posterior, train, curvature, blocks, damping)
    measure, ranks = _measurement(measurement, posterior), posterior.ranks
    with torch.inference_mode(False), eval_mode(posterior.model), full_float32():
        systems = _Systems(posterior, train, curvature, blocks, damping, progress)
        saved = None
        if store is not None or ranks.size > 1:
            check_read_twice(queries)
            of_queries = str(data_identity(queries, posterior.options))
            ranks.agree({"the queries": of_queries})
            if store is not None:
                identity = posterior_identity(posterior, systems.factors) | {
                    "the queries or their batches": of_queries,
                    "the measurement": measurement
                    if isinstance(measurement, str)
                    else systems.sample(queries, measure),
                    "the options": f"{curvature} {blocks} {damping}",
                }
                saved = ScoreStore(store, identity, train, posterior.options, ranks)
        left, scores = iter(each_batch(queries, "Query gradients", progress)), []
        for chunk in count():
            if (first := next(left, None)) is None:
                break
            left = chain([first], left)
            parts, batches = saved.scores(chunk) if saved else ([], 0)
            done = sum(part.shape[1] for part in parts)
            if saved is not None and not ranks.any(done < saved.num_train, systems.device):
                next(islice(left, batches - 1, None))  # skip these queries
            else:
                gradients, batches = _query_gradients(systems, left, measure, QUERY_BYTES)
                solved = saved.solved(chunk, systems.device) if saved else None
                if ranks.any(solved is None, systems.device):
                    solved = systems.solve(gradients)
                    if saved is not None:
                        saved.save_solved(chunk, solved)
                contraction = _Contraction(systems, solved or {})
                if saved is not None:
                    contraction.save = saved.saver(chunk, done, batches)
                rest = _remaining(train, done, posterior.options, contraction)
                systems.run(contraction, rest if done else train, "Scores", progress)
                parts = saved.scores(chunk)[0] if saved else contraction.scores
            scores.append(_of_all_ranks(parts, ranks, systems.device))
    if not scores:
        raise ValueError("The loader of queries yields no batch. Pass at least one query.")
    return torch.cat(scores)


def self_influence(
    posterior: Posterior,
    train: Iterable[Any],
    *,
    curvature: InfluenceCurvature = "ekfac",
    blocks: Blocks | None = None,
    damping: Damping = "evidence",
    progress: bool = False,
) -> Float[Tensor, " N"]:
    """Return τ(n, n): the change of training example n's own loss if it is left out, in nats.

    The network fits an example with a large value only because it was trained on it. Its label is
    often wrong, or the example is unlike all others. The values are the diagonal of the scores of
    `influence`, without a pass over the data for each chunk of queries.

    Args:
        posterior: the fitted posterior, at the network's weights.
        train: the data of the fit, as for `influence`, in batches whose gradients fit into memory.
            With "kfac", and with "ekfac" for a posterior with corrected eigenvalues, it may be a
            part of this data.
        curvature: as for `influence`. "exact" solves a system for each example.
        blocks: as for `influence`.
        damping: as for `influence`.
        progress: whether to show progress bars.

    Returns:
        Values (N,), on the CPU.

    Raises:
        AttributeError: the posterior is not fitted.
        TypeError: training data that can be read only once.
        ValueError: as for `influence`.
        NotImplementedError: as for `influence`.
        MemoryError: as for `influence`.
    """
    blocks = _check(posterior, train, curvature, blocks, damping)
    measure, ranks = _measurement("loss", posterior), posterior.ranks
    if curvature == "exact" and ranks.size > 1:
        raise ValueError(
            "curvature='exact' is not supported on several ranks, which have different examples. "
            "Pass 'ekfac', or call influence with all training data as queries on each rank."
        )
    with torch.inference_mode(False), eval_mode(posterior.model), full_float32():
        systems = _Systems(posterior, train, curvature, blocks, damping, progress)
        values = []
        for batch in each_batch(systems.batches(train), "Self-influence", progress):
            gradients, _ = _query_gradients(systems, iter([batch]), measure, 0)
            solved = systems.solve(gradients)
            inner = torch.stack([(g * solved[name]).sum(1) for name, g in gradients.items()])
            values.append(inner.sum(0, keepdim=True).cpu() / posterior.temperature)
    return _of_all_ranks(values, ranks, posterior.mean.device)[0]


def _check(
    posterior: Posterior, train: Any, curvature: str, blocks: Blocks | None, damping: Damping
) -> Blocks:
    """Return the blocks; raise the errors of arguments that need no pass."""
    check_option("curvature", curvature, InfluenceCurvature)
    if blocks is None:
        blocks = "layer" if curvature == "exact" else "tensor"
    check_option("blocks", blocks, Blocks)
    if isinstance(damping, str):
        check_option("damping", damping, Literal["auto", "evidence", "relative"])
    else:
        check_positive("damping", damping)
    if blocks == "layer" and curvature != "exact":
        raise ValueError(
            f"blocks='layer' needs curvature='exact'. With '{curvature}' each tensor has its own "
            "block. Pass blocks='tensor'."
        )
    check_read_twice(train)
    check_not_shuffled(train)
    posterior.check_weights()
    check_whole(posterior.model, "Influence")
    return blocks


def check_not_shuffled(train: Any) -> None:
    """Raise a ValueError for a loader with a random order: columns would have no meaning."""
    sampler = train.sampler if isinstance(train, DataLoader) else None
    is_random = isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False) is True
    if is_random or getattr(train, "shuffle", False) is True:
        raise ValueError(
            f"This {type(train).__name__} shuffles, so the columns of the scores could not be "
            "assigned to examples. Pass the data in a fixed order (shuffle=False)."
        )


def _of_all_ranks(parts: list[Tensor], ranks: Ranks, device: torch.device) -> Tensor:
    """Return the columns of all ranks in order, from the parts of each rank; collective."""
    if ranks.size == 1:
        return torch.cat(parts, 1)
    own = torch.cat(parts, 1).to(device) if parts else None
    shapes = ranks.gather(None if own is None else (own.shape, own.dtype))
    rows, dtype = next((shape[0], dtype) for shape, dtype in filter(None, shapes))
    columns = [one[0][1] if one else 0 for one in shapes]
    every = [torch.empty(rows, number, dtype=dtype, device=device) for number in columns]
    if own is not None:
        every[ranks.rank] = own
    ranks.exchange_((columns, rank) for rank, columns in enumerate(every))
    return torch.cat(every, 1).cpu()


def _remaining(
    train: Iterable[Any], done: int, options: TargetOptions, contraction: "_Contraction"
) -> Iterator[Any]:
    """Yield the batches after the first ``done`` examples, whose scores are known."""
    position = 0
    for batch in train:
        contraction.skip = max(0, done - position)
        position += num_examples(split_batch(batch, options)[1]) or 0
        if position > done:
            yield batch


class _Systems:
    """The systems (H/(σ²T) + P) S = ∇m of a posterior, block by block.

    For the arguments see `influence`. The first use computes the exact blocks, and corrected
    eigenvalues if the posterior lacks them. Each takes one pass over the training data. All ranks
    of the fit make these passes together.
    """

    def __init__(
        self,
        posterior: Posterior,
        train: Iterable[Any],
        curvature: str,
        blocks: str,
        damping: Damping,
        progress: bool,
    ) -> None:
        self.likelihood, self.ranks = posterior.likelihood, posterior.ranks
        self.device = posterior.mean.device
        self.scale = 1 / (float(posterior.sigma_noise) ** 2 * posterior.temperature)
        """1/(σ²T)."""
        factors = posterior.fitted_factors()
        self.factors = factors.gathered(self.ranks, self.device) if self.ranks.size > 1 else factors
        if curvature == "kfac" and factors.is_corrected:
            raise ValueError(
                "The posterior has corrected eigenvalues. Pass curvature='ekfac', or fit it with "
                "corrected=False."
            )
        self._posterior, self._train, self._progress = posterior, train, progress
        self._curvature, self._blocks, self._damping = curvature, blocks, damping
        self._driver = self._make_driver(posterior.options)
        self.delta: dict[str, float] = {}
        """P of each tensor."""

    def _make_driver(self, options: CurvatureOptions) -> Driver:
        """Return a driver over the parameters with a posterior, on this process alone."""
        model, sizes = self._posterior.model, self.factors.blocks
        return Driver(
            model, self.likelihood, options.replace(kfac_approx="expand"),
            generator=self._posterior.generator, process_group=None,
            assignment=assignment_of_blocks(model, {n: one.numel for n, one in sizes.items()}),
        )  # fmt: skip

    @cached_property
    def spectra(self) -> PosteriorPrecision:
        """Each tensor's eigenvectors and eigenvalues of H/(σ²T) + P.

        For exact blocks they are the preconditioner.
        """
        factors, posterior = self.factors, self._posterior
        if self._curvature != "kfac" and not factors.is_corrected:
            group, progress = self.ranks.process_group, self._progress
            factors = corrected_factors(
                factors, posterior.model, self._train, progress=progress, process_group=group
            )
        dtype = at_least_float32(posterior.mean).dtype
        blocks = [block.to(dtype=dtype) for block in factors.blocks.values()]
        eigen = decompose(blocks, self.ranks, self.device)
        prior = posterior.prior_precision.detach().expand(len(factors)).tolist()
        spectra = {}
        for name, block, own in zip(factors.blocks, eigen, prior, strict=True):
            scaled = block.scale(self.scale)
            if self._damping == "relative":
                own = RELATIVE * float(scaled.spectrum().mean())
            elif self._damping == "auto":
                own *= AUTO_OF_REGRESSION if self.likelihood.has_sigma else 1.0
            elif self._damping != "evidence":
                own = float(self._damping)
            spectra[name], self.delta[name] = (scaled, scaled.spectrum(own)), own
        return spectra

    @cached_property
    def _exact_blocks(self) -> "list[_ExactBlock]":
        """The exact blocks, of one or several tensors each."""
        rows, options, driver = _Rows(self.spectra), self._posterior.options, self._driver
        # Use all vectors of the GGN. A learner may have used random signs, to save time.
        if options.fisher == "random_signs":
            self._driver = self._make_driver(options.replace(fisher="exact"))
        self.run(rows, self._train, "Rows of the exact blocks", self._progress)
        self._driver = driver
        groups: dict[str, list[str]] = {}
        for name in self.spectra:
            group = name.rpartition(".")[0] if self._blocks == "layer" else name
            groups.setdefault(group, []).append(name)
        return [_ExactBlock(names, rows, self) for names in groups.values()]

    def batches(self, data: Iterable[Any]) -> Iterable[Any]:
        """Return the batches, on several ranks only those with examples of this rank."""
        if self.ranks.size == 1:
            return data
        options = self._posterior.options
        return (batch for batch in data if num_examples(split_batch(batch, options)[1]) != 0)

    def run(self, sink: Sink, data: Iterable[Any], description: str, progress: bool) -> None:
        """Pass the gradients of the data's vectors to a sink."""
        self._driver.start(sink)
        self._driver.add_all(self.batches(data), description, progress)
        self._driver.finish()

    def solve(self, gradients: Gradients) -> Gradients:
        """Return the solutions S (Q, P) of each tensor for query gradients.

        All ranks solve exact blocks for the gradients of rank 0. Otherwise rounding could give the
        ranks different numbers of iterations.
        """
        if self._curvature != "exact":
            return _precondition(gradients, self.spectra)
        self.ranks.exchange_((g, 0) for g in gradients.values())
        solved: Gradients = {}
        for block in self._exact_blocks:
            solved |= block.solve(gradients)
        return solved

    def sample(self, queries: Iterable[Any], measure: Measure) -> str:
        """Return a checksum of a measurement: of its gradients at random outputs.

        The targets are the targets of the first queries.
        """

        class Sample(Sink):
            def vectors(self, of_fisher: Any, f: Tensor, y: Tensor) -> Iterator[Tensor]:
                random = torch.randn(f.shape, generator=torch.Generator().manual_seed(0))
                self.sum = sha256_of_tensors([measure(random.to(f), y)])
                return iter(())

        self.run(sink := Sample(), islice(queries, 1), "", False)
        return sink.sum


# --- measurements and the vectors to propagate back ---


def _measurement(measurement: Measurement, posterior: Posterior) -> Measure:
    """Return the function from outputs (q, ..., C) and targets to the gradient of Σ m."""
    likelihood, sigma = posterior.likelihood, float(posterior.sigma_noise)
    if measurement == "loss":
        return lambda f, y: loss_gradient(f, y, likelihood) / sigma**2
    if isinstance(measurement, str):
        check_option("measurement", measurement, Literal["loss", "margin", "log_odds"])
        if likelihood.kind != "classes":
            raise ValueError(
                f"measurement={measurement!r} is for classes, but the likelihood is "
                f"'{likelihood}'. Pass 'loss', or a function of outputs and targets."
            )
    of_name = {"margin": _margin, "log_odds": _log_odds}
    function = of_name[measurement] if isinstance(measurement, str) else measurement

    def gradient(f: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            f = at_least_float32(f).detach().requires_grad_()
            m = function(f, y)
            if m.shape != f.shape[:1]:
                raise ValueError(
                    f"The measurement of {len(f)} queries has shape {tuple(m.shape)}, but must be "
                    f"one number for each query ({len(f)},). Choose one token, or sum over tokens."
                )
            return torch.autograd.grad(m.sum(), f)[0]

    return gradient


def _others(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of the label (q,), and the outputs with -inf in its place (q, C)."""
    if f.dim() != 2:
        raise ValueError(
            f"margin and log_odds need outputs (N, C), not {tuple(f.shape)}. Pass a function of "
            "outputs and targets that returns one number for each example."
        )
    index = y.long()[:, None]
    return f.gather(1, index)[:, 0], f.scatter(1, index, -torch.inf)


def _margin(f: Tensor, y: Tensor) -> Tensor:
    own, others = _others(f, y)
    return own - others.amax(1)


def _log_odds(f: Tensor, y: Tensor) -> Tensor:
    own, others = _others(f, y)
    return own - others.logsumexp(1)


def loss_gradient(f: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """Return ∇_f ℓ at σ = T = 1, with zeros at terms that do not count."""
    gradient = likelihood.gradient(at_least_float32(f.detach()), y)
    counted = counted_terms(y, likelihood)
    return gradient if counted is None else gradient.masked_fill(~counted[..., None], 0.0)


# --- sinks ---


class _ByParameter(HeldGradients):
    """Pass on each batch's gradients by parameter, for one vector or all vectors of the GGN.

    Args:
        spectra: the blocks.
        some_examples: whether a layer's examples may come in parts.
    """

    some_examples = True

    def __init__(self, spectra: PosteriorPrecision) -> None:
        self._spectra = spectra

    def start(self, assignment: RuleAssignment, kfac_approx: KfacApprox) -> None:
        """Begin without gradients."""
        if assignment.diagonal:
            raise NotImplementedError(
                f"Parameter '{assignment.diagonal[0]}' has no K-FAC rule, which influence needs. "
                "Freeze it (requires_grad_(False)) before the fit, or register a rule (see "
                "kfac_backend.layers)."
            )
        super().__init__(LayerGradients(assignment, self._spectra))

    def batch_done(self, f: Tensor, y: Tensor) -> None:
        """Pass on the gradients, and drop them."""
        most = DENSE_BYTES if self.some_examples else None
        self.begin_batch(len(f))
        for subset, gradients in self.gradients.by_parameter(self.take(), self.uses, most):
            self.add(subset, gradients)
        self.forget()

    def begin_batch(self, number: int) -> None:
        """Called before all gradients of a batch with this number of examples."""

    def add(self, subset: slice, gradients: ParameterGradients) -> None:
        """Receive the gradients of some of the batch's examples for one parameter."""
        raise NotImplementedError


class _QueryGradients(_ByParameter):
    """Collect the gradients of the queries' measurements, (q, P) for each parameter."""

    def __init__(self, spectra: PosteriorPrecision, measure: Measure) -> None:
        super().__init__(spectra)
        self._measure = measure
        self.gradients_of: Gradients = {}

    def vectors(self, of_fisher: Any, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Yield one vector, the measurements' gradient at the outputs."""
        yield self._measure(f.detach(), y)

    def begin_batch(self, number: int) -> None:
        """Begin with zeros, for parameters that no vector reaches."""
        self.gradients_of = {
            name: spectrum.new_zeros(number, eigen.numel)
            for name, (eigen, spectrum) in self._spectra.items()
        }

    def add(self, subset: slice, gradients: ParameterGradients) -> None:
        """Write the gradients into their rows and columns."""
        g = gradients.dense()[:, 0]
        columns = slice(gradients.slot * g.shape[1], (gradients.slot + 1) * g.shape[1])
        self.gradients_of[gradients.name][subset, columns] += g


class _Contraction(_ByParameter):
    """Sum ⟨S_q, training gradient⟩ over parameters, batch by batch."""

    def __init__(self, systems: _Systems, solved: Gradients) -> None:
        super().__init__(systems.spectra)
        self._systems, self._solved = systems, solved
        self.scores: list[Float[Tensor, "Q n"]] = []
        """Scores of each batch, on the CPU."""
        self.skip = 0
        """Number of the next batch's examples whose scores are known."""
        self.save: Callable[[list[Tensor]], None] = lambda scores: None
        """Function that may move the scores to a store."""

    def vectors(self, of_fisher: Any, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Yield one vector, the gradient of the objective's training loss, at σ and T."""
        yield self._systems.scale * loss_gradient(f, y, self._systems.likelihood)

    def begin_batch(self, number: int) -> None:
        """Begin with zeros."""
        solved = next(iter(self._solved.values()))
        self._batch = solved.new_zeros(len(solved), number)

    def add(self, subset: slice, gradients: ParameterGradients) -> None:
        """Add one parameter's part."""
        S = _of_slot(self._solved[gradients.name], gradients)
        self._batch[:, subset] += _Products([gradients]).inner([S])[:, :, 0]

    def batch_done(self, f: Tensor, y: Tensor) -> None:
        """Store the batch's scores."""
        super().batch_done(f, y)
        self.scores.append(self._batch[:, self.skip :].cpu())
        self.save(self.scores)


class _Rows(_ByParameter):
    """Store the gradients of the GGN's vectors, as inputs and output gradients of all examples."""

    some_examples = False

    def __init__(self, spectra: PosteriorPrecision) -> None:
        super().__init__(spectra)
        self.batches: list[list[ParameterGradients]] = []
        """Gradients of all parameters, for each batch."""
        self._bytes = 0

    def begin_batch(self, number: int) -> None:
        """Begin another batch."""
        self.batches.append([])

    def add(self, subset: slice, gradients: ParameterGradients) -> None:
        """Store the rows."""
        uses = (t for use, _ in gradients.uses for t in use if t is not None)
        self._bytes += sum(t.nbytes for t in uses)
        if self._bytes > ROW_BYTES:
            raise MemoryError(
                f"The exact blocks would store more than {ROW_BYTES >> 30} GiB of inputs and "
                "output gradients. Pass curvature='ekfac', which stores none."
            )
        self.batches[-1].append(gradients)


class _Products:
    """Products with the rows g_nv of some parameters' gradients, of the same n examples.

    Args:
        gradients: one for each parameter, or part of a parameter.
    """

    def __init__(self, gradients: list[ParameterGradients]) -> None:
        self._gradients = gradients
        _, self._n, _, self._V, _ = gradients[0].uses[0][0].b.shape

    def inner(self, S: list[Tensor]) -> Float[Tensor, "Q n V"]:
        """Return Σ over parameters of ⟨S_q, g_nv⟩, from S (Q, P) of each."""
        total = S[0].new_zeros(len(S[0]), self._n, self._V)
        for own, gradients in zip(S, self._gradients, strict=True):
            if (factored := _one_position(gradients)) is not None:
                # ⟨S, b aᵀ⟩ = bᵀ (S a), without the outer product.
                b, a, transposed = factored
                Sa = _matrices(own, gradients, transposed) @ a.mT  # (Q, G, d_out, n)
                total += torch.einsum("gnvo,qgon->qnv", b, Sa)
                continue
            for some, dense in _dense(gradients):
                total[:, some] += (own @ dense.flatten(0, 1).mT).unflatten(1, dense.shape[:2])
        return total

    def outer(self, c: Float[Tensor, "Q n V"]) -> list[Tensor]:
        """Return Σ_n Σ_v c_qnv g_nv in each parameter, (Q, P)."""
        sums = []
        for gradients in self._gradients:
            P = gradients.spectrum.numel()
            if (factored := _one_position(gradients)) is not None:
                b, a, transposed = factored
                weighted = torch.einsum("qnv,gnvo->qgon", c, b)
                matrices = weighted @ a  # (Q, G, d_out, d_in)
                sums.append((matrices.mT if transposed else matrices).reshape(len(c), P))
                continue
            total = c.new_zeros(len(c), P)
            for some, dense in _dense(gradients):
                total += c[:, some].flatten(1) @ dense.flatten(0, 1)
            sums.append(total)
        return sums


def _one_position(gradients: ParameterGradients) -> tuple[Tensor, Tensor, bool] | None:
    """Return factors b (G, n, V, d_out) and a (G, n, d_in) of gradients b aᵀ; None for others."""
    (use, transposed), *others = gradients.uses
    if others or use.a is None or use.b.shape[2] != 1:
        return None
    return use.b[:, :, 0], use.a[:, :, 0].to(use.b.dtype), transposed


def _matrices(
    S: Float[Tensor, "Q P"], gradients: ParameterGradients, transposed: bool
) -> Float[Tensor, "Q G d_out d_in"]:
    """Return flat parameters as matrices."""
    use, _ = gradients.uses[0]
    assert use.a is not None
    G, d_out, d_in = len(use.b), use.b.shape[-1], use.a.shape[-1]
    S = S.reshape(len(S), G, *((d_in, d_out) if transposed else (d_out, d_in)))
    return S.mT if transposed else S


def _dense(gradients: ParameterGradients) -> Iterator[tuple[slice, Float[Tensor, "n V P"]]]:
    """Yield the dense gradients, a few examples at a time."""
    use, _ = gradients.uses[0]
    _, n, _, V, _ = use.b.shape
    size = max(1, DENSE_BYTES // (V * gradients.spectrum.numel() * use.b.element_size()))
    for start in range(0, n, size):
        some = slice(start, start + size)
        yield some, gradients.dense(some)


def _of_slot(S: Float[Tensor, "Q P"], gradients: ParameterGradients) -> Float[Tensor, "Q p"]:
    """Return the part of a tensor's vectors that belongs to one of its maps."""
    p = gradients.spectrum.numel()
    return S[:, gradients.slot * p : (gradients.slot + 1) * p]


# --- queries, and the systems (H + P) S = ∇m ---


def _query_gradients(
    systems: _Systems, queries: Iterator[Any], measure: Measure, most_bytes: int
) -> tuple[Gradients, int]:
    """Return gradients (Q, P) of the next queries that fit into the bytes, in how many batches."""
    of_query = sum(s.numel() * s.element_size() for _, s in systems.spectra.values())
    waiting, number = list[Gradients](), 0
    for batch in queries:
        sink = _QueryGradients(systems.spectra, measure)
        systems.run(sink, [batch], "Query gradients", False)
        waiting.append(sink.gradients_of)
        number += len(next(iter(sink.gradients_of.values())))
        if number * of_query >= most_bytes:
            break
    joined = {name: torch.cat([part[name] for part in waiting]) for name in waiting[0]}
    return joined, len(waiting)


def _precondition(gradients: Gradients, spectra: PosteriorPrecision) -> Gradients:
    """Solve the systems by eigenvectors."""
    solved = {}
    for name, v in gradients.items():
        eigen, spectrum = spectra[name]
        solved[name] = eigen.power_matvec(v, spectrum, -1.0)
    return solved


class _ExactBlock:
    """One block of H/(σ²T) + P over some tensors, from the stored rows of their gradients.

    Args:
        names: the tensors.
        rows: rows of this rank's training examples.
        systems: the systems; the EKFAC blocks of the tensors precondition.
    """

    def __init__(self, names: list[str], rows: _Rows, systems: _Systems) -> None:
        self._names, self._spectra, self._delta = names, systems.spectra, systems.delta
        self._scale, self._ranks = systems.scale, systems.ranks
        batches = ([g for g in batch if g.name in names] for batch in rows.batches)
        self._batches = [batch for batch in batches if batch]

    def solve(self, gradients: Gradients) -> Gradients:
        """Return the solutions for query gradients."""
        b = torch.cat([gradients[name] for name in self._names], 1)
        x = conjugate_gradients(self._matvec, self._precondition, b, ", ".join(self._names))
        return self._split(x)

    def _matvec(self, v: Tensor) -> Tensor:
        parts = self._split(v)
        Hv = {name: torch.zeros_like(part) for name, part in parts.items()}
        for batch in self._batches:
            products = _Products(batch)
            c = self._scale * products.inner([_of_slot(parts[g.name], g) for g in batch])
            for g, added in zip(batch, products.outer(c), strict=True):
                _of_slot(Hv[g.name], g).add_(added)
        self._ranks.sum_(Hv.values())
        return torch.cat([Hv[name] + self._delta[name] * parts[name] for name in parts], 1)

    def _precondition(self, v: Tensor) -> Tensor:
        return torch.cat([*_precondition(self._split(v), self._spectra).values()], 1)

    def _split(self, v: Tensor) -> Gradients:
        sizes = [self._spectra[name][0].numel for name in self._names]
        return dict(zip(self._names, v.split(sizes, 1), strict=True))


def conjugate_gradients(
    matvec: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    b: Float[Tensor, "Q P"],
    name: str = "the system",
) -> Float[Tensor, "Q P"]:
    """Return solutions x of M x = b for each row, to a residual of √ε of b.

    Args:
        matvec: M v for rows v, M symmetric and positive definite.
        precondition: an approximation of M⁻¹ v, symmetric and positive definite.
        b: right-hand sides.
        name: name of the system, for the warning.
    """
    tolerance = torch.finfo(b.dtype).eps ** 0.5 * b.norm(dim=1)
    x, r = torch.zeros_like(b), b.clone()
    z = precondition(r)
    p, rz = z, (r * z).sum(1, keepdim=True)
    for _ in range(MOST_ITERATIONS):
        active = r.norm(dim=1) > tolerance
        if not active.any():
            return x
        q = matvec(p)
        # Solved rows stay unchanged: their directions are zero, or would divide zero by zero.
        alpha = torch.where(active[:, None], rz / (p * q).sum(1, keepdim=True), 0.0)
        x, r = x + alpha * p, r - alpha * q
        z = precondition(r)
        before, rz = rz, (r * z).sum(1, keepdim=True)
        p = z + torch.where(active[:, None], rz / before, 0.0) * p
    worst = float((r.norm(dim=1) / b.norm(dim=1).clamp(min=1e-300)).max())
    warnings.warn(
        f"The conjugate gradients of {name} have a relative residual of {worst:.1e} after "
        f"{MOST_ITERATIONS} iterations, so the scores have errors of this size. Pass a larger "
        "damping.",
        RuntimeWarning,
        stacklevel=2,
    )
    return x
