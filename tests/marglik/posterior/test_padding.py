"""An embedding's padding is a constant: no curvature, no prior, no draw; by dense algebra."""

import laplace
import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend import KfacGGN, KroneckerBlock, kronecker_factors
from kfac_backend.optimizer import KFAC
from kfac_backend.optimizer.damped_inverse import damped_inverses, precondition
from marglik import Laplace, Posterior, PriorLearner, load_posterior, save_posterior
from marglik.training.algorithm import penalty
from tests.evidence_oracles import laplace_log_evidence
from tests.kfac_backend.networks import random_model
from tests.random_numbers import normal

V, PAD = 5, 1
DELTA = torch.tensor([0.7, 1.9, 0.4, 1.3], dtype=torch.float64)


def tokens(n=6, length=4):
    """Sequences with one padding each."""
    x = torch.randint(2, V, (n, length), generator=torch.Generator().manual_seed(0))
    x[torch.arange(n), torch.arange(n) % length] = PAD
    return x


def summed(embedded):
    """A deep linear network of what ``embedded`` makes of tokens."""
    return lambda m, x: m.head(embedded(m, x).sum(1))


def head():
    return nn.Linear(3, 2, bias=False)


def embedding(padding_idx=PAD):
    return nn.Embedding(V, 3, padding_idx=padding_idx)


def shared(first, second):
    """Two embeddings with one weight."""
    model = random_model(
        summed(lambda m, x: m.first(x) + 0.5 * m.second(x.flip(1))),
        first=embedding(first), second=embedding(second), head=head(),
    )  # fmt: skip
    model.second.weight = model.first.weight
    return model


def tied(functional):
    """The output layer has the embedding's weight: all of its rows are parameters."""

    def forward(m, x):
        h = m.hidden(m.table(x)).sum(1)
        return F.linear(h, m.table.weight) if functional else m.read(h)

    own = {"table": embedding(), "hidden": nn.Linear(3, 3, bias=False)}
    if not functional:
        own["read"] = nn.Linear(3, V, bias=False)
    model = random_model(forward, **own)
    if not functional:
        model.read.weight = model.table.weight
    return model


MODELS = {
    # name: (network, its parameter with a row PAD that is constant)
    "layer": (lambda: random_model(summed(lambda m, x: m.table(x)), table=embedding(), head=head()),
              "table.weight"),
    "layer, scaled": (
        lambda: random_model(
            lambda m, x: m.head(m.scale * m.table(x).sum(1)),
            scale=torch.ones(1, 3), table=embedding(), head=head(),
        ),
        "table.weight",
    ),
    "function": (
        lambda: random_model(
            summed(lambda m, x: F.embedding(x, m.table, padding_idx=PAD - V)),
            table=torch.zeros(V, 3), head=head(),
        ),
        "table",
    ),
    "two with one padding": (lambda: shared(PAD, PAD), "first.weight"),
    "two with two paddings": (lambda: shared(PAD, 2), None),
    "tied layer": (lambda: tied(False), None),
    "tied function": (lambda: tied(True), None),
}  # fmt: skip


def made(name):
    model, constant = MODELS[name]
    return model().eval(), constant


def is_parameter(model, constant):
    """A mask (P,) of the entries that are no constants."""
    mask = {n: torch.ones_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
    if constant:
        mask[constant][PAD] = False
    return torch.cat([entries.flatten() for entries in mask.values()])


def data(model, x, likelihood="regression"):
    with torch.no_grad():
        f = model(x)
    return [(x, f.argmax(1) if likelihood == "classification" else f + normal(*f.shape))]


def posterior_of(model, x, likelihood="regression", corrected=False, **options):
    number = len(list(model.parameters()))
    posterior = Posterior(model, likelihood, prior_precision=DELTA[:number], **options)
    posterior.fit(data(model, x, likelihood), corrected=corrected)
    return posterior


def jacobian(model, x):
    """Backward mode's, (N, C, P)."""
    at = {n: p.detach() for n, p in model.named_parameters()}
    J = jacrev(lambda p: functional_call(model, p, (x,)))(at)
    return torch.cat([of_one.flatten(2) for of_one in J.values()], 2)


def dense_precision(model, posterior, keep):
    """H + P₀ of the entries that are no constants, from the blocks."""
    H = torch.block_diag(*map(posterior.factors.to_dense, posterior.factors.blocks))
    sizes = torch.tensor([p.numel() for p in model.parameters()])
    prior = DELTA[: len(sizes)].repeat_interleave(sizes)
    H, prior = H[keep][:, keep] / posterior.sigma_noise**2, prior[keep]
    return H, prior


OPTIONS = {
    "expand": {"kfac_approx": "expand"},
    "reduce": {"kfac_approx": "reduce"},
    "diagonal": {"kfac_approx": "reduce", "diagonal_above": 4},
    "corrected": {"kfac_approx": "reduce"},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, mode) for name in MODELS for mode in ("expand", "reduce")),
        ("layer", "diagonal"),
        ("layer", "corrected"),
    ],
)
def test_evidence_samples_and_covariances_agree(name, options, monkeypatch):
    model, constant = made(name)
    x, keep = tokens(), is_parameter(model, constant)
    posterior = posterior_of(
        model, x, "classification", corrected=options == "corrected", **OPTIONS[options]
    )
    H, prior = dense_precision(model, posterior, keep)
    theta = posterior.mean[keep]
    expected = laplace_log_evidence(
        float(posterior.evidence_terms.log_likelihood(posterior.sigma_noise)), theta, H, prior
    )
    assert_close(float(posterior.log_marginal_likelihood()), expected, rtol=1e-9, atol=0)
    blocks = posterior.fitted_factors().blocks.values()
    assert sum(block.num_parameters for block in blocks) == keep.sum()
    number = len(list(model.parameters()))
    log_det = torch.linalg.slogdet(H + torch.diag(prior))[1]
    assert_close(posterior.factors.log_det(DELTA[:number]), log_det)
    if constant:  # negative control: with the row as a parameter the evidence is another
        whole = posterior.mean, *dense_precision(model, posterior, torch.ones_like(keep))
        assert (
            abs(
                laplace_log_evidence(
                    float(posterior.evidence_terms.log_likelihood(posterior.sigma_noise)), *whole
                )
                - expected
            )
            > 0.1
        )

    # What backward mode computes, and the same by dense algebra.
    f, covariance = posterior.output_distribution(x)
    J = jacobian(model, x)
    Sigma = torch.linalg.inv(H + torch.diag(prior))
    assert_close(covariance, J[..., keep] @ Sigma @ J[..., keep].mT)
    assert not J[..., ~keep].any()

    # What forward mode computes, from samples whose noise is the identity.
    P = len(keep)
    monkeypatch.setattr(torch, "randn", lambda *_, dtype, **__: torch.eye(P, dtype=dtype))
    samples = posterior.sample(P)
    assert torch.equal(samples[:, ~keep], posterior.mean[~keep].expand(P, -1))
    moves = posterior.linearised_outputs(samples, x) - f
    assert_close(torch.einsum("snc,snd->ncd", moves, moves), covariance)


def test_files_and_sums_keep_the_constants(tmp_path):
    model, constant = made("layer")
    posterior = posterior_of(model, tokens())
    save_posterior(posterior, tmp_path)
    loaded = load_posterior(tmp_path, made("layer")[0])
    assert float(loaded.log_marginal_likelihood()) == float(posterior.log_marginal_likelihood())
    assert loaded.factors.blocks[constant].constants == (3 * PAD, 3 * PAD + 3)
    both = posterior.factors * 0.5 + posterior.factors
    assert both.blocks[constant].constants == (3 * PAD, 3 * PAD + 3)
    without = kronecker_factors(shared(PAD, 2), data(model, tokens()), "regression")
    with pytest.raises(ValueError, match="'table.weight' and 'first.weight'.* constants"):
        posterior.factors.blocks[constant].add(without.blocks["first.weight"])


@pytest.mark.parametrize("structure", ["kron", "full", "diag", "lowrank"])
def test_the_calls_of_laplace_torch(structure):
    model, constant = made("layer")
    x, keep = tokens(), is_parameter(model, constant)
    la = Laplace(model, "regression", "all", structure, prior_precision=0.7, sigma_noise=0.8)
    la.fit(data(model, x))
    assert_close(la.scatter, 0.7 * la.mean[keep].square().sum())
    samples = la.sample(3)
    assert torch.equal(samples[:, ~keep], la.mean[~keep].expand(3, -1))
    assert (samples[:, keep] != la.mean[keep]).all()
    if structure == "kron":
        return
    J = jacobian(model, x)[..., keep]
    H = torch.einsum("ncp,ncq->pq", J, J) / 0.8**2
    H = torch.diag(H.diagonal()) if structure == "diag" else H
    prior = torch.full_like(la.mean[keep], 0.7)
    expected = laplace_log_evidence(float(la.log_likelihood), la.mean[keep], H, prior)
    assert_close(float(la.log_marginal_likelihood()), expected, rtol=1e-9, atol=0)
    again = Laplace(made("layer")[0], "regression", "all", structure)
    again.load_state_dict(la.state_dict())
    assert_close(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert_close(again.output_distribution(x)[1], la.output_distribution(x)[1])


def test_laplace_torch_with_our_backend():
    """Samples keep the row; the evidence counts it, and so is ours where the row is zero."""
    model, constant = made("layer")
    ((x, y),) = data(model, tokens())
    loader = DataLoader(TensorDataset(x, y), 3)
    keep, evidences = is_parameter(model, constant), []
    for row in (0.0, 1.0):
        with torch.no_grad():
            model.get_parameter(constant)[PAD] = row
        theirs = laplace.Laplace(
            model, "regression", "all", "kron", prior_precision=0.7, backend=KfacGGN
        )
        theirs.fit(loader)
        samples = theirs.sample(2)
        assert torch.equal(samples[:, ~keep], theirs.mean[~keep].expand(2, -1))
        assert (samples[:, keep] != theirs.mean[keep]).all()
        ours = Laplace(model, "regression", "all", kfac_approx="expand", prior_precision=0.7)
        ours.fit(loader)
        evidences.append(
            (theirs.log_marginal_likelihood().double(), ours.log_marginal_likelihood())
        )
    assert_close(*evidences[0])
    theirs, ours = evidences[1]
    assert_close(theirs + 0.5 * 0.7 * 3, ours)


def test_training_leaves_the_row():
    """Neither the learned decay nor K-FAC's weight decay moves it, or counts it."""
    torch.manual_seed(0)
    model, constant = made("layer")
    x = tokens(16)
    (x, y), p = data(model, x)[0], model.get_parameter(constant)
    before = p.detach().clone()
    learner = PriorLearner("regression", updates=0, average=None)
    learner.start(model, torch.optim.SGD(model.parameters(), 0.1), [(x, y)], 1)
    added = penalty(learner.problem, learner.state, with_value=True)
    decays = learner.state.decays
    others = model.head.weight.square().sum()
    norm = p.square().sum() - p[PAD].square().sum()
    assert_close(added, 0.5 * (decays[0] * norm + decays[1] * others).item())
    assert not p.grad[PAD].any() and p.grad[PAD + 1 :].all()
    learner.detach()  # other optimisers follow

    for base in ("sgd", "nadamw"):
        optimizer = KFAC(model, "regression", lr=0.01, base=base, weight_decay=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) - y).square().sum(1).mean().backward()
            optimizer.step()
        state = optimizer.state_dict()
        optimizer = KFAC(model, "regression", lr=0.01, base=base, weight_decay=0.3)
        optimizer.load_state_dict(state)
        (model(x) - y).square().sum(1).mean().backward()
        optimizer.step()
        assert torch.equal(p[PAD], before[PAD])
    assert (p != before)[torch.arange(V) != PAD][1:].all()


@pytest.mark.parametrize("damping_on", ["factors", "product"])
def test_k_fac_is_that_of_the_block_without_the_row(damping_on):
    model, constant = made("layer")
    block = kronecker_factors(model, data(model, tokens()), "regression").blocks[constant]
    G, keep = normal(V, 3), torch.arange(V) != PAD
    without = KroneckerBlock("w", block.B[keep], block.A)
    (whole,), (some,) = (
        precondition(damped_inverses([one], [0.03], damping_on), [g])
        for one, g in ((block, G), (without, G[keep]))
    )
    assert_close(whole[keep], some)


def test_other_weight_decays_do_count():
    """Negative control of the above: a row that an output layer uses has its decay."""
    model, _ = made("tied layer")
    x = tokens(16)
    learner = PriorLearner("regression", updates=0, average=None)
    learner.start(model, torch.optim.SGD(model.parameters(), 0.1), data(model, x), 1)
    penalty(learner.problem, learner.state)
    assert model.table.weight.grad[PAD].all()


@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])
def test_one_prior_precision_for_each_parameter(structure):
    """With the padding, before the fit, or without it, as ``n_params`` then counts."""
    model, constant = made("layer")
    x, keep = tokens(), is_parameter(model, constant)
    delta = torch.linspace(0.5, 2, len(keep)).double()
    la = Laplace(model, "regression", "all", structure)
    la.prior_precision = delta
    la.fit(data(model, x))
    assert la.n_params == keep.sum()
    evidence, covariance = la.log_marginal_likelihood(), la.output_distribution(x)[1]
    la.prior_precision = 1.0
    assert (la.log_marginal_likelihood() - evidence).abs() > 0.1
    la.prior_precision = delta[keep]
    assert_close(la.log_marginal_likelihood(), evidence)
    assert_close(la.output_distribution(x)[1], covariance)
    assert_close(la.prior_precision_diag, delta[keep])
    with pytest.raises(ValueError, match="shape .17,.. Pass"):
        la.prior_precision = torch.ones(17)
