"""What must hold for every case, whatever its numbers are.

A relation is a function of a case that raises where it does not hold. What the product refuses by
an error of its own is no violation, if it refuses it at once (`or_refused`): a ``Refused``. Any
other error is one.
"""

import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from kfac_backend import KroneckerFactors, kronecker_factors
from kfac_backend.blocks.kronecker import KroneckerFactors as Factors
from kfac_backend.likelihoods import IGNORED, likelihood_of
from kfac_backend.model import batches as batches_module
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from marglik import (
    OnlineTraining,
    Posterior,
    PriorLearner,
    Schedule,
    laplace_predictive,
    load_posterior,
    marglik_training,
    save_posterior,
    settling_rate,
)
from tests.fuzz.cases import (
    Again,
    Built,
    Case,
    Dense,
    Network,
    Residual,
    Wrapped,
    inputs_of,
    loader,
    outputs,
    targets_in,
)
from tests.fuzz.strategies import LEARNED, SYMMETRIC, cases
from tests.oracles import jacobian_of, kfac_blocks_from_uses, packs
from tests.uses import uses_of
from tests.worlds import Worlds, failed

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


class Refused(Exception):
    """The product has said in its own words that it does not take a case."""


class Violated(AssertionError):
    """A relation does not hold."""


@dataclass(frozen=True)
class Relation:
    check: Callable[[Case], None]
    strategy: st.SearchStrategy[Case]
    examples: int
    """How many cases the default suite tries."""

    @property
    def name(self) -> str:
        return self.check.__name__


RELATIONS: dict[str, Relation] = {}


def relation(examples: int = 20, **drawn: Any) -> Callable[[T], T]:
    """A function is a relation, on `cases` that are drawn with these options."""

    def register(check: Any) -> Any:
        RELATIONS[check.__name__] = Relation(check, cases(**drawn), examples)
        return check

    return register


def or_refused(function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """What a call returns; Refused if it ends with an error of the product's own words."""
    try:
        return function(*arguments, **keywords)
    except (NotImplementedError, TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if not Path(last).is_relative_to(ROOT) or Path(last).is_relative_to(ROOT / "tests"):
            raise
        raise Refused(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error


def same(what: str, found: Any, expected: Any, scale: float = 0.0) -> None:
    """Raise Violated unless two tensors are equal up to the rounding of float64."""
    found, expected = (torch.as_tensor(t).detach().double() for t in (found, expected))
    if found.shape != expected.shape:
        raise Violated(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    size = float(expected.abs().max()) if expected.numel() else 0.0
    error = float((found - expected).abs().max()) if expected.numel() else 0.0
    if not error <= 1e-8 * size + 1e-11 * max(scale, 1e-3):
        raise Violated(f"{what}: differs by {error:.3g}, where the largest entry is {size:.3g}")


def same_factors(found: KroneckerFactors, expected: KroneckerFactors) -> None:
    """All factors and counts; names may differ, not their order."""
    if len(found.blocks) != len(expected.blocks):
        raise Violated(f"blocks: {list(found.blocks)}, not {list(expected.blocks)}")
    pairs = list(zip(found.blocks.values(), expected.blocks.values(), strict=True))
    scale = max(float(b.B.abs().max()) for _, b in pairs)
    for mine, theirs in pairs:
        if not theirs.num_terms and theirs.A is not None:  # of a weight used in two ways
            same(f"the block of '{theirs.name}'", mine.to_dense(), theirs.to_dense(), 1.0)
            continue
        same(f"B of '{theirs.name}'", mine.B, theirs.B, scale)
        if theirs.A is not None:
            same(f"A of '{theirs.name}'", mine.A, theirs.A, 1.0)
    for name in ("num_data", "num_loss_terms", "loss"):
        same(name, float(getattr(found, name)), float(getattr(expected, name)))


def factors_of(made: Built, batches: Any = None, **options: Any) -> KroneckerFactors:
    """The factors for a case, of other batches if they are given; or Refused."""
    batches = made.batches if batches is None else batches
    return or_refused(
        kronecker_factors, made.model, batches, made.likelihood, made.options, **options
    )


def network_of(model: nn.Module) -> Network:
    """The network itself, without what averages copies."""
    return next(m for m in model.modules() if isinstance(m, Network))


# --- sums over batches ---


@relation(40, least=2, fisher=("exact", "empirical"), approx=("expand", "reduce", "head expand"))
def batches_add_up(case: Case) -> None:
    """The factors of several batches are the sum of those of each batch alone."""
    made = case.build()
    together = factors_of(made)
    same_factors(together, or_refused(one_by_one, made))


def one_by_one(made: Built) -> KroneckerFactors:
    """The sum of the factors of each batch."""
    first, *others = (factors_of(made, [batch]) for batch in made.batches)
    return sum(others, first)


@relation(20, least=2, approx=("expand", "reduce"))
def batches_come_in_any_order(case: Case) -> None:
    """The factors of several batches do not depend on their order."""
    made = case.build()
    same_factors(factors_of(made, made.batches[::-1]), factors_of(made))


@relation(20, least=2, approx=("expand", "reduce", "head reduce"))
def batches_are_of_any_size(case: Case) -> None:
    """If no example depends on its batch, one batch has the factors of several."""
    if case.depends_on_batches or case.data.trimmed:
        return
    made = case.build()
    whole = replace(case, data=replace(case.data, sizes=(sum(case.data.sizes),))).build()
    same_factors(factors_of(made), factors_of(whole))


@relation(20, most=2)
def twice_the_data_counts_twice(case: Case) -> None:
    """The same data twice has the same A, twice the B, and twice the loss."""
    made = case.build()
    once = factors_of(made)
    same_factors(factors_of(made, made.batches * 2), 2 * once)


@relation(20, most=2)
def examples_come_in_any_order(case: Case) -> None:
    """The factors do not depend on the order of the examples of a batch."""
    made = case.build()
    g = torch.Generator().manual_seed(case.dice)

    def turned(batch: Any) -> Any:
        order = torch.randperm(len(targets_in(batch)), generator=g)
        if isinstance(batch, dict):
            return {key: t[order] for key, t in batch.items()}
        return tuple(t[order] for t in batch)

    if case.options.approx == "auto" and max(case.data.sizes) > 8:
        return
    same_factors(factors_of(made, [turned(b) for b in made.batches]), factors_of(made))


@relation(20, least=2)
def loaders_are_lists(case: Case) -> None:
    """A loader that is read once, or that has one memory, gives the factors of a list."""
    made = case.build()
    expected = factors_of(made)
    same_factors(factors_of(made, loader(made.batches, case.data.loader)), expected)


@contextmanager
def small_parts() -> Iterator[None]:
    """Memory for the activations of one example at a time."""
    before = batches_module.LARGEST_ACTIVATION
    batches_module.LARGEST_ACTIVATION = 1
    try:
        yield
    finally:
        batches_module.LARGEST_ACTIVATION = before


@relation(40, most=2, approx=("expand", "reduce", "auto"))
def parts_change_nothing(case: Case) -> None:
    """A batch that is worked on in parts has the factors, and covariances, of the whole."""
    made = case.build()
    expected = factors_of(made)
    with small_parts():
        same_factors(factors_of(made), expected)


@relation(4, least=2, approx=("expand", "reduce"), plain=True)
def shards_add_up(case: Case) -> None:
    """Two ranks, each with every second batch, have the factors of one process."""
    expected = factors_of(case.build())
    found = worlds().run(2, "tests.fuzz.relations:factors_of_rank", case)
    errors = [f"{one.args[0]} {str(one.args[1]).splitlines()[0]}" for one in found if failed(one)]
    if errors:  # that of the first is told; the other rank then has lost its peer
        raise Violated(f"a rank: {min(errors, key=lambda text: 'Connection closed' in text)}")
    for one in found:
        same_factors(one, expected)


def factors_of_rank(case: Case) -> KroneckerFactors:
    made = case.build()
    own = made.batches[torch.distributed.get_rank() :: 2]
    return kronecker_factors(made.model, own, made.likelihood, made.options)


@cache
def worlds() -> Worlds:
    return Worlds()


# --- one model in several forms ---


@relation(20, likelihoods=SYMMETRIC, most=1)
def classes_come_in_any_order(case: Case) -> None:
    """Outputs in another order, with their targets, permute the head's blocks and no other."""
    if case.net.head_tied and case.net.embeds:
        return
    made = case.build()
    expected = factors_of(made)
    head = network_of(made.model).head
    C = len(head.weight)
    order = torch.randperm(C, generator=torch.Generator().manual_seed(case.dice))
    with torch.no_grad():
        head.weight.copy_(head.weight[order])
        head.bias.copy_(head.bias[order])

    def turned(y: Tensor) -> Tensor:
        if not y.is_floating_point():
            return torch.where(y == IGNORED, y, order.argsort()[y.clamp(min=0)])
        return torch.cat([part[..., order] for part in y.split(C, -1)], -1)

    batches = [
        {**b, "labels": turned(b["labels"])} if isinstance(b, dict) else (b[0], turned(b[1]))
        for b in made.batches
    ]
    found = factors_of(made, batches)
    for name, block in expected.blocks.items():
        dense = block.to_dense()
        if "head." in name:
            rows = dense.view(C, len(dense) // C, C, -1)
            dense = rows[order][:, :, order].reshape(dense.shape)
        same(f"the block of '{name}'", found.to_dense(name), dense, 1.0)


@relation(25, most=2, approx=("expand", "reduce", "auto"))
def frozen_is_absent(case: Case) -> None:
    """Parameters that are frozen have no block, and the blocks of the others stay."""
    made = case.build()
    expected = factors_of(made)
    names = list(expected.blocks)
    if len(names) < 2:
        return
    frozen = {name for i, name in enumerate(names) if (i + case.dice) % 3 == 0} or {names[0]}
    for name in frozen:
        made.model.get_parameter(name).requires_grad_(False)
    kfac_approx = expected.options.kfac_approx
    if isinstance(kfac_approx, dict):
        kfac_approx = {**kfac_approx, "*": kfac_approx.get("*", "reduce")}
        trainable = {n.rpartition(".")[0] for n, p in made.model.named_parameters() if p.requires_grad}
        kfac_approx = {k: m for k, m in kfac_approx.items() if k == "*" or _fits(k, trainable)}
    found = factors_of(made, kfac_approx=kfac_approx)
    left = {name: block for name, block in expected.blocks.items() if name not in frozen}
    if list(found.blocks) != list(left):
        raise Violated(f"blocks: {list(found.blocks)}, not {list(left)}")
    same_factors(found, replace(expected, blocks=left))


def _fits(pattern: str, names: set[str]) -> bool:
    from fnmatch import fnmatchcase

    return any(fnmatchcase(name, pattern) for name in names)


@relation(20, most=2)
def wrapped_is_bare(case: Case) -> None:
    """Layers inside of other modules have the blocks that they have alone."""
    made = case.build()
    expected = factors_of(made)
    network, inside = network_of(made.model), {}
    for i, module in enumerate(network.layers):
        network.layers[i] = inside.setdefault(module, Wrapped(module))
    same_factors(factors_of(made), expected)


@relation(20, most=2)
def functional_is_module(case: Case) -> None:
    """A weight that a function multiplies with has the block of a module's."""

    def plain(layer: Any) -> Any:
        match layer:
            case Dense(use="functional" | "matmul"):
                return replace(layer, use="module", bias=layer.bias and layer.use != "matmul")
            case Residual() | Again():
                return replace(layer, inner=plain(layer.inner))
        return layer

    modules = replace(case, net=replace(case.net, layers=tuple(map(plain, case.net.layers))))
    if modules == case:
        return
    expected = factors_of(modules.build())
    same_factors(factors_of(case.build()), expected)


@relation(15, approx=("auto",), most=2)
def auto_is_a_choice(case: Case) -> None:
    """What "auto" has chosen, asked for by name, gives the same factors."""
    made = case.build()
    found = factors_of(made)
    same_factors(factors_of(made, kfac_approx=found.options.kfac_approx), found)


# --- brute force ---


def loss_curvature(likelihood: str, fisher: str, f: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Λ (C, C) of each loss term of each example; 0 where the label does not count."""
    of, found = likelihood_of(likelihood), []
    labels = y.dim() < f.dim()
    for f_n, y_n in zip(f, y, strict=True):
        terms = f_n.reshape(-1, 1, f.shape[-1])
        ys = y_n.reshape(-1, 1) if labels else y_n.reshape(len(terms), 1, -1)
        found.append([])
        for f_nt, y_nt in zip(terms, ys, strict=True):
            columns = [of.gradient(f_nt, y_nt)] if fisher == "empirical" else of.root(f_nt, y_nt)
            S = torch.cat(list(columns))  # (V, C)
            counts = not (labels and int(y_nt) == IGNORED)
            found[-1].append(S.T @ S * counts)
    return found


def jacobian(model: nn.Module, names: list[str], x: Any) -> Tensor:
    """The Jacobian (N, T, C, P) of the outputs in these parameters, by autograd."""
    model = deepcopy(model)
    parameters = {name: model.get_parameter(name).detach() for name in names}

    def f(values: dict[str, Tensor]) -> Tensor:
        args, keywords = ((), deepcopy(x)) if isinstance(x, dict) else ((x.clone(),), {})
        return functional_call(model, values, args, keywords, tie_weights=True)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        shape, of = f(parameters).shape, jacobian_of(f, parameters, packs(model))
    J = torch.cat([of[name].reshape(*shape, -1) for name in names], -1)
    return J.detach().reshape(len(J), -1, shape[-1], J.shape[-1])


@relation(30, approx=("expand", "reduce"), most=1, small=True, plain=True)
def blocks_are_the_definitions(case: Case) -> None:
    """Blocks are those of the linear uses that a run of each example alone shows, by brute force.

    What is no linear use, norms and scales, has the exact block.
    """
    if case.depends_on_batches or case.net.copies or case.options.diagonal_above:
        return
    made = case.build()
    found = factors_of(made)
    (batch,), model = made.batches, deepcopy(made.model)
    for module in model.modules():
        module.by_hand = isinstance(module, nn.RNNBase)  # pyright: ignore[reportAttributeAccessIssue]
    x, y = inputs_of(batch), targets_in(batch)

    def example(n: int) -> Tensor:
        if not isinstance(x, dict):
            return model(x[n : n + 1].clone())
        one = {key: t[n : n + 1].clone() for key, t in x.items()}
        if case.counts:
            length = int(one["attention_mask"].sum())
            one = {key: t[:, :length] for key, t in one.items()}
        return model(**one)

    runs = [partial(example, n) for n in range(len(y))]
    uses, of_examples = uses_of(runs, {k: model.get_parameter(k) for k in found.blocks})
    f = outputs(made.model, batch).detach()
    if case.counts and f.dim() > 2:
        return  # not all positions of the batch's outputs are loss terms
    Lambda = loss_curvature(case.likelihood, case.options.fisher, f, y)
    J = jacobian(made.model, list(found.blocks), x)
    exact = sum(
        J_nt.T @ Lambda_nt @ J_nt
        for J_n, Lambda_n in zip(J, Lambda, strict=True)
        for J_nt, Lambda_nt in zip(J_n, Lambda_n, strict=True)
    )
    assert isinstance(exact, Tensor)
    expected, start = {}, 0
    for name in found.blocks:
        P = model.get_parameter(name).numel()
        expected[name] = exact[start : start + P, start : start + P]
        start += P
    same("outputs one by one", torch.cat(of_examples), f.flatten(0, -2))
    expected |= kfac_blocks_from_uses(uses, Lambda, case.options.approx)
    for name in found.blocks:
        same(f"the block of '{name}'", found.to_dense(name), expected[name], 1.0)


def fitted(made: Built, case: Case) -> Posterior:
    """A posterior of the case, or Refused."""
    T = (1.0, 0.5)[case.dice % 2]
    posterior = or_refused(
        Posterior, made.model, made.likelihood, made.options, prior_precision=0.7, temperature=T
    )
    if posterior.likelihood.has_sigma:
        posterior.sigma_noise = 0.8
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


@relation(20, most=2, small=True, plain=True)
def evidence_is_the_determinants(case: Case) -> None:
    """The evidence is log p(D|θ) − ½ (θᵀ P₀ θ + log det(H + P₀) − log det P₀)."""
    posterior = fitted(case.build(), case)
    theta, delta = posterior.mean, posterior.prior_precision.double()
    log_det = sum(torch.linalg.slogdet(P)[1] for P in precision(posterior).values())
    prior = delta * theta.square().sum() - len(theta) * delta.log()
    expected = posterior.log_likelihood - 0.5 * (prior + log_det)
    same("the evidence", posterior.log_marginal_likelihood(), expected.squeeze())


@relation(35, most=1, small=True, plain=True, fisher=("exact",))
def forward_is_backward(case: Case) -> None:
    """Covariances by backward passes, and outputs by forward-mode, are those of J by autograd."""
    made = case.build()
    posterior, x = fitted(made, case), inputs_of(made.batches[0])
    names = list(posterior.fitted_factors().blocks)
    J = jacobian(made.model, names, x)
    f = outputs(made.model, made.batches[0]).detach()
    samples = posterior.sample(3, torch.Generator().manual_seed(0))
    change = torch.einsum("ntcp,sp->sntc", J, samples - posterior.mean)
    linearised = or_refused(posterior.linearised_outputs, samples, x)
    same("outputs by forward-mode", linearised, f + change.reshape(3, *f.shape))
    mean, covariance = or_refused(posterior.output_distribution, x)
    Sigma = torch.block_diag(*(P.inverse() for P in precision(posterior).values()))
    expected = torch.einsum("ntcp,pq,ntdq->ntcd", J, Sigma, J)
    same("outputs", mean, f)
    same("covariances", covariance, expected.reshape(covariance.shape))
    _, variance = posterior.output_distribution(x, variance_only=True)
    same("variances", variance, covariance.diagonal(dim1=-2, dim2=-1))


@relation(15, most=1, small=True, plain=True)
def samples_have_the_precision(case: Case) -> None:
    """Samples are θ* + P^-½ ε: their squared length by P is that of ε; constants are not drawn."""
    made = case.build()
    posterior = fitted(made, case)
    samples = posterior.sample(3, torch.Generator().manual_seed(1)) - posterior.mean
    by_name = {name: t.flatten(1) for name, t in posterior.named(samples).items()}
    P = precision(posterior)
    found = sum(torch.einsum("sp,pq,sq->s", by_name[n], P[n], by_name[n]) for n in P)
    noise = torch.randn(3, samples.shape[1], generator=torch.Generator().manual_seed(1)).double()
    if not (case.net.embeds and case.net.padding_idx):
        noise = torch.randn(
            3, samples.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        same("the length of samples", found, noise.square().sum(1))
    elif by_name.get("embedding.weight") is not None and not case.net.head_tied:
        same("the padding's row", by_name["embedding.weight"][:, : case.net.width], torch.zeros(3, case.net.width))


# --- one way of calling against another ---


@relation(20, most=3, plain=True, approx=("expand", "reduce"))
def a_fit_is_a_pass(case: Case) -> None:
    """`Posterior.fit`, at once and batch by batch, in any mode, has the factors of the function."""
    made = case.build()
    expected = factors_of(made)
    at_once, added = (
        or_refused(Posterior, made.model, made.likelihood, made.options) for _ in range(2)
    )
    summed = or_refused(one_by_one, made)
    made.model.train(case.dice % 2 == 0)
    modes = [m.training for m in made.model.modules()]
    at_once.fit(loader(made.batches, case.data.loader))
    same_factors(at_once.fitted_factors(), expected)
    at_once.fit(made.batches)  # once more, with the proof that is there
    same_factors(at_once.fitted_factors(), expected)
    for batch in made.batches:
        added.fit([batch], override=False)
    same_factors(added.fitted_factors(), summed)
    if (case.dice % 2 == 0) != modes[0]:
        raise Violated("the mode of the model has changed")


@relation(20, most=1, plain=True, approx=("expand", "reduce"), fisher=("exact",), pads=(False,))
def a_step_sees_the_same(case: Case) -> None:
    """The optimiser's factors in a step of training are those of the function."""
    made = case.build()
    if case.data.ignored or isinstance(made.batches[0], dict):
        return
    expected = factors_of(made)
    optimizer = or_refused(
        KFAC, made.model, made.likelihood, curvature=made.options, mean_over="examples"
    )
    loss = loss_of(made, made.batches[0])
    loss.backward()
    optimizer.step()
    optimizer.preconditioner.detach()
    N = expected.num_data
    for name, block in optimizer.preconditioner.blocks.items():
        same(f"the block of '{name}'", block.to_dense() * N, expected.to_dense(name), 1.0)


def loss_of(made: Built, batch: Any, likelihood: Any = None) -> Tensor:
    """The mean loss of the batch's examples."""
    of = likelihood_of(made.likelihood) if likelihood is None else likelihood
    y = targets_in(batch)
    return of.loss(outputs(made.model, batch), y) / len(y)


@relation(12, most=2, plain=True)
def saved_is_loaded(case: Case) -> None:
    """A posterior that was saved and loaded into another network is the same."""
    made = case.build()
    posterior = fitted(made, case)
    same_when_loaded(posterior, made, replace(case, seed=case.seed + 1))


def same_when_loaded(posterior: Posterior, made: Built, other: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_posterior(posterior, folder)
        network = other.build().model
        network.load_state_dict(
            {k: v for k, v in posterior.model.state_dict().items()}, strict=False
        )  # what is frozen
        loaded = load_posterior(folder, network)
    same_posteriors(loaded, posterior)
    x = inputs_of(made.batches[0])
    found, expected = (or_refused(p.output_distribution, x) for p in (loaded, posterior))
    for what, a, b in zip(("outputs", "covariances"), found, expected, strict=True):
        same(what, a, b)


def same_posteriors(found: Posterior, expected: Posterior) -> None:
    """The mean, the factors and all numbers that were learned."""
    if str(found.likelihood) != str(expected.likelihood):
        raise Violated(f"the likelihood: {found.likelihood}, not {expected.likelihood}")
    same("the mean", found.mean, expected.mean)
    same_factors(found.fitted_factors(), expected.fitted_factors())
    for name in ("prior_precision", "sigma_noise", "temperature"):
        values = (torch.as_tensor(getattr(p, name)).expand(p.n_layers) for p in (found, expected))
        same(name, *values)
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


def unchanged(model: nn.Module, before: dict[str, Any], when: str) -> None:
    """Raise Violated unless the state is that of before."""
    now = state_of(model)
    changed = [what for what in now if now[what] != before[what]]
    if changed:
        raise Violated(f"{when}: {', '.join(changed)} changed")


@relation(35, approx=("auto", "auto", "reduce"), most=2, plain=True, small=True)
def a_failure_changes_nothing(case: Case) -> None:
    """A call whose n-th forward pass fails leaves everything as it was, and changes no number.

    It raises the failure, or returns what it returns without one; the next call does, too.
    """
    made = case.build()
    network, x = network_of(made.model), inputs_of(made.batches[0])
    posterior = or_refused(Posterior, made.model, made.likelihood, made.options)

    def fit() -> list[Tensor]:
        posterior.fit(made.batches)
        blocks = posterior.fitted_factors().blocks
        return [block.to_dense() for block in blocks.values()]

    def function() -> list[Tensor]:
        blocks = factors_of(made).blocks
        return [block.to_dense() for block in blocks.values()]

    def predict() -> list[Tensor]:
        return list(fitted(made, case).output_distribution(x))

    call = (fit, function, predict)[case.dice % 3]
    network.calls = 0
    before = state_of(made.model)
    expected = or_refused(call)
    unchanged(made.model, before, "without a failure")
    network.fails_at = 1 + case.seed % network.calls
    network.error = torch.OutOfMemoryError if case.dice % 2 else LookupError
    posterior = Posterior(made.model, made.likelihood, made.options)
    for when in ("with a failure", "after a failure"):
        network.calls = 0 if when == "with a failure" else 10**6
        try:
            found = call()
        except (torch.OutOfMemoryError, LookupError) as error:
            if when == "after a failure":
                raise Violated(f"{when}: {error}") from error
        else:
            for tensor, right in zip(found, expected, strict=True):
                same(when, tensor, right, 1.0)
        unchanged(made.model, before, when)


@relation(10, most=2, plain=True)
def moved_weights_are_refused(case: Case) -> None:
    """A posterior whose network has moved since the fit predicts nothing until it is back."""
    made = case.build()
    posterior, x = fitted(made, case), inputs_of(made.batches[0])

    def predicted() -> Any:
        if case.dice % 2:
            return posterior.output_distribution(x)
        return laplace_predictive(posterior, generator=torch.Generator().manual_seed(0))(x)

    or_refused(predicted)
    before = [p.detach().clone() for p in posterior.params]
    with torch.no_grad():
        for p in posterior.params:
            p.add_(0.1)
    with suppress(ValueError):
        predicted()
        raise Violated("predictions at weights that the posterior is not of")
    with torch.no_grad():
        for p, value in zip(posterior.params, before, strict=True):
            p.copy_(value)
    predicted()


# --- the optimiser ---

FISHERS = ("mc", "exact", "empirical")


def kfac(made: Built, case: Case, params: Any = None) -> KFAC:
    """An optimiser of some parameters, or Refused."""
    return or_refused(
        KFAC, made.model, made.likelihood, lr=0.02, params=params, curvature=made.options,
        options=PreconditionerOptions(factor_every=1 + case.dice % 2, update_every=1),
        mean_over="examples",
    )  # fmt: skip


def steps(made: Built, optimizer: KFAC, number: int) -> None:
    """Steps of training on the batches in turn."""

    def step(i: int) -> None:
        made.model.zero_grad()
        loss_of(made, made.batches[i % len(made.batches)]).backward()
        optimizer.step()

    or_refused(step, 0)
    for i in range(1, number):
        step(i)


def halves(made: Built, case: Case) -> tuple[list[str], list[str]]:
    """Some of the trainable parameters, and the others."""
    names = [name for name, p in made.model.named_parameters() if p.requires_grad]
    some = [name for i, name in enumerate(names) if (i + case.dice) % 3] or names[:1]
    return some, [name for name in names if name not in some]


def same_parameters(found: nn.Module, expected: nn.Module, names: Any = None) -> None:
    expected_values = dict(expected.named_parameters())
    for name, p in found.named_parameters():
        if names is None or name in names:
            same(f"parameter '{name}'", p, expected_values[name])


OPTIMISED: Mapping[str, Any] = {
    "plain": True, "fisher": FISHERS, "approx": ("expand", "reduce"), "pads": (False,),
}  # fmt: skip


@relation(12, most=2, **OPTIMISED)
def a_subset_is_trained_alone(case: Case) -> None:
    """An optimiser of some parameters takes the steps that it takes where the others are frozen.

    The others keep their values, and the gradients that the loss has.
    """
    with_others, alone = case.build(), case.build()
    some, others = halves(alone, case)
    for name in others:
        alone.model.get_parameter(name).requires_grad_(False)
    steps(alone, kfac(alone, case), 3)
    untouched = case.build().model
    steps(
        with_others, kfac(with_others, case, [with_others.model.get_parameter(n) for n in some]), 3
    )
    same_parameters(with_others.model, untouched, others)
    same_parameters(with_others.model, alone.model, some)


@relation(8, most=2, **OPTIMISED)
def groups_may_come_later(case: Case) -> None:
    """Parameters that are added before the first step are trained as if they had been there."""
    at_once, later = case.build(), case.build()
    some, others = halves(later, case)
    if not others:
        return
    steps(at_once, kfac(at_once, case), 3)
    optimizer = kfac(later, case, [later.model.get_parameter(n) for n in some])
    or_refused(
        optimizer.add_param_group, {"params": [later.model.get_parameter(n) for n in others]}
    )
    steps(later, optimizer, 3)
    same_parameters(later.model, at_once.model)


@relation(8, most=2, **OPTIMISED)
def frozen_later_is_frozen(case: Case) -> None:
    """Parameters that are frozen before the first step are as if frozen from the start."""
    before, later = case.build(), case.build()
    _, others = halves(later, case)
    for name in others:
        before.model.get_parameter(name).requires_grad_(False)
    steps(before, kfac(before, case), 3)
    optimizer = kfac(later, case)
    for name in others:
        later.model.get_parameter(name).requires_grad_(False)
    steps(later, optimizer, 3)
    same_parameters(later.model, before.model)


@relation(8, most=2, **OPTIMISED)
def an_optimizer_goes_on(case: Case) -> None:
    """Steps after a state was loaded are those of one run; a state that is refused loads nothing."""
    whole, resumed = case.build(), case.build()
    optimizer = kfac(whole, case)
    steps(whole, optimizer, 2)
    resumed.model.load_state_dict(whole.model.state_dict())
    state = deepcopy(optimizer.state_dict())
    steps(whole, optimizer, 2)
    other = kfac(resumed, case)
    other.load_state_dict(state)
    steps(resumed, other, 2)
    same_parameters(resumed.model, whole.model)
    params = [p for p in resumed.model.parameters() if p.requires_grad]
    if len(params) > 1:
        groups = kfac(resumed, case, [{"params": params[:1]}, {"params": params[1:]}])
        before = repr(groups.state_dict())
        with suppress(ValueError):
            groups.load_state_dict(state)
            raise Violated("the state of one group was loaded into two")
        if repr(groups.state_dict()) != before:
            raise Violated("a state that was refused has been loaded in part")


# --- training ---

EPOCHS = 3
TRAINED: Mapping[str, Any] = {
    "plain": True, "small": True, "likelihoods": LEARNED, "least": 2,
    "approx": ("reduce", "expand", "auto"), "fisher": ("exact",),
}  # fmt: skip


def learner_of(case: Case, made: Built) -> PriorLearner:
    """A learner of all that can be learned, updated after each epoch."""
    of = likelihood_of(made.likelihood)
    average: Any = None if case.dice % 2 else "last"
    schedule = Schedule(EPOCHS, every=1, steps=2, average=average)
    return or_refused(
        PriorLearner, made.likelihood, made.options, learn_sigma_noise=of.has_sigma,
        schedule=schedule, curvature_from="pass",
    )  # fmt: skip


def ready(case: Case) -> tuple[Built, torch.optim.Optimizer, PriorLearner]:
    """What training needs, of a case that a pass takes; or Refused."""
    made = case.build()
    if made.batches and case.counts and case.net.pool is None:
        raise Refused("labels that are hidden by a mask, which a plain loop would count")
    or_refused(or_refused(Posterior, made.model, made.likelihood, made.options).fit, made.batches)
    optimizer = torch.optim.SGD([p for p in made.model.parameters() if p.requires_grad], lr=0.01)
    return made, optimizer, learner_of(case, made)


def plain_loop(
    made: Built, optimizer: torch.optim.Optimizer, learner: PriorLearner, first: int = 1,
    last: int = EPOCHS,
) -> None:  # fmt: skip
    """A training loop as users write it, without the learner's start and end."""
    for epoch in range(first, last + 1):
        made.model.train()
        for batch in made.batches:
            optimizer.zero_grad()
            loss_of(made, batch, learner.likelihood).backward()
            learner.add_to_gradients()
            optimizer.step()
        learner.end_of_epoch(epoch)


def learn(case: Case) -> tuple[Built, PriorLearner]:
    made, optimizer, learner = ready(case)
    torch.manual_seed(case.seed)
    or_refused(learner.start, made.model, optimizer, made.batches, EPOCHS, sums_terms=True)
    plain_loop(made, optimizer, learner)
    learner.end_of_training()
    return made, learner


@relation(12, most=2, **TRAINED)
def what_is_taken_is_trained(case: Case) -> None:
    """Training ends with a posterior of the network if its model and data are taken at the start.

    The posterior has the numbers that were learned, and is saved and loaded with them.
    """
    made, learner = learn(case)
    posterior = learner.posterior
    assert posterior is not None
    if str(posterior.likelihood) != str(learner.likelihood):
        raise Violated(f"the likelihood: {posterior.likelihood}, not {learner.likelihood}")
    theta = torch.cat([p.detach().flatten() for p in posterior.params])
    same("the mean", posterior.mean, theta)
    made.model.eval()
    same_when_loaded(posterior, made, replace(case, seed=case.seed + 1))


@relation(6, most=2, **TRAINED)
def all_ways_train_alike(case: Case) -> None:
    """A plain loop, `OnlineTraining` and `marglik_training` come to the same posterior."""
    _, learner = learn(case)
    assert learner.posterior is not None
    made, optimizer, other = ready(case)
    torch.manual_seed(case.seed)
    if case.dice % 3 == 0:
        training = or_refused(OnlineTraining, made.model, optimizer, made.batches, other)
        found = training.run().laplace
    else:
        options = made.options
        found, *_ = or_refused(
            marglik_training, made.model, made.batches, made.likelihood,
            optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 0.01},
            scheduler_cls=torch.optim.lr_scheduler.ConstantLR, scheduler_kwargs={"factor": 1.0},
            n_epochs=EPOCHS, n_hypersteps=2, marglik_frequency=1, dict_key_x="x",
            average=other.schedule.average, kfac_approx=options.kfac_approx,
            unsupported=options.unsupported, diagonal_above=options.diagonal_above,
            dict_key_mask=options.dict_key_mask, ignore_index=options.ignore_index,
        )  # fmt: skip
    same_posteriors(found, learner.posterior)


@relation(5, most=2, **TRAINED)
def training_goes_on(case: Case) -> None:
    """Training from a state in its midst ends as one that was not interrupted."""
    _, learner = learn(case)
    made, optimizer, first = ready(case)
    torch.manual_seed(case.seed)
    or_refused(first.start, made.model, optimizer, made.batches, EPOCHS, sums_terms=True)
    stop = 1 + case.dice % (EPOCHS - 1)
    plain_loop(made, optimizer, first, last=stop)
    states = deepcopy((made.model.state_dict(), optimizer.state_dict(), first.state_dict()))
    random = torch.get_rng_state()
    made, optimizer, second = ready(replace(case, seed=case.seed))
    second.load_state_dict(states[2])
    second.start(made.model, optimizer, made.batches, EPOCHS, sums_terms=True)
    made.model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    torch.set_rng_state(random)
    plain_loop(made, optimizer, second, first=stop + 1)
    second.end_of_training()
    assert learner.posterior is not None and second.posterior is not None
    same_posteriors(second.posterior, learner.posterior)
