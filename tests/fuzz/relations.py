"""What must hold for every case, whatever its numbers are.

A relation is a function of a case that raises where it does not hold. Where the product says in an
error of its own words that it does not take a case, and at once (`or_refused`), the case is
Refused. Any other error is a violation.
"""

import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Optimizer

from kfac_backend import KroneckerFactors, corrected_factors, kronecker_factors
from kfac_backend.likelihoods import IGNORED, likelihood_of
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from marglik import (
    OnlineTraining,
    Posterior,
    PriorLearner,
    Schedule,
    load_posterior,
    marglik_training,
    save_posterior,
)
from tests.fuzz.cases import (
    Built,
    Case,
    Impossible,
    Layer,
    Mix,
    Network,
    check_runs,
    inputs_of,
    loader,
    outputs,
    targets_of,
)
from tests.fuzz.strategies import LEARNED, OF_OUTPUTS, cases
from tests.oracles import jacobian_of, kfac_blocks_from_uses, packs
from tests.uses import uses_of

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


class Refused(Exception):
    """The product has said in its own words that it does not take a case."""


class Violated(AssertionError):
    """A relation does not hold."""


@dataclass(frozen=True)
class Relation:
    """A relation, the cases that it is tried on, and how many of them in the default suite.

    With 0 it is tried by ``python -m tests.fuzz`` alone.
    """

    check: Callable[[Any], None]
    strategy: st.SearchStrategy[Any]
    examples: int

    @property
    def name(self) -> str:
        return self.check.__name__


RELATIONS: dict[str, Relation] = {}
ONE, TWO, SEVERAL = (1, 1), (1, 2), (2, 3)
"""Numbers of batches."""
MODES = ("expand", "reduce")


def relation(examples: int, **drawn: Any) -> Callable[[T], T]:
    """A decorator of relations, whose cases are drawn with these options of `cases`."""

    def register(check: Any) -> Any:
        RELATIONS[check.__name__] = Relation(check, cases(**drawn), examples)
        return check

    return register


def or_refused(function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """What a call returns; Refused if it ends with an error of the product's own words."""
    try:
        return function(*arguments, **keywords)
    except (NotImplementedError, TypeError, ValueError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not raised_in.is_relative_to(ROOT) or raised_in.is_relative_to(ROOT / "tests"):
            raise
        raise Refused(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error


def same(what: str, found: Any, expected: Any, scale: float = 0.0, rtol: float = 1e-8) -> None:
    """Raise Violated unless two tensors are equal up to the rounding of numbers of this scale."""
    found, expected = (torch.as_tensor(t).detach().double() for t in (found, expected))
    if found.shape != expected.shape:
        raise Violated(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not expected.numel():
        return
    size, error = expected.abs().max(), (found - expected).abs().max()
    if not error <= rtol * (size + 1e-3 * max(scale, 1e-3)):
        raise Violated(f"{what}: differs by {error:.3g}, where the largest entry is {size:.3g}")


def same_factors(found: KroneckerFactors, expected: KroneckerFactors) -> None:
    """All factors and counts, in their order; the names may differ."""
    if len(found.blocks) != len(expected.blocks):
        raise Violated(f"blocks: {list(found.blocks)}, not {list(expected.blocks)}")
    scale = max(float(block.B.abs().max()) for block in expected.blocks.values())
    for mine, theirs in zip(found.blocks.values(), expected.blocks.values(), strict=True):
        if not theirs.num_terms and theirs.A is not None:  # of a weight used in two ways
            same(f"the block of '{theirs.name}'", mine.to_dense(), theirs.to_dense(), 1.0)
            continue
        same(f"B of '{theirs.name}'", mine.B, theirs.B, scale)
        if theirs.A is not None:
            same(f"A of '{theirs.name}'", mine.A, theirs.A, 1.0)
    for name in ("num_data", "num_loss_terms", "loss"):
        same(name, float(getattr(found, name)), float(getattr(expected, name)))


def factors_of(made: Built, batches: Any = None, **options: Any) -> KroneckerFactors:
    """The factors of a case, or of other batches; or Refused."""
    batches = made.batches if batches is None else batches
    with warnings.catch_warnings():
        # A function's layer without a gradient is not followed, where a module's has its hook.
        warnings.filterwarnings("error", "These layers are no part of the forward pass")
        try:
            return or_refused(
                kronecker_factors, made.model, batches, made.likelihood, made.options, **options
            )
        except UserWarning as warning:
            raise Refused(str(warning)) from warning


def one_by_one(made: Built) -> KroneckerFactors:
    """The sum of the factors of each batch, or Refused."""
    first, *others = (factors_of(made, [batch]) for batch in made.batches)
    return or_refused(sum, others, first)


def network_of(model: nn.Module) -> Network:
    """The network itself, without what averages copies."""
    return next(m for m in model.modules() if isinstance(m, Network))


# --- sums over batches ---


@relation(40, batches=SEVERAL, approx=MODES, pads=(True, True, True, False), layers=2)
def batches_add_up(case: Case) -> None:
    """The factors of several batches are the sum of those of each batch alone."""
    made = case.build()
    same_factors(factors_of(made), one_by_one(made))


@relation(8, batches=SEVERAL, approx=(*MODES, "head reduce"))
def batches_are_of_any_size(case: Case) -> None:
    """If no example depends on its batch, one batch has the factors of several."""
    made, data = case.build(), replace(case.data, sizes=(sum(case.data.sizes),))
    if not case.depends_on_batches:
        same_factors(factors_of(made), factors_of(replace(case, data=data).build()))


@relation(8, batches=TWO)
def examples_come_in_any_order(case: Case) -> None:
    """The factors do not depend on the order of the examples of a batch."""
    made, g = case.build(), torch.Generator().manual_seed(case.dice)

    def turned(batch: Any) -> Any:
        order = torch.randperm(len(targets_of(batch)), generator=g)
        if isinstance(batch, dict):
            return {key: t[order] for key, t in batch.items()}
        return tuple(t[order] for t in batch)

    same_factors(factors_of(made, [turned(batch) for batch in made.batches]), factors_of(made))


@relation(8, batches=SEVERAL)
def loaders_are_lists(case: Case) -> None:
    """A loader that is read once, or that has one memory, gives the factors of a list."""
    made = case.build()
    same_factors(factors_of(made, loader(made.batches, case.data.loader)), factors_of(made))


# --- one model in several forms ---


def thirds(names: list[str], dice: int) -> tuple[list[str], list[str]]:
    """Two thirds of some names, at least one, and the others."""
    some = [name for i, name in enumerate(names) if (i + dice) % 3] or names[:1]
    return some, [name for name in names if name not in some]


def check_biases(case: Case, made: Built) -> None:
    """Raise Refused for a function's bias beside a frozen weight, which has its exact block."""
    if any(layer.use == "functional" for layer in case.net.layers):
        trained = {name: p.requires_grad for name, p in made.model.named_parameters()}
        for name in filter(trained.get, trained):
            weight = name.removesuffix("bias") + "weight"
            if name.endswith(".bias") and not trained.get(weight, True):
                raise Refused(f"'{name}' has its exact block, since the weight beside it is frozen")


@relation(8, batches=ONE)
def functional_is_module(case: Case) -> None:
    """A weight that a function multiplies with has the block of a module's."""

    def plain(layer: Layer) -> Layer:
        bias = layer.bias and layer.use != "matmul"
        return layer if layer.use == "twice" else replace(layer, use="module", bias=bias)

    layers = tuple(map(plain, case.net.layers))
    made, expected = case.build(), replace(case, net=replace(case.net, layers=layers)).build()
    check_biases(case, made)
    same_factors(factors_of(made), factors_of(expected))


@relation(8, approx=("auto",), batches=TWO)
def auto_is_a_choice(case: Case) -> None:
    """What "auto" has chosen, asked for by name, gives the same factors."""
    made = case.build()
    found = factors_of(made)
    same_factors(factors_of(made, kfac_approx=found.options.kfac_approx), found)


@relation(8, batches=ONE)
def float32_is_near(case: Case) -> None:
    """In float32 the blocks are those of float64, up to its rounding."""
    made = case.build()
    expected = factors_of(made)
    made.model.float()
    (batch,) = made.batches
    items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    cast = {k: t.float() if t.is_floating_point() else t for k, t in items}
    # The modes of float64, since "auto" compares traces that may be equal up to rounding.
    found = factors_of(
        made,
        [cast if isinstance(batch, dict) else tuple(cast.values())],
        kfac_approx=expected.options.kfac_approx,
    )
    for name, block in expected.blocks.items():
        if block.B.abs().max() > 1e6:
            raise Impossible  # a norm has divided by almost nothing
        same(f"the block of '{name}'", found.to_dense(name), block.to_dense(), 1.0, rtol=2e-3)


@relation(6, ruled=True, batches=ONE, fisher=("exact",), layers=3)
def two_dtypes_are_near(case: Case) -> None:
    """With a head in float32 all numbers are those of float64, and each tensor keeps its dtype."""
    made, of_two = case.build(), replace(case, net=replace(case.net, single=True)).build()
    dtypes = [p.dtype for p in of_two.model.parameters()]
    x, expected = inputs_of(made.batches[0]), fitted(made, case)
    # The modes of float64, since "auto" compares traces that may be equal up to rounding.
    modes = expected.fitted_factors().options.kfac_approx
    of_two = of_two._replace(options=of_two.options.replace(kfac_approx=modes))
    found = fitted(of_two, case)
    if any(torch.linalg.cond(P) > 1e4 for P in precision(expected).values()):
        raise Impossible  # its inverse is rounding
    evidences = (float(one.log_marginal_likelihood()) for one in (found, expected))
    same("the evidence", *evidences, scale=1.0, rtol=2e-3)
    for mine, theirs in zip(
        found.output_distribution(x), expected.output_distribution(x), strict=True
    ):
        same("predictions", mine, theirs, 1.0, rtol=5e-3)
    with TemporaryDirectory() as folder:
        save_posterior(found, folder)
        loaded = load_posterior(
            folder, replace(case, net=replace(case.net, single=True)).build().model
        )
    same("the loaded evidence", loaded.log_marginal_likelihood(), found.log_marginal_likelihood())
    if [p.dtype for p in of_two.model.parameters()] != dtypes:
        raise Violated("a tensor has another dtype")


@relation(
    20, approx=MODES, pads=(False,), batches=ONE, smallest=3, ruled=True, layers=3, mixes=True
)
def mixing_is_refused(case: Case) -> None:
    """A network in which an example's outputs have gradients in another's rows is refused."""
    made = case.build()
    (batch,), (mix,) = made.batches, (m for m in made.model.modules() if isinstance(m, Mix))
    parameters = [p for p in made.model.parameters() if p.requires_grad]
    f = outputs(made.model, batch)
    if not mix.input.requires_grad:
        raise Impossible
    reached = 0.0
    for n, f_n in enumerate(f):
        (g,) = torch.autograd.grad(f_n.cos().sum(), mix.input, retain_graph=True)
        scale = g.abs().max()
        g[n] = 0.0
        others = torch.autograd.grad(
            mix.input, parameters, g / scale, retain_graph=True, allow_unused=True
        )
        reached = max([reached, *(float(t.abs().max()) for t in others if t is not None)])
    if not reached > 1e-2:
        raise Impossible  # what is mixed does not reach the outputs, or has no parameters
    try:
        factors_of(made)
    except Refused:
        return
    raise Violated("a network that mixes examples has been taken")


# --- brute force ---


def loss_curvature(likelihood: str, fisher: str, f: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Λ (C, C) of each loss term of each example; 0 where the label does not count."""
    of, has_labels = likelihood_of(likelihood), y.dim() < f.dim()
    found: list[list[Tensor]] = []
    for f_n, y_n in zip(f, y, strict=True):
        fs = f_n.reshape(-1, 1, f.shape[-1])
        found.append([])
        for f_nt, y_nt in zip(fs, y_n.reshape(len(fs), 1, *[-1] * (not has_labels)), strict=True):
            columns = [of.gradient(f_nt, y_nt)] if fisher == "empirical" else of.root(f_nt, y_nt)
            S = torch.cat(list(columns))  # (V, C)
            found[-1].append(S.T @ S * (not has_labels or int(y_nt) != IGNORED))
    return found


def jacobian(model: nn.Module, names: Iterable[str], x: Any) -> Tensor:
    """The Jacobian (N, T, C, P) of the outputs in these parameters, by autograd."""
    model = deepcopy(model)
    parameters = {name: model.get_parameter(name).detach() for name in names}

    def f(values: dict[str, Tensor]) -> Tensor:
        args, keywords = ((), deepcopy(x)) if isinstance(x, dict) else ((x.clone(),), {})
        return functional_call(model, values, args, keywords, tie_weights=True)

    with sdpa_kernel(SDPBackend.MATH):
        shape, of = f(parameters).shape, jacobian_of(f, parameters, packs(model))
    J = torch.cat([of[name].reshape(*shape, -1) for name in parameters], -1)
    return J.detach().reshape(len(J), -1, shape[-1], J.shape[-1])


def exact_matrix(made: Built, names: Iterable[str]) -> Tensor:
    """Σ JᵀΛJ (P, P) of these parameters together, over all batches."""
    total, fisher = torch.zeros(()), made.options.fisher
    for batch in made.batches:
        f, J = outputs(made.model, batch).detach(), jacobian(made.model, names, inputs_of(batch))
        of_terms = loss_curvature(made.likelihood, fisher, f, targets_of(batch))
        Lambda = torch.stack([torch.stack(of_example) for of_example in of_terms])
        total = total + torch.einsum("ntcp,ntcd,ntdq->pq", J, Lambda, J)
    return total


def exact_blocks(made: Built, names: Iterable[str]) -> dict[str, Tensor]:
    """The diagonal block of each parameter."""
    sizes = {name: made.model.get_parameter(name).numel() for name in names}
    rows = exact_matrix(made, sizes).split([*sizes.values()])
    parts = [row.split([*sizes.values()], 1)[i] for i, row in enumerate(rows)]
    return dict(zip(sizes, parts, strict=True))


SMALL: Mapping[str, Any] = {"layers": 2, "ruled": True, "batches": ONE}
TWO_SMALL = {**SMALL, "batches": TWO}


def check_terms(case: Case) -> None:
    """Raise Impossible where a mask hides some of the outputs, which oracles do not know."""
    if case.counts and case.net.pool is None:
        raise Impossible


@relation(15, approx=MODES, **SMALL)
def blocks_are_the_definitions(case: Case) -> None:
    """Blocks are those of the linear uses that a run of each example alone shows, by brute force.

    What is no linear use, norms and scales, has the exact block.
    """
    check_terms(case)
    if case.depends_on_batches or case.net.copies or case.options.diagonal_above:
        return
    if case.counts and any(layer.kind == "Conv" for layer in case.net.layers):
        raise Impossible  # a mask says nothing about layers whose channels come first
    made = case.build()
    check_biases(case, made)
    found = factors_of(made)
    (batch,), model = made.batches, deepcopy(made.model)
    for module in model.modules():
        module.by_hand = isinstance(module, nn.RNNBase)  # pyright: ignore
    x, f = inputs_of(batch), outputs(made.model, batch).detach()

    def example(n: int) -> Tensor:
        if not isinstance(x, dict):
            return model(x[n : n + 1].clone())
        one = {key: t[n : n + 1].clone() for key, t in x.items()}
        length = int(one["attention_mask"].sum()) if case.counts else None
        return model(**{key: t[:, :length] if case.counts else t for key, t in one.items()})

    runs = [partial(example, n) for n in range(len(f))]
    uses, of_examples = uses_of(runs, {name: model.get_parameter(name) for name in found.blocks})
    alone = torch.cat(of_examples)
    if case.counts and not torch.allclose(alone, f):  # what does not count reaches the outputs
        raise Impossible
    same("outputs one by one", alone, f.flatten(0, -2))
    Lambda = loss_curvature(case.likelihood, case.options.fisher, f, targets_of(batch))
    expected = exact_blocks(made, found.blocks)
    expected |= kfac_blocks_from_uses(uses, Lambda, case.options.approx)
    for name in found.blocks:
        same(f"the block of '{name}'", found.to_dense(name), expected[name], 1.0)


@relation(6, approx=MODES, **TWO_SMALL)
def corrected_blocks_have_the_exact_trace(case: Case) -> None:
    """The trace of a block with corrected eigenvalues is that of the exact block."""
    check_terms(case)
    made = case.build()
    factors = factors_of(made)
    found = or_refused(corrected_factors, factors, made.model, made.batches)
    for name, block in exact_blocks(made, factors.blocks).items():
        same(f"the trace of '{name}'", found.to_dense(name).trace(), block.trace(), 1.0)


def fitted(made: Built, case: Case) -> Posterior:
    """A posterior of the case, or Refused."""
    T = (1.0, 0.5)[case.dice % 2]
    posterior = or_refused(
        Posterior, made.model, made.likelihood, made.options, prior_precision=0.7, temperature=T
    )
    posterior.sigma_noise = 0.8 if posterior.likelihood.has_sigma else 1.0
    or_refused(posterior.fit, made.batches)
    return posterior


def precision(posterior: Posterior) -> dict[str, Tensor]:
    """The dense posterior precision of each parameter."""
    scale = posterior.sigma_noise.double() ** 2 * posterior.temperature
    blocks = posterior.fitted_factors().blocks
    delta = posterior.prior_precision.double().expand(len(blocks))
    return {
        name: block.to_dense() / scale + d * torch.eye(block.numel, dtype=torch.float64)
        for (name, block), d in zip(blocks.items(), delta, strict=True)
    }


def moving(posterior: Posterior, case: Case) -> Tensor:
    """Which entries (P,) of the parameters are no constants, as an embedding's padding is."""
    moves = torch.ones(posterior.n_params, dtype=torch.bool)
    weight = posterior.named(moves).get("embedding.weight")
    if weight is not None and case.net.padding_idx and not case.net.head_tied:
        weight[0] = False
    return moves


@relation(8, **TWO_SMALL)
def evidence_is_the_determinants(case: Case) -> None:
    """The evidence is log p(D|θ) − ½ (θᵀ P₀ θ + log det(H + P₀) − log det P₀)."""
    posterior = fitted(case.build(), case)
    moves, delta = moving(posterior, case), posterior.prior_precision.double()
    theta = posterior.mean[moves]
    matrices = list(precision(posterior).values())
    if any(torch.linalg.cond(P) > 1e9 for P in matrices):
        raise Impossible  # its determinant is rounding
    log_det = sum(torch.linalg.slogdet(P)[1] for P in matrices)
    log_det = log_det - (~moves).sum() * delta.log()
    prior = delta * theta.square().sum() - len(theta) * delta.log()
    expected = posterior.log_likelihood - 0.5 * (prior + log_det)
    same("the evidence", posterior.log_marginal_likelihood(), expected.squeeze(), len(theta))


@relation(25, fisher=("exact",), **SMALL)
def forward_is_backward(case: Case) -> None:
    """Covariances by backward passes, and outputs by forward-mode, are those of J by autograd."""
    made = case.build()
    posterior, (batch,) = fitted(made, case), made.batches
    x, f = inputs_of(batch), outputs(made.model, batch).detach()
    if any(torch.linalg.cond(P) > 1e8 for P in precision(posterior).values()):
        raise Impossible  # its inverse is rounding
    J = jacobian(made.model, posterior.fitted_factors().blocks, x)
    samples = posterior.sample(3, torch.Generator().manual_seed(0))
    change = torch.einsum("ntcp,sp->sntc", J, samples - posterior.mean)
    linearised = or_refused(posterior.linearised_outputs, samples, x)
    same("outputs by forward-mode", linearised, f + change.reshape(3, *f.shape), 1.0)
    Sigma = torch.block_diag(*(P.inverse() for P in precision(posterior).values()))
    expected = torch.einsum("ntcp,pq,ntdq->ntcd", J, Sigma, J)
    mean, covariance = or_refused(posterior.output_distribution, x)
    same("outputs", mean, f, 1.0)
    same("covariances", covariance, expected.reshape(covariance.shape), 1.0)
    _, variance = posterior.output_distribution(x, variance_only=True)
    same("variances", variance, covariance.diagonal(dim1=-2, dim2=-1), 1.0)


@relation(8, **SMALL)
def samples_have_the_precision(case: Case) -> None:
    """Samples are θ* + P^-½ ε: their squared length by P is that of ε; constants are not drawn."""
    made = case.build()
    posterior = fitted(made, case)
    change = posterior.sample(3, torch.Generator().manual_seed(1)) - posterior.mean
    moves, g = moving(posterior, case), torch.Generator().manual_seed(1)
    same("constants", change[:, ~moves], torch.zeros_like(change[:, ~moves]))
    P = torch.block_diag(*precision(posterior).values())
    noise = torch.randn(change.shape, generator=g, dtype=torch.float64)[:, moves]
    lengths = torch.einsum("sp,pq,sq->s", change, P, change)
    spectrum = torch.linalg.eigvalsh(P)
    if not spectrum[0] > 1e-10 * spectrum[-1]:
        raise Impossible  # P is singular but for rounding
    same("lengths", lengths, noise.square().sum(1), rtol=1e-5)  # P may be ill-conditioned


# --- one way of calling against another ---


@relation(8, ruled=True, approx=MODES, fisher=("exact", "empirical"))
def a_fit_is_a_pass(case: Case) -> None:
    """`Posterior.fit`, at once and batch by batch, in any mode, has the factors of the function."""
    made = case.build()
    expected, added_up = factors_of(made), one_by_one(made)
    make = partial(or_refused, Posterior, made.model, made.likelihood, made.options)
    at_once, added = make(), make()
    made.model.train(case.dice % 2 == 0)
    with torch.inference_mode(case.dice % 3 == 0):
        at_once.fit(loader(made.batches, case.data.loader))
        same_factors(at_once.fitted_factors(), expected)
        at_once.fit(made.batches)  # once more, with the proof that is there
        same_factors(at_once.fitted_factors(), expected)
        for batch in made.batches:
            added.fit([batch], override=False)
    same_factors(added.fitted_factors(), added_up)
    if any(m.training != (case.dice % 2 == 0) for m in made.model.modules()):
        raise Violated("the mode of the model has changed")


def loss_of(made: Built, batch: Any, likelihood: Any = None) -> Tensor:
    """The mean loss of the batch's examples."""
    likelihood, y = likelihood or likelihood_of(made.likelihood), targets_of(batch)
    loss = likelihood.loss(outputs(made.model, batch), y) / len(y)
    if not loss < 1e4:
        raise Impossible  # the training diverges
    return loss


@relation(6, ruled=True, batches=TWO)
def saved_is_loaded(case: Case) -> None:
    """A posterior that was saved and loaded into another network is the same."""
    made = case.build()
    loaded_again(fitted(made, case), made, case)


def loaded_again(posterior: Posterior, made: Built, case: Case) -> None:
    """Raise Violated unless a posterior is the same after it was saved and loaded."""
    other = replace(case, seed=case.seed + 1).build().model
    for name, p in other.named_parameters():
        if not p.requires_grad:  # which is not saved
            p.data.copy_(posterior.model.get_parameter(name))
    with TemporaryDirectory() as folder:
        save_posterior(posterior, folder)
        loaded = load_posterior(folder, other)
    same_posteriors(loaded, posterior)
    x = inputs_of(made.batches[0])
    found, expected = (or_refused(p.output_distribution, x) for p in (loaded, posterior))
    for what, mine, theirs in zip(("outputs", "covariances"), found, expected, strict=True):
        same(what, mine, theirs)


def same_posteriors(found: Posterior, expected: Posterior) -> None:
    """The mean, the factors and all numbers that were learned."""
    if str(found.likelihood) != str(expected.likelihood):
        raise Violated(f"the likelihood: {found.likelihood}, not {expected.likelihood}")
    same("the mean", found.mean, expected.mean)
    same_factors(found.fitted_factors(), expected.fitted_factors())
    for name in ("prior_precision", "sigma_noise", "temperature"):
        mine, theirs = (torch.as_tensor(getattr(p, name)) for p in (found, expected))
        same(name, mine.expand(found.n_layers), theirs.expand(found.n_layers))
    same("the evidence", found.log_marginal_likelihood(), expected.log_marginal_likelihood())


# --- failures ---


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a call must leave as it is, as values that can be compared."""
    modules, named = list(model.modules()), list(model.named_parameters())
    hooks = [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in modules]
    return {
        "parameters": [(n, id(p), p.requires_grad, p.grad is None, p.tolist()) for n, p in named],
        "buffers": [(n, b.tolist()) for n, b in model.named_buffers()],
        "modes": [m.training for m in modules],
        "hooks": [[len(of) for of in of_module] for of_module in hooks],
        "methods": ["forward" in vars(m) for m in modules],
        "the user's random numbers": torch.get_rng_state().tolist(),
    }


def check_unchanged(model: nn.Module, before: dict[str, Any], when: str) -> None:
    """Raise Violated unless the state is that of before."""
    now = state_of(model)
    changed = [what for what in now if now[what] != before[what]]
    if changed:
        raise Violated(f"{when}: {', '.join(changed)} changed")


@relation(30, approx=("auto", "auto", "reduce"), **TWO_SMALL)
def a_failure_changes_nothing(case: Case) -> None:
    """A call whose n-th forward pass fails leaves everything as it was, and changes no number.

    It raises the failure, or returns what it returns without one; the next call does, too.
    """
    made = case.build()
    network, x = network_of(made.model), inputs_of(made.batches[0])
    posterior = or_refused(Posterior, made.model, made.likelihood, made.options)

    def call() -> list[Tensor]:
        if case.dice % 3 == 0:
            return [block.to_dense() for block in factors_of(made).blocks.values()]
        posterior.fit(made.batches)
        blocks = [block.to_dense() for block in posterior.fitted_factors().blocks.values()]
        return [*blocks, *(posterior.output_distribution(x) if case.dice % 3 == 1 else ())]

    before = state_of(made.model)
    network.calls = 0
    expected = or_refused(call)
    check_unchanged(made.model, before, "without a failure")
    network.fails_at = 1 + case.seed % network.calls
    network.error = (LookupError, torch.OutOfMemoryError, KeyboardInterrupt)[case.dice // 3 % 3]
    posterior = Posterior(made.model, made.likelihood, made.options)
    for when, calls in (("with a failure", 0), ("after a failure", network.fails_at)):
        network.calls = calls
        try:
            found = call()
        except (torch.OutOfMemoryError, LookupError, KeyboardInterrupt) as error:
            if calls:
                raise Violated(f"{when}: {error}") from error
        else:
            for tensor, right in zip(found, expected, strict=True):
                same(when, tensor, right, 1.0)
        check_unchanged(made.model, before, when)


# --- the optimiser ---

OPTIMISED: Mapping[str, Any] = {
    "ruled": True, "fisher": ("mc", "exact", "empirical"), "approx": MODES, "pads": (False,),
    "batches": TWO, "layers": 3, "likelihoods": OF_OUTPUTS,
}  # fmt: skip


@relation(8, **{**OPTIMISED, "fisher": ("exact",), "batches": ONE})
def a_step_is_by_the_blocks(case: Case) -> None:
    """A step of K-FAC solves with the blocks of the function, divided by N and damped.

    Parameters that a step has no block of take a plain one.
    """
    made, eta, damping = case.build(), 0.1, 0.3
    if case.data.ignored or case.options.diagonal_above:
        return
    factors, N = factors_of(made), case.data.sizes[0]
    options = PreconditionerOptions(
        damping=damping, damping_on="product", factor_every=1, ema_decay=0.0, kl_clip=None
    )
    optimizer = or_refused(
        KFAC, made.model, made.likelihood, eta, momentum=0.0, options=options,
        curvature=made.options, loss_mean_over="examples",
    )  # fmt: skip
    before = deepcopy(dict(made.model.named_parameters()))
    loss = or_refused(loss_of, made, made.batches[0])
    own = {name: p for name, p in made.model.named_parameters() if name in factors.blocks}
    gradients = torch.autograd.grad(loss, [*own.values()], retain_graph=True, allow_unused=True)
    loss.backward()
    optimizer.step()
    for (name, p), g in zip(own.items(), gradients, strict=True):
        block = factors.to_dense(name) / N
        damped = block + damping * torch.eye(len(block), dtype=torch.float64)
        step = torch.zeros_like(p) if g is None else g
        if name in optimizer.preconditioner.names:
            step = torch.linalg.solve(damped, step.flatten()).view_as(p)
        same(f"the step of '{name}'", before[name] - p, eta * step, 1.0)


def kfac(made: Built, case: Case, params: Any = None) -> KFAC:
    """An optimiser of some parameters, or Refused."""
    options = PreconditionerOptions(factor_every=1 + case.dice % 2, update_every=1)
    return or_refused(
        KFAC, made.model, made.likelihood, lr=0.02, params=params, options=options,
        curvature=made.options, loss_mean_over="examples",
    )  # fmt: skip


def take_steps(made: Built, optimizer: KFAC, number: int) -> None:
    """Steps of training on the batches in turn; the first one may be Refused."""

    def step(i: int) -> None:
        made.model.zero_grad()
        loss_of(made, made.batches[i % len(made.batches)]).backward()
        optimizer.step()

    or_refused(step, 0)
    for i in range(1, number):
        step(i)


def parameters_of(model: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    return [model.get_parameter(name) for name in names]


def in_two(made: Built, case: Case) -> tuple[list[str], list[str]]:
    """Some of the trainable parameters, and the others."""
    names = [name for name, p in made.model.named_parameters() if p.requires_grad]
    return thirds(names, case.dice)


def same_parameters(found: nn.Module, expected: nn.Module, names: Any = None) -> None:
    """These parameters of two networks, or all."""
    for name in dict(found.named_parameters()) if names is None else names:
        if not expected.get_parameter(name).abs().max() < 1e6:
            raise Impossible  # the last step diverges
        same(f"parameter '{name}'", found.get_parameter(name), expected.get_parameter(name))


@relation(8, **OPTIMISED)
def a_subset_is_trained_alone(case: Case) -> None:
    """An optimiser of some parameters takes the steps that it takes where the others are frozen.

    The others keep their values and the gradients of the loss.
    """
    with_others, alone, untouched = (case.build() for _ in range(3))
    some, others = in_two(alone, case)
    for p in parameters_of(alone.model, others):
        p.requires_grad_(False)
    take_steps(alone, kfac(alone, case), 3)
    optimizer = kfac(with_others, case, parameters_of(with_others.model, some))
    take_steps(with_others, optimizer, 3)
    same_parameters(with_others.model, untouched.model, others)
    same_parameters(with_others.model, alone.model, some)
    loss_of(with_others, with_others.batches[0]).backward()
    gradients = [deepcopy(p.grad) for p in parameters_of(with_others.model, others)]
    optimizer.step()
    for p, expected in zip(parameters_of(with_others.model, others), gradients, strict=True):
        if expected is not None:
            same("a gradient of the others", p.grad, expected)


@relation(6, **OPTIMISED)
def what_comes_later_is_as_from_the_start(case: Case) -> None:
    """Parameters that are added, or frozen, before the first step are as if so from the start."""
    made, later = case.build(), case.build()
    some, others = in_two(made, case)
    freezes = case.dice % 2 == 0
    for p in parameters_of(made.model, others if freezes else ()):
        p.requires_grad_(False)
    take_steps(made, kfac(made, case), 3)
    optimizer = kfac(later, case, None if freezes else parameters_of(later.model, some))
    for p in parameters_of(later.model, others):
        if freezes:
            p.requires_grad_(False)
        else:
            or_refused(optimizer.add_param_group, {"params": [p]})
    take_steps(later, optimizer, 3)
    same_parameters(later.model, made.model)


# --- training ---

EPOCHS = 2
TRAINED: Mapping[str, Any] = {
    "ruled": True, "layers": 2, "likelihoods": LEARNED, "batches": SEVERAL, "smallest": 2,
    "approx": ("reduce", "expand", "auto"), "fisher": ("exact",),
}  # fmt: skip


def ready(case: Case) -> tuple[Built, Optimizer, PriorLearner]:
    """What training needs, and a learner of all that can be learned; of a case that a fit takes."""
    check_terms(case)
    made = case.build()
    check_runs(deepcopy(made.model).train(), made.batches)
    or_refused(or_refused(Posterior, made.model, made.likelihood, made.options).fit, made.batches)
    optimizer = SGD([p for p in made.model.parameters() if p.requires_grad], lr=0.01)
    average: Any = None if case.dice % 2 else "last"
    learner = or_refused(
        PriorLearner, made.likelihood, made.options, curvature_from="pass",
        learn_sigma_noise=likelihood_of(made.likelihood).has_sigma,
        schedule=Schedule(EPOCHS, every=1, steps=2, average=average),
    )  # fmt: skip
    torch.manual_seed(case.seed)
    return made, optimizer, learner


def train(
    made: Built, optimizer: Optimizer, learner: PriorLearner, first: int = 1, last: int = EPOCHS
) -> None:
    """The epochs of a training loop as users write it, after the learner's start."""
    for _ in range(first, last + 1):
        made.model.train()
        for batch in made.batches:
            optimizer.zero_grad()
            loss_of(made, batch, learner.likelihood).backward()
            optimizer.step()
    if last == EPOCHS:
        learner.finish()


def start(made: Built, optimizer: Optimizer, learner: PriorLearner) -> None:
    """Start a learner, or Refused."""
    or_refused(learner.start, made.model, optimizer, made.batches, EPOCHS, sums_terms=True)


def learned(case: Case) -> tuple[Built, PriorLearner, Posterior]:
    """The posterior after a training, or Refused."""
    made, optimizer, learner = ready(case)
    start(made, optimizer, learner)
    train(made, optimizer, learner)
    assert learner.posterior is not None
    return made, learner, learner.posterior


@relation(8, **TRAINED)
def what_is_taken_is_trained(case: Case) -> None:
    """A network and data that are taken at the start are trained to the end.

    The posterior is at the network's parameters, with the numbers that were learned; it is saved
    and loaded with them.
    """
    made, learner, posterior = learned(case)
    if str(posterior.likelihood) != str(learner.likelihood):
        raise Violated(f"the likelihood: {posterior.likelihood}, not {learner.likelihood}")
    same("the mean", posterior.mean, torch.cat([p.flatten() for p in posterior.params]))
    loaded_again(posterior, made, case)


@relation(6, **TRAINED)
def all_ways_train_alike(case: Case) -> None:
    """A plain loop, `OnlineTraining` and `marglik_training` come to the same posterior."""
    *_, expected = learned(case)
    made, optimizer, learner = ready(case)
    if case.dice % 3 == 1:
        training = or_refused(OnlineTraining, made.model, optimizer, made.batches, learner)
        same_posteriors(training.run().laplace, expected)
        return
    names = ("kfac_approx", "unsupported", "diagonal_above", "dict_key_mask", "ignore_index")
    found, *_ = or_refused(
        marglik_training, made.model, made.batches, made.likelihood,
        optimizer_cls=SGD, optimizer_kwargs={"lr": 0.01},
        scheduler_cls=torch.optim.lr_scheduler.ConstantLR, scheduler_kwargs={"factor": 1.0},
        n_epochs=EPOCHS, n_hypersteps=2, marglik_frequency=1,
        average=learner.options.schedule.average, curvature_from="pass",
        **{name: getattr(made.options, name) for name in names},
    )  # fmt: skip
    same_posteriors(found, expected)
