"""What must hold for every case, whatever its numbers are.

A relation is a function of a case that raises where it does not hold. Where the product says in an
error of its own words that it does not take a case, and at once (`or_refused`), the case is
Refused. Any other error is a violation.
"""

import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfac_backend import KroneckerFactors, kronecker_factors
from kfac_backend.likelihoods import IGNORED, likelihood_of
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from marglik import (
    Posterior,
)
from tests.fuzz.cases import (
    Built,
    Case,
    Impossible,
    Mix,
    Network,
    inputs_of,
    loader,
    outputs,
    targets_of,
)
from tests.fuzz.strategies import OF_OUTPUTS, cases
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
    """A relation, the cases that it is tried on, and how many of them in the default suite."""

    check: Callable[[Any], None]
    strategy: st.SearchStrategy[Any]
    examples: int


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


# --- one model in several forms ---


def check_biases(case: Case, made: Built) -> None:
    """Raise Refused for a function's bias beside a frozen weight, which has its exact block."""
    if any(layer.use == "functional" for layer in case.net.layers):
        trained = {name: p.requires_grad for name, p in made.model.named_parameters()}
        for name in filter(trained.get, trained):
            weight = name.removesuffix("bias") + "weight"
            if name.endswith(".bias") and not trained.get(weight, True):
                raise Refused(f"'{name}' has its exact block, since the weight beside it is frozen")


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


@relation(
    8,
    ruled=True,
    fisher=("exact",),
    approx=MODES,
    pads=(False,),
    batches=ONE,
    layers=3,
    likelihoods=OF_OUTPUTS,
)
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
