"""Influence against retrained networks, and against dense blocks from Jacobians."""

from collections.abc import Mapping
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import corrected_factors
from kfac_backend.blocks.block import CorrectedBlock
from kfac_backend.fisher import DrawnLabels
from kfac_backend.ranks import Ranks
from marglik import Posterior, influence, self_influence
from marglik.attribution import influence as module
from marglik.attribution import store
from marglik.attribution.influence import conjugate_gradients
from marglik.data import Batches
from tests import oracles
from tests.kfac_backend.block_checks import basis, batch_of, targets_of
from tests.kfac_backend.layer_cases import CASES, case
from tests.random_numbers import normal
from tests.worlds import failed

SIGMA, TEMPERATURE = 0.7, 1.3


def fitted(model, x, likelihood="regression", **options):
    """The posterior, a prior precision for each tensor, and the batch."""
    batch = batch_of(x, targets_of(model(x).detach(), likelihood))
    if likelihood == "regression":
        options["sigma_noise"] = SIGMA
    posterior = Posterior(
        model, likelihood, kfac_approx="expand", temperature=TEMPERATURE, **options
    )
    posterior.fit([batch])
    posterior.prior_precision = 0.3 + 0.1 * torch.arange(len(posterior.factors)).double()
    return posterior, batch


def jacobians_of(posterior, x, N):
    """Jacobians (N, T, P) of each parameter."""
    values = dict(posterior.model.named_parameters())
    parameters = {name: values[name].detach() for name in posterior.factors.blocks}
    # Of a copy: functional_call leaves a layer with two names without its parameters.
    model = deepcopy(posterior.model)
    outputs = lambda p: functional_call(model, p, (x,))  # noqa: E731
    jacobians = oracles.jacobian_of(outputs, parameters, oracles.packs(posterior.model))
    sizes = {name: len(p.flatten()) for name, p in parameters.items()}
    return {name: J.reshape(N, -1, sizes[name]) for name, J in jacobians.items()}


def gradients_of(posterior, x, cotangent):
    """Σ over outputs of cotangent · Jacobian, (N, P) of each parameter, by Jacobians."""
    return contracted(cotangent, jacobians_of(posterior, x, len(cotangent)))


def contracted(cotangent, jacobians):
    v = cotangent.flatten(1)
    return {name: torch.einsum("nt,ntp->np", v, J) for name, J in jacobians.items()}


def scores_of(of_queries, of_train, precisions):
    """Σ over blocks of g_q M⁻¹ g_n, from dense M; a block may have several tensors."""
    total = torch.zeros(())
    for names, M in precisions.items():
        names = names.split()
        queries, train = (torch.cat([g[n] for n in names], 1) for g in (of_queries, of_train))
        total = total + queries @ torch.linalg.solve(M, train.T)
    return total


def dense_precisions(posterior, blocks, scale):
    return {
        name: scale * block + posterior.prior_precision[i] * torch.eye(len(block))
        for i, (name, block) in enumerate(blocks.items())
    }


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def of_regression(name):
    """A posterior of a case, its batch, the exact blocks, gradients of all losses, Jacobians."""
    model, x = case(name)
    posterior, batch = fitted(model, x)
    inputs = batch if isinstance(x, Mapping) else x
    exact = oracles.ggn_blocks(model, lambda run: run(inputs), "regression")
    f = model(x).detach()
    y = batch["labels"] if isinstance(x, Mapping) else batch[1]
    jacobians = jacobians_of(posterior, inputs, len(f))
    return posterior, batch, exact, contracted(f - y, jacobians), jacobians


@pytest.mark.parametrize("name", [name for name in CASES if name != "no rule"])
def test_exact_blocks_of_every_layer(name):
    """By the dense GGN of each tensor: tied, packed, masked, padded, recurrent and all others.

    The default has one block for all tensors of a module, and 3 δ for regression.
    """
    posterior, batch, exact, gradients, jacobians = of_regression(name)
    scale = 1 / (SIGMA**2 * TEMPERATURE)
    of_queries = {name: g / SIGMA**2 for name, g in gradients.items()}
    of_train = {name: g * scale for name, g in gradients.items()}
    precisions = dense_precisions(posterior, exact, scale)
    expected = scores_of(of_queries, of_train, precisions)
    found = influence(posterior, [batch], [batch], blocks="tensor", damping="evidence")
    assert found.dtype == torch.float64
    assert relative(found, expected) < 1e-7
    # The control: without the curvature they are others.
    flat = {name: torch.eye(len(M)).double() for name, M in precisions.items()}
    assert relative(found, scores_of(of_queries, of_train, flat)) > 0.1
    modules, precisions = {}, {}
    for tensor in exact:
        modules.setdefault(tensor.rpartition(".")[0], []).append(tensor)
    delta = dict(zip(exact, posterior.prior_precision, strict=True))
    for tensors in modules.values():
        J = torch.cat([jacobians[tensor] for tensor in tensors], 2).flatten(0, 1)
        P = torch.cat([3 * delta[t].expand(jacobians[t].shape[2]) for t in tensors])
        precisions[" ".join(tensors)] = scale * J.T @ J + torch.diag(P)
    found = influence(posterior, [batch], [batch])
    assert relative(found, scores_of(of_queries, of_train, precisions)) < 1e-6


KINDS = ("Linear, two shared axes", "Conv1d", "Embedding of grids", "language model", "attention")


@pytest.mark.parametrize("name", KINDS)
def test_other_curvatures_and_blocks(name):
    """K-FAC, EKFAC, whole modules, and each damping; all differ from each other."""
    posterior, batch, exact, gradients, _ = of_regression(name)
    scale = 1 / (SIGMA**2 * TEMPERATURE)
    of_queries = {name: g / SIGMA**2 for name, g in gradients.items()}
    of_train = {name: g * scale for name, g in gradients.items()}
    corrected = corrected_factors(posterior.factors, posterior.model, [batch])
    dense = {
        "exact": exact,
        "kfac": {name: posterior.factors.to_dense(name) for name in exact},
        "ekfac": {},
    }
    for block_name, block in corrected.blocks.items():
        dense["ekfac"][block_name] = block.to_dense()
        if isinstance(block, CorrectedBlock):
            Q = basis(block)
            of_exact = Q @ torch.diag((Q.T @ exact[block_name] @ Q).diag()) @ Q.T
            assert_close(dense["ekfac"][block_name], of_exact)
    results = []
    for curvature, blocks in dense.items():
        for damping in ("evidence", "relative", 0.4):
            precisions = dense_precisions(posterior, blocks, scale)
            if damping != "evidence":
                for block_name in precisions:
                    H = scale * blocks[block_name]
                    own = 0.1 * H.trace() / len(H) if damping == "relative" else damping
                    precisions[block_name] = H + own * torch.eye(len(H))
            expected = scores_of(of_queries, of_train, precisions)
            found = influence(
                posterior, [batch], [batch], curvature=curvature, blocks="tensor", damping=damping
            )
            assert relative(found, expected) < 1e-6, (curvature, damping)
            results.append(found)
    distances = [relative(a, b) for i, a in enumerate(results) for b in results[:i]]
    assert min(distances) > 1e-4


def images():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    )
    return model.double().eval(), normal(6, 1, 3, 3)


def classes(**options):
    """A posterior of a small network for classes, its batch, and the gradients by cotangent."""
    model, x = images()
    posterior, batch = fitted(model, x, "classification", **options)
    f = model(x).detach()
    p = f.softmax(1)
    return posterior, batch, f, p, torch.diag_embed(p) - p[:, :, None] * p[:, None]


def test_measurements():
    posterior, (x, y), f, p, _ = classes()
    rows, hot = torch.arange(6), torch.nn.functional.one_hot(y, 3).double()
    others = f.masked_fill(hot.bool(), -torch.inf)
    runner_up = torch.nn.functional.one_hot(others.argmax(1), 3)
    cotangents = {
        "loss": p - hot,
        "margin": hot - runner_up,
        "log_odds": hot - others.softmax(1),
        lambda f, y: f[:, 0].square(): 2 * f[:, :1] * torch.tensor([1.0, 0, 0]),
    }
    of_train = gradients_of(posterior, x, (p - hot) / TEMPERATURE)
    exact = oracles.ggn_blocks(posterior.model, lambda run: run(x), "classification")
    precisions = dense_precisions(posterior, exact, 1 / TEMPERATURE)
    results = []
    for measurement, cotangent in cotangents.items():
        expected = scores_of(gradients_of(posterior, x, cotangent), of_train, precisions)
        found = influence(posterior, [(x, y)], [(x, y)], measurement=measurement, blocks="tensor")
        assert relative(found, expected) < 1e-6, measurement
        results.append(found)
    # log p/(1 − p) of the label is log_odds; and the margin is neither.
    assert_close((p[rows, y] / (1 - p[rows, y])).log(), f[rows, y] - others.logsumexp(1))
    assert relative(results[1], results[2]) > 0.01
    with pytest.raises(ValueError, match=r"\(6, 3\).* one number for each query \(6,\)"):
        influence(posterior, [(x, y)], [(x, y)], measurement=lambda f, y: f)
    with pytest.raises(ValueError, match="measurement='margins' is not supported"):
        influence(posterior, [(x, y)], [(x, y)], measurement="margins")


def test_exact_blocks_of_a_posterior_from_random_signs():
    """Learners estimate curvature with random signs. The exact blocks are exact nevertheless."""
    of_signs, batch, *_ = classes(fisher="random_signs")
    of_exact, *_ = classes()
    scores = [
        influence(posterior, [batch], [batch], curvature=curvature)
        for curvature in ("exact", "ekfac")
        for posterior in (of_signs, of_exact)
    ]
    assert relative(scores[0], scores[1]) < 1e-7
    assert relative(scores[2], scores[3]) > 0.01  # the control


def test_drawn_rows_are_averaged_with_ekfac(monkeypatch):
    """By dense blocks from known labels in place of draws."""
    posterior, (x, y), f, p, _ = classes()
    fixed = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 2, 1, 0], [1, 1, 0, 2, 0, 2]]), 3)
    draws = lambda self, likelihood, f, y, generator: iter((f.softmax(1) - fixed) / 2**0.5)  # noqa: E731
    monkeypatch.setattr(DrawnLabels, "columns", draws)
    posterior, batch, *_ = classes(fisher="mc", mc_samples=2)
    of_vectors = [gradients_of(posterior, x, v) for v in (p - fixed) / 2**0.5]
    G = {name: torch.cat([g[name] for g in of_vectors]) for name in of_vectors[0]}
    corrected = corrected_factors(posterior.factors, posterior.model, [batch])
    delta = dict(zip(G, posterior.prior_precision, strict=True))
    hot = torch.nn.functional.one_hot(y, 3)
    of_queries = gradients_of(posterior, x, p - hot)
    of_train = {name: g / TEMPERATURE for name, g in of_queries.items()}
    modules, precisions = {}, ({}, {})
    for name in G:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    for tensors in modules.values():
        H = torch.cat([G[name] for name in tensors], 1)
        H = H.T @ H / TEMPERATURE
        E = torch.block_diag(*(corrected.blocks[n].to_dense() / TEMPERATURE for n in tensors))
        P = torch.cat([delta[n].expand(G[n].shape[1]) for n in tensors])
        s = torch.linalg.eigvals(E @ torch.linalg.inv(E + P.diag())).real
        noise, signal = s.sum() ** 2 / 12, s.square().sum()
        w = noise / (noise + signal)
        assert 0.1 < w < 0.9
        precisions[0][" ".join(tensors)] = (1 - w) * H + w * E + P.diag()
        precisions[1][" ".join(tensors)] = H + P.diag()
    found = influence(posterior, [batch], [batch])
    assert relative(found, scores_of(of_queries, of_train, precisions[0])) < 1e-6
    assert relative(found, scores_of(of_queries, of_train, precisions[1])) > 0.02  # the control


def test_averages_with_ekfac_are_closer_to_the_exact_scores(monkeypatch):
    """One draw per example: without the average the scores have more noise."""
    posterior, batch, *_ = classes()
    exact = influence(posterior, [batch], [batch])
    estimate, *_ = classes(fisher="mc")
    errors = []
    for share in (module.noise_share, lambda shares, number: 0.0):
        monkeypatch.setattr(module, "noise_share", share)
        scores = [influence(estimate, [batch], [batch]) for _ in range(20)]
        errors.append(torch.stack([relative(one, exact) * torch.ones(()) for one in scores]).mean())
    assert errors[0] < 0.9 * errors[1]


def test_an_example_with_many_vectors_keeps_its_random_signs(monkeypatch):
    of_signs, batch, *_ = classes(fisher="random_signs")
    exact = influence(of_signs, [batch], [batch])
    monkeypatch.setattr(module, "MOST_VECTORS", 1)  # three classes have two
    assert relative(influence(of_signs, [batch], [batch]), exact) > 0.01


@pytest.mark.parametrize("name", ["Linear, two shared axes", "Embedding of grids", "attention"])
def test_self_influence_is_the_diagonal(name):
    """By dense blocks, and as `influence` has it; a posterior with corrected ones takes parts."""
    posterior, batch, exact, gradients, _ = of_regression(name)
    scale = 1 / (SIGMA**2 * TEMPERATURE)
    corrected = corrected_factors(posterior.factors, posterior.model, [batch])
    blocks = {name: block.to_dense() for name, block in corrected.blocks.items()}
    precisions = dense_precisions(posterior, blocks, scale)
    scaled = [{n: g * c for n, g in gradients.items()} for c in (1 / SIGMA**2, scale)]
    expected = scores_of(*scaled, precisions)
    found = self_influence(posterior, [batch])
    assert relative(found, expected.diagonal()) < 1e-7
    assert (
        relative(
            influence(posterior, [batch], [batch], curvature="ekfac", damping="evidence"), expected
        )
        < 1e-7
    )
    # The controls: another example's score, and the other curvature, differ.
    assert relative(found, expected[0]) > 0.1
    plain = self_influence(posterior, [batch], curvature="kfac", damping="relative")
    of_kfac = influence(posterior, [batch], [batch], curvature="kfac", damping="relative")
    assert relative(plain, of_kfac.diagonal()) < 1e-7
    assert relative(plain, found) > 0.01
    by_tensor = scores_of(*scaled, dense_precisions(posterior, exact, scale))
    of_exact = self_influence(posterior, [batch], curvature="exact", blocks="tensor")
    assert relative(of_exact, by_tensor.diagonal()) < 1e-7
    posterior.restore(corrected)
    posterior.prior_precision = 0.3 + 0.1 * torch.arange(len(corrected)).double()
    some = (
        {key: value[2:] for key, value in batch.items()}
        if isinstance(batch, Mapping)
        else tuple(part[2:] for part in batch)
    )
    assert relative(self_influence(posterior, [some]), expected.diagonal()[2:]) < 1e-7


def test_several_terms_of_which_some_do_not_count():
    """Tokens: an example's loss is the sum over those that count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    x = torch.tensor([[0, 1, 2], [3, 3, 1], [2, 0, 1], [1, 1, 1]])
    y = torch.tensor([[1, 2, -100], [3, -100, -100], [0, 1, 2], [1, 3, 0]])
    posterior = Posterior(
        model, "classification", kfac_approx="expand", prior_precision=0.5, ignore_index=-100
    )
    posterior.fit([(x, y)])
    f = model(x).detach()
    hot = torch.nn.functional.one_hot(y.clamp(min=0), 4)
    cotangent = (f.softmax(-1) - hot) * (y >= 0)[..., None]
    gradients = gradients_of(posterior, x, cotangent)
    exact = oracles.ggn_blocks(model, lambda run: run(x), "classification", y < 0)
    precisions = {name: H + 0.5 * torch.eye(len(H)) for name, H in exact.items()}
    found = influence(posterior, [(x, y)], [(x, y)], blocks="tensor")
    assert relative(found, scores_of(gradients, gradients, precisions)) < 1e-7
    with pytest.raises(ValueError, match=r"outputs \(N, C\)"):
        influence(posterior, [(x, y)], [(x, y)], measurement="margin")


def test_leaving_one_out_of_a_quadratic_loss():
    """Retrained in closed form: the change of an output is τ / (1 − h), with the leverage h."""
    N, x = 12, normal(12, 3)
    y = x @ normal(3, 1, seed=2) + 0.3 * normal(12, 1, seed=3) + 1
    X, delta = torch.cat([x, torch.ones(N, 1)], 1), torch.tensor([0.6, 0.6, 0.6, 0.2]).double()

    def solution(rows):
        H = X[rows].T @ X[rows] / SIGMA**2 + torch.diag(delta)
        return torch.linalg.solve(H, X[rows].T @ y[rows] / SIGMA**2), H

    every = torch.arange(N)
    theta, H = solution(every)
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(theta[:3].T)
        model.bias.copy_(theta[3])
    posterior = Posterior(model, "regression", sigma_noise=SIGMA)
    posterior.fit([(x, y)])
    posterior.prior_precision = torch.tensor([0.6, 0.2])
    queries = normal(5, 3, seed=5)
    of_queries = torch.cat([queries, torch.ones(5, 1)], 1)
    changes = torch.stack(
        [(of_queries @ (solution(every[every != n])[0] - theta))[:, 0] for n in range(N)], 1
    )
    batch = [(queries, torch.zeros(5, 1))]
    output = lambda f, y: f[:, 0]  # noqa: E731
    options = {"measurement": output, "damping": "evidence"}
    tau = influence(posterior, batch, [(x, y)], **options)
    leverage = (X @ torch.linalg.inv(H) * X).sum(1) / SIGMA**2
    assert_close(tau / (1 - leverage), changes, rtol=1e-6, atol=1e-9)
    # The controls: weight and bias apart, and another damping.
    by_tensor = influence(posterior, batch, [(x, y)], blocks="tensor", **options)
    assert relative(by_tensor / (1 - leverage), changes) > 0.02
    damped = influence(posterior, batch, [(x, y)], measurement=output, damping=5.0)
    assert relative(damped / (1 - leverage), changes) > 0.1


def test_weighing_one_less_in_logistic_regression():
    """The derivative of the trained loss in an example's weight, by Newton's method in float64."""
    N, x = 10, normal(10, 2)
    y = (x[:, 0] + 0.5 * normal(10, 1, seed=4)[:, 0] > 0).long()
    queries, labels = normal(4, 2, seed=6), torch.tensor([0, 1, 1, 0])
    delta = 0.4

    def trained(weights):
        theta = torch.zeros(6, dtype=torch.float64)  # W (2, 2), then the bias
        f = lambda t, x: x @ t[:4].view(2, 2).T + t[4:]  # noqa: E731

        def objective(t):
            losses = nn.functional.cross_entropy(f(t, x), y, reduction="none")
            return weights @ losses + 0.5 * delta * t @ t

        for _ in range(30):
            step = torch.func.grad(objective)(theta)
            theta = theta - torch.linalg.solve(torch.func.hessian(objective)(theta), step)
        losses = nn.functional.cross_entropy(f(theta, queries), labels, reduction="none")
        return theta, losses

    theta, losses = trained(torch.ones(N).double())
    model = nn.Linear(2, 2).double()
    with torch.no_grad():
        model.weight.copy_(theta[:4].view(2, 2))
        model.bias.copy_(theta[4:])
    posterior = Posterior(model, "classification", prior_precision=delta)
    posterior.fit([(x, y)])
    tau = influence(posterior, [(queries, labels)], [(x, y)])
    step = 1e-4
    for n in range(N):
        less, more = (
            trained(torch.ones(N).double().index_fill(0, torch.tensor([n]), 1 - change))[1]
            for change in (step, -step)
        )
        assert_close(tau[:, n], (less - more) / (2 * step), rtol=1e-5, atol=1e-8)
    # To leave it out altogether is another thing, in the same direction.
    out = torch.stack([trained(torch.ones(N).double() - torch.eye(N)[n])[1] for n in range(N)], 1)
    assert 0.005 < relative(tau, out - losses[:, None]) < 0.5


def test_sizes_of_parts_change_nothing(monkeypatch):
    posterior, (x, y), *_ = classes()
    data = DataLoader(TensorDataset(x, y), 2)
    for curvature in ("exact", "ekfac"):
        expected = influence(posterior, [(x, y)], [(x, y)], curvature=curvature)
        with monkeypatch.context() as patch:
            patch.setattr(module, "QUERY_BYTES", 1)
            patch.setattr(module, "DENSE_BYTES", 1)
            patch.setattr(module, "MOST_TOGETHER", 4)
            found = influence(posterior, data, data, curvature=curvature)
        assert relative(found, expected) < 1e-7
    monkeypatch.setattr(module, "ROW_BYTES", 100)
    with pytest.raises(MemoryError, match="Pass curvature='ekfac'"):
        influence(posterior, [(x, y)], [(x, y)])


def stored(folder, posterior, train, **options):
    """Scores with a store, each batch's apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUERY_BYTES", 1)
        return influence(posterior, train, train, store=folder, **options)


def test_a_killed_computation_goes_on(tmp_path, monkeypatch):
    """Before or after any file: the same scores to the bit, and none is computed twice."""
    posterior, (x, y), *_ = classes()
    train = DataLoader(TensorDataset(x, y), 2)
    expected = stored(tmp_path / "whole", posterior, train)
    assert torch.equal(expected, stored(None, posterior, train))
    write, number = store.write_tensors, len(list((tmp_path / "whole").glob("*.safetensors")))
    assert number == 3  # chunks of queries
    for k in (0, 1, 2, 5):  # of six: three are solved gradients, dropped with the chunk's end

        def killed(path, *rest, left=[None] * k):  # noqa: B006
            if not left:
                raise KeyboardInterrupt
            left.pop()
            return write(path, *rest)

        folder = tmp_path / str(k)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(store, "write_tensors", killed)
            stored(folder, posterior, train)
        (folder / ".partial-1-2-scores-00000.safetensors").write_text("half")
        assert torch.equal(stored(folder, posterior, train), expected)
    with monkeypatch.context() as patch:
        patch.setattr(module._Systems, "run", None)
        assert torch.equal(stored(folder, posterior, train), expected)
        # Other batches of the same training data fit as well.
        again = influence(posterior, train, [(x, y)], store=folder)
    assert torch.equal(again, expected)


def test_a_store_of_another_computation_is_refused(tmp_path):
    posterior, (x, y), *_ = classes()
    data = [(x, y)]
    stored(tmp_path, posterior, data)

    def refused(match, found=posterior, queries=data, train=data, **options):
        with pytest.raises(ValueError, match=f"It differs in {match}. Pass the same"):
            influence(found, queries, train, store=tmp_path, **options)

    refused("the options", curvature="ekfac")
    refused("the options", damping=2.0)
    refused("the measurement", measurement="margin")
    refused("the measurement", measurement=lambda f, y: f[:, 0])
    refused("the training data", train=[(x + 1e-9, y)])
    refused("the training data", train=[(x, y.flip(0))])
    refused("the queries or their batches", queries=[(x[1:], y[1:])])
    refused("the queries or their batches", queries=[(x[:1], y[:1]), (x[1:], y[1:])])
    posterior.temperature = 2.0
    refused("the posterior")
    posterior.temperature = TEMPERATURE
    stored(tmp_path, posterior, data)  # the control
    other, *_ = classes()
    with torch.no_grad():
        other.model[0].bias.add_(1.0)
    other.fit(data)
    refused("the network, the posterior", other)
    with pytest.raises(TypeError, match="contains a object, whose values a store cannot compare"):
        influence(posterior, [(object(), y)], data, store=tmp_path)
    with pytest.raises(TypeError, match="can be read only once"):
        influence(posterior, iter(data), data, store=tmp_path)
    path = next(tmp_path.glob("scores-*"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not an intact file of scores"):
        stored(tmp_path, posterior, data)


def on_ranks(folder=None, other_queries=False):
    """Scores of a rank's part of the data, two or four examples, or of all; and its own ones."""
    model, x = images()
    y, ranks = torch.tensor([0, 2, 1, 1, 0, 2]), Ranks()
    train = Batches(x, y, 5, ranks=ranks)  # of two ranks the first has none of the second batch
    posterior = Posterior(model, "classification", temperature=TEMPERATURE, kfac_approx="expand")
    posterior.fit(train)
    posterior.prior_precision = 0.3 + 0.1 * torch.arange(len(posterior.factors)).double()
    queries = [(x[:3], y[:3]), (x[3:], y[3:])]
    if other_queries and ranks.rank == 1:
        queries = queries[::-1]
    found = {
        "exact": influence(posterior, queries, train, store=folder),
        "layers": influence(posterior, queries, train, blocks="layer", damping="relative"),
        "ekfac": influence(posterior, queries, train, curvature="ekfac"),
        "kfac": influence(posterior, queries, train, curvature="kfac"),
        "self": self_influence(posterior, train),
    }
    if ranks.size > 1:
        with pytest.raises(ValueError, match="Pass 'ekfac', or call influence"):
            self_influence(posterior, train, curvature="exact")
    if folder is not None:
        again = influence(posterior, queries, train, store=folder)
        assert torch.equal(again, found["exact"])
    return found


def test_two_ranks_have_the_scores_of_one_process(worlds, tmp_path):
    """With unequal parts, and a batch of which one has no example."""
    here = f"{__name__}:on_ranks"
    (alone,) = worlds.all(1, here)
    for of_rank in worlds.all(2, here, str(tmp_path)):
        for name, expected in alone.items():
            assert relative(of_rank[name], expected) < 1e-7, name
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["rank-0-of-2", "rank-1-of-2"]
    # The control: with the blocks of one rank's part alone the scores are others.
    model, x = images()
    posterior = Posterior(model, "classification", kfac_approx="expand", temperature=TEMPERATURE)
    y = torch.tensor([0, 2, 1, 1, 0, 2])
    posterior.fit([(x[:4], y[:4])])
    posterior.prior_precision = 0.3 + 0.1 * torch.arange(len(posterior.factors)).double()
    part = influence(posterior, [(x, y)], [(x[:4], y[:4])])
    assert relative(part, alone["exact"][:, :4]) > 0.05
    for one in worlds.run(2, here, None, True):
        assert failed(one) and "the queries" in one.args[1]


def test_refusals():
    posterior, (x, y), *_ = classes()
    data = [(x, y)]
    shuffled = DataLoader(TensorDataset(x, y), 2, shuffle=True)
    for wrong in (shuffled, Batches(x, y, 2, shuffle=True)):
        with pytest.raises(ValueError, match="shuffle=False"):
            influence(posterior, data, wrong)
    with pytest.raises(TypeError, match="can be read only once"):
        influence(posterior, data, iter(data))
    with pytest.raises(ValueError, match="read 4 examples, but the factors are computed from 6"):
        influence(posterior, data, [(x[:4], y[:4])])
    with pytest.raises(ValueError, match="needs curvature='exact'"):
        influence(posterior, data, data, curvature="kfac", blocks="layer")
    for option in ({"curvature": "full"}, {"blocks": "all"}, {"damping": "none"}):
        with pytest.raises(ValueError, match="is not supported; choose one of"):
            influence(posterior, data, data, **option)
    with pytest.raises(ValueError, match="damping must be positive"):
        influence(posterior, data, data, damping=0.0)
    with pytest.raises(ValueError, match="yields no batch"):
        influence(posterior, [], data)
    model, inputs = case("no rule")
    batch = batch_of(inputs, targets_of(model(inputs).detach()))
    diagonal = Posterior(model, "classification", unsupported="diagonal")
    diagonal.fit([batch])
    with pytest.raises(NotImplementedError, match="'layer.weight' has no K-FAC rule"):
        influence(diagonal, [batch], [batch])
    with torch.no_grad():
        posterior.model[0].bias.add_(1.0)
    with pytest.raises(ValueError, match="no longer has the weights"):
        influence(posterior, data, data)


def test_conjugate_gradients_solve_and_say_when_they_do_not(monkeypatch):
    """With rows that are zero, equal, or more than the unknowns; float32 needs less accuracy."""
    root, products = normal(6, 6), []
    M = root @ root.T + torch.diag(10.0 ** torch.arange(-3, 3))
    scale = M.diagonal().rsqrt()
    M = scale[:, None] * M * scale
    matvec = lambda v: products.append(v) or v @ M.to(v)  # noqa: E731
    for number in (9, 3):
        b = normal(number, 6, seed=1)
        b[1], b[2] = 0, b[0]
        products.clear()
        x = conjugate_gradients(matvec, b)
        assert_close(x, torch.linalg.solve(M, b.T).T, rtol=1e-4, atol=1e-6)
        # A row alone needs six products.
        assert len(products) == {9: 1, 3: 2}[number]
    short = conjugate_gradients(matvec, b[:1].float()).double()
    assert 1e-4 < relative(short @ M, b[:1]) < 1.1e-2
    monkeypatch.setattr(module, "MOST_ITERATIONS", 2)
    with pytest.warns(RuntimeWarning, match="relative residual of"):
        worse = conjugate_gradients(matvec, b[:1])
    assert not torch.allclose(worse, x[:1], rtol=1e-2)
