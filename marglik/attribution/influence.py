"""Compute the influence of training examples on predictions.

I(q, n) = ∇m(q)ᵀ (H + P)⁻¹ ∇ℓ_n is, to first order, the change of measurement m of query q if
training example n is left out. H + P is the posterior's precision, block by block. The learned
prior precisions replace the damping that other tools ask for. Two passes compute the scores. The
first one computes the gradients of the queries, and solves (H + P) S_q = ∇m(q). The second one
computes the inner products of each S_q with the training gradients. It stores no training gradient:
it computes the products of a few examples at a time, from the inputs and output gradients of the
layers.

The exact blocks of the GGN are H_b = Σ_n Σ_v g_nv g_nvᵀ, from the stored inputs and output
gradients of all training examples. Block conjugate gradients solve the systems of these blocks for
all queries together, with the EKFAC block as the preconditioner. They use the eigenbasis of the
factors, in which the EKFAC block is diagonal. If the vectors v are random draws, H_b is a noisy
estimate. It is then replaced by a weighted mean of H_b and the EKFAC block, see `noise_share`.

Sources: Koh & Liang 2017 (arXiv:1703.04730); Grosse et al. 2023 (arXiv:2308.03296) for EKFAC;
Ledoit & Wolf 2004 (Journal of Multivariate Analysis 88) for means with a structured matrix;
Dubrulle 2001 (ETNA 12) for block conjugate gradients.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from kfac_backend.atomic_files import sha256_of_tensors
from kfac_backend.blocks.block import decompose
from kfac_backend.covariance.contraction import in_basis
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
from kfac_backend.fisher import ExactGGN, Fisher
from kfac_backend.likelihoods import Likelihood, counted_terms
from kfac_backend.options import (
    KfacApprox,
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
"""Maximum number of bytes of inputs and output gradients that exact blocks store, and of gradients
that they form from these once."""
DENSE_BYTES = 32 * 2**20
"""Maximum number of bytes of dense gradients in memory at the same time."""
MOST_VECTORS = 1000
"""Maximum number of the GGN's vectors of an example that replace random signs."""
TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-8}
"""Relative residual of solutions, and about the relative error of scores, of exact blocks.

In `experiments.attribution`, 1e-2 changes the quality of the scores by at most 0.0001."""
MOST_TOGETHER = 64
"""Maximum number of queries that conjugate gradients solve together."""
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
    """Return scores I(q, n): the change of query q's measurement without training example n.

    A training example with a large positive I for the loss of q supports the label of q: without
    it, the loss rises. The columns follow the order of ``train``. ``scores.topk(5)`` has the five
    most helpful examples of each query. For an output of linear regression (one `Linear` layer,
    damping="evidence"), the true change is exactly I / (1 − h_n), with the leverage h_n of example
    n. For a loss, the score is a first-order estimate.

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
            signs. Random draws take their place if the posterior has fisher="mc", or if an example
            has more than 1,000 vectors of the GGN. The blocks are then weighted means with the
            EKFAC blocks, which have less noise. With fisher="empirical" the blocks belong to that
            matrix. "ekfac" uses the eigenvalue-corrected blocks of the posterior's factors, and
            "kfac" the plain ones.
        blocks: "layer" for one block of all tensors of a module, such as weight and bias (only for
            "exact"); "tensor" for one block per parameter tensor. None uses "layer" for "exact" and
            "tensor" for the others.
        damping: "evidence" uses the posterior's prior precision δ of each tensor. "auto" also uses
            δ, but 3 δ for regression, which predicts better how the loss changes without half of
            the examples (measured, see `experiments.attribution`). "relative" uses 0.1 times the
            mean eigenvalue of each tensor's block instead. A number replaces δ for all tensors.
            Like δ it belongs to the loss summed over the data.
        progress: whether to show progress bars.
        store: folder for the products (H + P)⁻¹ ∇m(q) and the scores of each GiB of query
            gradients. Another call with the same arguments continues from there. None stores
            nothing.

    Returns:
        Scores (Q, N), on the CPU.

    Raises:
        TypeError: training data that can be read only once.
        ValueError: options, training data, weights or a measurement that are not supported or do
            not fit the posterior; a store of another computation; ranks with different queries.
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
                    "the solver": "block conjugate gradients",
                }
                saved = ScoreStore(store, identity, train, posterior.options, ranks)
        left, scores = iter(each_batch(queries, "Query gradients", progress)), []
        for chunk in count():
            if (first := next(left, None)) is None:
                break
            left = chain([first], left)
            own, batches = saved.scores(chunk) if saved else (None, 0)
            if not ranks.any(own is None, systems.device):
                next(islice(left, batches - 1, None), None)  # skip these queries
            else:
                gradients, batches = _query_gradients(systems, left, measure, QUERY_BYTES)
                solved = saved.solved(chunk, systems.device) if saved else None
                if ranks.any(solved is None, systems.device):
                    solved = systems.solve(gradients)
                    if saved is not None:
                        saved.save_solved(chunk, solved)
                contraction = _Contraction(systems, solved or {})
                systems.run(contraction, train, "Scores", progress)
                own = torch.cat(contraction.of_batches, 1)
                if saved is not None:
                    saved.save_scores(chunk, own, batches)
            assert own is not None
            scores.append(_of_all_ranks(own, ranks, systems.device))
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
    """Return I(n, n): the change of training example n's own loss if it is left out, in nats.

    The network fits an example with a large value only because it was trained on it. Its label is
    often wrong, or the example is unlike all others. The values are the diagonal of the scores of
    `influence`, without a pass over the data for each chunk of queries.

    Args:
        posterior: the fitted posterior, at the network's weights.
        train: the data of the fit, as for `influence`, in batches whose gradients fit into memory.
            With "kfac", and with "ekfac" for a posterior with corrected eigenvalues, it may be a
            part of this data.
        curvature: "exact" solves a system for each example, and needs a single rank.
        blocks: as for `influence`.
        damping: as for `influence`.
        progress: whether to show progress bars.

    Returns:
        Values (N,), on the CPU. The errors are those of `influence`.
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
        values = [posterior.mean.new_zeros(0, device="cpu")]
        for batch in each_batch(systems.batches(train), "Self-influence", progress):
            gradients, _ = _query_gradients(systems, iter([batch]), measure, 0)
            solved = systems.solve(gradients)
            inner = torch.stack([(g * solved[name]).sum(1) for name, g in gradients.items()])
            values.append(inner.sum(0).cpu() / posterior.temperature)
    return _of_all_ranks(torch.cat(values)[None], ranks, posterior.mean.device)[0]


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


def _of_all_ranks(own: Tensor, ranks: Ranks, device: torch.device) -> Float[Tensor, "Q N"]:
    """Return the columns of all ranks in order, from the columns of each rank; collective."""
    if ranks.size == 1:
        return own
    columns = ranks.gather(own.shape[1])
    every = [own.new_empty(len(own), number, device=device) for number in columns]
    every[ranks.rank] = own.to(device)
    ranks.exchange_((part, rank) for rank, part in enumerate(every))
    return torch.cat(every, 1).cpu()


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
        model, sizes = posterior.model, self.factors.blocks
        # Over the parameters with a posterior, on this process alone.
        self._driver = Driver(
            model, self.likelihood, posterior.options.replace(kfac_approx="expand"),
            generator=posterior.generator, process_group=None,
            assignment=assignment_of_blocks(model, {n: one.numel for n, one in sizes.items()}),
        )  # fmt: skip
        self.delta: dict[str, float] = {}
        """P of each tensor."""

    @cached_property
    def spectra(self) -> PosteriorPrecision:
        """Eigenvectors and eigenvalues of H/(σ²T) + P; they precondition exact blocks."""
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
    def _exact_solvers(self) -> list[Callable[[Gradients], Gradients]]:
        """Solvers of the exact blocks, from the rows of this rank's training examples."""
        rows = _Rows(self.spectra, self._posterior.options.make_fisher(), self.likelihood)
        self.run(rows, self._train, "Rows of the exact blocks", self._progress)
        blocks: dict[str, list[str]] = {}
        for name in self.spectra:
            block = name.rpartition(".")[0] if self._blocks == "layer" else name
            blocks.setdefault(block, []).append(name)
        return [_exact_solver(names, rows, self) for names in blocks.values()]

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
        for solver in self._exact_solvers:
            solved |= solver(gradients)
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
        summary = torch.amax if measurement == "margin" else torch.logsumexp
        measurement = partial(_label_minus_others, summary=summary)

    def gradient(f: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            f = at_least_float32(f).detach().requires_grad_()
            m = measurement(f, y)
            if m.shape != f.shape[:1]:
                raise ValueError(
                    f"The measurement of {len(f)} queries has shape {tuple(m.shape)}, but must be "
                    f"one number for each query ({len(f)},). Choose one token, or sum over tokens."
                )
            return torch.autograd.grad(m.sum(), f)[0]

    return gradient


def _label_minus_others(f: Tensor, y: Tensor, summary: Callable[..., Tensor]) -> Tensor:
    """Return the output of the label minus a summary of the other outputs, (q,)."""
    if f.dim() != 2:
        raise ValueError(
            f"margin and log_odds need outputs (N, C), not {tuple(f.shape)}. Pass a function of "
            "outputs and targets that returns one number for each example."
        )
    index = y.long()[:, None]
    return f.gather(1, index)[:, 0] - summary(f.scatter(1, index, -torch.inf), 1)


def loss_gradient(f: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """Return ∇_f ℓ at σ = T = 1, with zeros at terms that do not count."""
    gradient = likelihood.gradient(at_least_float32(f.detach()), y)
    counted = counted_terms(y, likelihood)
    return gradient if counted is None else gradient.masked_fill(~counted[..., None], 0.0)


# --- sinks ---


class _ByParameter(HeldGradients):
    """Pass on each batch's gradients by parameter, for one vector or all vectors of the GGN.

    A layer's examples may come in parts if ``some_examples``.
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
        self.of_batches = [next(iter(solved.values()))[:, :0].cpu()]
        """Scores (Q, n) of each batch, on the CPU."""

    def vectors(self, of_fisher: Any, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Yield one vector, the gradient of the objective's training loss, at σ and T."""
        yield self._systems.scale * loss_gradient(f, y, self._systems.likelihood)

    def begin_batch(self, number: int) -> None:
        """Begin with zeros."""
        solved = next(iter(self._solved.values()))
        self._batch = solved.new_zeros(len(solved), number)

    def add(self, subset: slice, gradients: ParameterGradients) -> None:
        """Add one parameter's part."""
        rows = _GradientRows(gradients)
        self._batch[:, subset] += rows.inner(self._solved[gradients.name])[:, 0].mT

    def batch_done(self, f: Tensor, y: Tensor) -> None:
        """Store the batch's scores."""
        super().batch_done(f, y)
        self.of_batches.append(self._batch.cpu())


class _Rows(_ByParameter):
    """Store the gradients of the GGN's vectors, as inputs and output gradients of all examples."""

    some_examples = False

    def __init__(self, spectra: PosteriorPrecision, fisher: Fisher, likelihood: Likelihood) -> None:
        super().__init__(spectra)
        self._fisher, self._likelihood = fisher, likelihood
        self.are_drawn = False
        """Whether the vectors of a batch were random draws."""
        self.batches: list[list[_GradientRows]] = []
        """Gradients of all parameters, for each batch."""
        self._bytes = self._formed_bytes = 0

    def vectors(self, of_fisher: Any, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Return the vectors of the posterior's curvature, or all of the GGN's for random signs.

        A learner uses random signs to save time.
        """
        exact, f = ExactGGN(), f.detach()
        is_short = exact.num_passes(self._likelihood, f) <= MOST_VECTORS
        if self._fisher.name == "random_signs" and is_short:
            return exact.vectors(self._likelihood, f, y)
        self.are_drawn |= self._fisher.draws
        return of_fisher(f, y)

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
        rows = _GradientRows(in_basis(gradients), ROW_BYTES - self._formed_bytes)
        self._formed_bytes += rows.formed_bytes
        self.batches[-1].append(rows)


class _GradientRows:
    """Gradients g_nv of n examples in one parameter, or in one of its maps.

    With a single position they are b aᵀ, and products with them never form the outer product.
    Gradients of several positions, Σ_r b_r a_rᵀ, are formed once if they take at most
    ``most_bytes``, and otherwise in each product, for a few examples at a time.
    """

    def __init__(self, gradients: ParameterGradients, most_bytes: int = 0) -> None:
        P, (use, transposed) = gradients.spectrum.numel(), gradients.uses[0]
        self.name, self.formed_bytes = gradients.name, 0
        _, self.n, _, self.V, _ = use.b.shape
        self._columns = slice(gradients.slot * P, (gradients.slot + 1) * P)
        self._factors = None
        if len(gradients.uses) == 1 and use.a is not None and use.b.shape[2] == 1:
            b, a = use.b[:, :, 0], use.a[:, :, 0].to(use.b.dtype)  # (G, n, V, d_out), (G, n, d_in)
            sides = (b.shape[-1], a.shape[-1])
            self._factors = b, a, (len(b), *(sides[::-1] if transposed else sides))
            self._order = "io" if transposed else "oi"
            return
        of_example = self.V * P * use.b.element_size()
        self._size = max(1, DENSE_BYTES // of_example)
        parts = [slice(start, start + self._size) for start in range(0, self.n, self._size)]
        self._dense: Callable[[], Iterable[Tensor]] = lambda: map(gradients.dense, parts)
        if self.n * of_example <= most_bytes:
            dense, self.formed_bytes = [*self._dense()], self.n * of_example
            self._dense = lambda: dense

    def inner(self, S: Float[Tensor, "Q P"]) -> Float[Tensor, "n V Q"]:
        """Return ⟨S_q, g_nv⟩ for vectors S of the whole parameter."""
        S = S[:, self._columns]
        if self._factors is not None:
            b, a, shape = self._factors
            Sa = torch.einsum(f"gni,qg{self._order}->gnqo", a, S.unflatten(1, shape))
            return torch.einsum("gnvo,gnqo->nvq", b, Sa)
        return torch.cat(
            [(g.flatten(0, 1) @ S.mT).unflatten(0, g.shape[:2]) for g in self._dense()]
        )

    def add_outer(self, c: Float[Tensor, "n V Q"], sums: Float[Tensor, "Q P"]) -> None:
        """Add Σ_n Σ_v c_nvq g_nv to sums of the whole parameter."""
        sums = sums[:, self._columns]
        if self._factors is not None:
            b, a, _ = self._factors
            cb = torch.einsum("nvq,gnvo->gnqo", c, b)
            sums += torch.einsum(f"gnqo,gni->qg{self._order}", cb, a).flatten(1)
            return
        for part, g in zip(c.split(self._size), self._dense(), strict=True):
            sums.addmm_(part.flatten(0, 1).mT, g.flatten(0, 1))


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


def _exact_solver(
    names: list[str], rows: "_Rows", systems: _Systems
) -> Callable[[Gradients], Gradients]:
    """Return the function that solves one exact block c H + D over some tensors.

    c = 1/(σ²T) and D = P. For drawn rows, c = (1 − w)/(σ²T) and D = w E/(σ²T) + P, with the EKFAC
    block E of each tensor and w from `noise_share`. In the eigenbasis of E, E and D are diagonal.
    Conjugate gradients solve for x = (E/(σ²T) + P)^½ S, so that E is the preconditioner.
    """
    own = ([g for g in batch if g.name in names] for batch in rows.batches)
    batches = [batch for batch in own if batch]
    eigen = {name: systems.spectra[name][0] for name in names}
    sizes = [one.numel for one in eigen.values()]
    spectra = [systems.spectra[name][1].flatten() for name in names]  # of E/(σ²T) + P
    root = torch.cat(spectra).rsqrt()
    prior = torch.cat([systems.delta[n] / s for n, s in zip(names, spectra, strict=True)])
    w = 0.0
    if systems.ranks.any(rows.are_drawn, systems.device):
        M = sum(batch[0].n * batch[0].V for batch in batches)
        w = noise_share(1 - prior, sum(systems.ranks.gather(M)))
    scale, diagonal = (1 - w) * systems.scale, w + (1 - w) * prior

    def matvec(x: Tensor) -> Tensor:
        # Contiguous, or each batch would copy them.
        parts = [part.contiguous() for part in (root * x).split(sizes, 1)]
        of_name = dict(zip(names, parts, strict=True))
        Hx = {name: torch.zeros_like(part) for name, part in of_name.items()}
        for batch in batches:
            c = scale * torch.stack([g.inner(of_name[g.name]) for g in batch]).sum(0)
            for g in batch:
                g.add_outer(c, Hx[g.name])
        systems.ranks.sum_(Hx.values())
        return root * torch.cat([*Hx.values()], 1) + diagonal * x

    def solve(gradients: Gradients) -> Gradients:
        b = root * torch.cat([one.rotate(gradients[n]).flatten(1) for n, one in eigen.items()], 1)
        parts = b.split(MOST_TOGETHER)
        x = torch.cat([conjugate_gradients(matvec, part, ", ".join(names)) for part in parts])
        S = (root * x).split(sizes, 1)
        return {n: one.rotate_back(part) for (n, one), part in zip(eigen.items(), S, strict=True)}

    return solve


def noise_share(shares: Float[Tensor, " P"], number: int) -> float:
    """Return the weight w of the EKFAC block E in a block (1 − w) H + w E; H is from drawn rows.

    This weight has the smallest expected squared error, relative to the precision E + P, under two
    assumptions: the noise of H is (Σ s)² / number, as for independent Gaussian rows with many
    directions, and the true block differs from E by Σ s², the squared norm of E.

    Args:
        shares: s = λ/(λ + δ) of the eigenvalues λ of E.
        number: number of rows, over all ranks.
    """
    noise = float(shares.double().sum()) ** 2 / number
    return noise / (noise + float(shares.double().square().sum())) if noise else 0.0


def conjugate_gradients(
    matvec: Callable[[Tensor], Tensor], b: Float[Tensor, "Q P"], name: str = "the system"
) -> Float[Tensor, "Q P"]:
    """Return solutions x of M x = b for all rows together, M symmetric and positive definite.

    The relative residual of each row is at most `TOLERANCE`. Each row uses the search directions of
    all rows, so it needs fewer iterations than alone. The algorithm (BCGrQ of Dubrulle 2001) keeps
    an orthonormal basis of the residuals. It is stable if rows are dependent, zero or solved early.
    """
    x, norms = torch.zeros_like(b), b.norm(dim=1)
    basis, R = torch.linalg.qr(b.mT)
    basis, C = basis.mT, R.mT  # (k, P) and (Q, k): the residuals are C basis
    directions = basis
    for _ in range(MOST_ITERATIONS):
        if not (C.norm(dim=1) > TOLERANCE[b.dtype] * norms).any():
            return x
        products = matvec(directions)
        step = torch.linalg.inv(directions @ products.mT)
        x.addmm_(C @ step, directions)
        basis, R = torch.linalg.qr(torch.addmm(basis, step, products, alpha=-1).mT)
        basis, C = basis.mT, C @ R.mT
        directions = torch.addmm(basis, R, directions)
    worst = float((C.norm(dim=1) / norms.clamp(min=1e-300)).max())
    warnings.warn(
        f"The conjugate gradients of {name} have a relative residual of {worst:.1e} after "
        f"{MOST_ITERATIONS} iterations, so the scores have errors of this size. Pass a larger "
        "damping.",
        RuntimeWarning,
        stacklevel=2,
    )
    return x
