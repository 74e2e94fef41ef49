"""Each structure's posterior against dense float64 matrices from Jacobians, for each likelihood."""

import pytest
import torch
from scipy.sparse.linalg import cg
from torch import nn
from torch.func import functional_call, hessian, jacrev
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from kfac_backend.likelihoods import likelihood_of
from kfac_backend.ranks import Ranks
from marglik import (
    Laplace,
    Posterior,
    calibrate,
    laplace_predictive,
    maximize_evidence,
)
from marglik.prediction.links import predict_from_gaussian
from tests.oracles import NOISY, loss_hessian

STRUCTURES = ["kron", "full", "diag", "lowrank"]
LIKELIHOODS = ["classification", NOISY, "regression", "bernoulli", "poisson", "heteroscedastic"]
DELTA = torch.tensor([0.5, 1.0, 2.0, 3.0]).double()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(likelihood, n=12):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(n, 2, dtype=torch.float64, generator=generator)
    targets = {
        "classification": y.argmax(1), NOISY: y.argmax(1), "bernoulli": (y > 0).double(),
        "poisson": y.abs().round(), "heteroscedastic": y[:, :1],
    }  # fmt: skip
    return x, targets.get(likelihood, y)


def fitted(structure, likelihood, **options):
    sigma = 0.6 if likelihood == "regression" else 1.0
    options = {"prior_precision": DELTA, "sigma_noise": sigma, "temperature": 0.8} | options
    corrected = structure == "corrected"
    structure = "kron" if corrected else structure
    posterior = Posterior(network(), likelihood, structure=structure, **options)
    posterior.fit([data(likelihood)], corrected=corrected)
    return posterior


class Dense:
    """Brute force: H, the precision and Σ (P, P) of a posterior, block by block of "kron"."""

    def __init__(self, posterior, delta=None):
        model, likelihood = posterior.model, str(posterior.likelihood)
        x, y = data(likelihood)
        values = {name: p.detach() for name, p in model.named_parameters()}
        self.sizes = [p.numel() for p in values.values()]
        self.theta = torch.cat([p.flatten() for p in values.values()])
        self.loss = sum(
            likelihood_of(likelihood).loss(model(x[n : n + 1]).detach(), y[n : n + 1])
            for n in range(len(x))
        )
        J = self.jacobian(model, x)
        f = model(x).detach()
        fit = -self.loss
        if likelihood == "regression":
            fit = torch.distributions.Normal(f, posterior.sigma_noise).log_prob(y).sum()
        self.log_likelihood = fit / posterior.temperature
        self.H = torch.zeros(len(self.theta), len(self.theta)).double()
        for n in range(len(x)):
            if likelihood == NOISY:
                lam = loss_hessian(f[n], NOISY)
            elif likelihood == "heteroscedastic":  # not convex: its Fisher information
                root = torch.stack([*likelihood_of(likelihood).root(f[n : n + 1], y[n : n + 1])])
                lam = root[:, 0].T @ root[:, 0]
            else:
                lam = hessian(
                    lambda f_n, n=n: likelihood_of(likelihood).loss(f_n[None], y[n : n + 1])
                )(f[n])
            self.H += J[n].T @ lam @ J[n]
        if posterior.structure == "kron":
            blocks = posterior.fitted_factors().blocks.values()
            self.H = torch.block_diag(*(block.to_dense() for block in blocks))
        elif posterior.structure == "diag":
            self.H = self.H.diagonal().diag()
        self.scale = float(1 / (posterior.sigma_noise.square() * posterior.temperature))
        if delta is None:
            delta = DELTA.repeat_interleave(torch.tensor(self.sizes))
        self.delta = delta
        self.precision = self.scale * self.H + delta.diag()
        self.covariance = torch.linalg.inv(self.precision)

    @staticmethod
    def jacobian(model, x):
        names, values = zip(*model.named_parameters(), strict=True)

        def outputs(*values):
            return functional_call(model, dict(zip(names, values, strict=True)), (x,))

        each = jacrev(outputs, argnums=tuple(range(len(values))))(*values)
        return torch.cat([J.detach().flatten(2) for J in each], -1)

    def evidence(self, prior_mean=0.0):
        log_det_ratio = torch.linalg.slogdet(self.precision)[1] - self.delta.log().sum()
        scatter = (self.delta * (self.theta - prior_mean).square()).sum()
        return self.log_likelihood - 0.5 * (log_det_ratio + scatter)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", [*STRUCTURES, "corrected"])
def test_a_posterior_equals_its_dense_matrix(structure, likelihood, monkeypatch):
    """Evidence, γ, covariances of one and of several inputs, samples, and the predictive."""
    posterior = fitted(structure, likelihood)
    dense, x = Dense(posterior), data(likelihood)[0][:3]
    assert_close(float(posterior.evidence_terms.loss), float(dense.loss))
    assert_close(posterior.log_marginal_likelihood(), dense.evidence())
    sigma = dense.covariance
    gamma = (1 - dense.delta * sigma.diagonal()).split(dense.sizes)
    assert_close(posterior.effective_parameters(), torch.stack([g.sum() for g in gamma]))
    operator, v = posterior.precision(), torch.randn(2, len(sigma)).double()
    assert_close(operator.to_dense(), dense.precision)
    assert_close(operator.covariance(), sigma)
    assert_close(operator.matvec(v), v @ dense.precision)
    assert_close(operator.solve(v), v @ sigma)
    assert_close(operator.logdet(), torch.linalg.slogdet(dense.precision)[1])
    assert_close(operator.diagonal(), dense.precision.diagonal())
    assert_close(operator.variances(), sigma.diagonal())

    J = dense.jacobian(posterior.model, x)
    f, covariance = posterior.output_distribution(x)
    assert_close(f, posterior.model(x).detach())
    assert_close(covariance, J @ sigma @ J.mT)
    variance = posterior.output_distribution(x, variance_only=True)[1]
    assert_close(variance, covariance.diagonal(dim1=-2, dim2=-1))
    _, joint = posterior.joint_output_distribution(X := x[None].clone().requires_grad_())
    assert_close(joint[0], J.flatten(0, 1) @ sigma @ J.flatten(0, 1).mT)
    (gradient,) = torch.autograd.grad(joint.square().sum(), X)
    ahead, behind = (dense.jacobian(posterior.model, x + s).flatten(0, 1) for s in (1e-6, -1e-6))
    change = (ahead @ sigma @ ahead.mT).square() - (behind @ sigma @ behind.mT).square()
    assert_close(gradient.sum(), change.sum() / 2e-6, rtol=1e-5, atol=0)
    used = 0

    def unit_noise(rows, columns, dtype, **_):
        """Columns of the identity, others in each call."""
        nonlocal used
        used += columns
        return torch.eye(rows, dtype=dtype)[:, used - columns : used]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", unit_noise)
        deviations = posterior.sample(2 * len(sigma)) - posterior.mean
    assert used >= len(sigma)
    assert_close(deviations.T @ deviations, sigma)

    predict = laplace_predictive(posterior, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(100, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    of_noise = covariance if likelihood_of(likelihood).has_labels else variance
    expected = predict_from_gaussian(
        f, of_noise, posterior.likelihood, "probit", noise, posterior.sigma_noise
    )
    assert_close(predict(x).mean, expected.mean)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_prior_of_each_parameter_and_a_prior_mean(structure):
    """δ (P,) where there are Jacobians; θ − prior mean in the evidence's penalty."""
    mean = torch.linspace(-1, 1, 26).double()
    if structure == "kron":
        with pytest.raises(ValueError, match=r"\(26,\). Pass a scalar or \(4,\)"):
            fitted(structure, "regression", prior_precision=torch.ones(26))
        posterior = fitted(structure, "regression", prior_mean=mean)
        dense = Dense(posterior)
    else:
        delta = torch.linspace(0.3, 2.0, 26).double()
        posterior = fitted(structure, "regression", prior_precision=delta, prior_mean=mean)
        dense = Dense(posterior, delta)
        assert_close(posterior.precision().to_dense(), dense.precision)
    assert_close(posterior.log_marginal_likelihood(), dense.evidence(mean))
    plain = dense.evidence()  # the negative control
    assert (plain - posterior.log_marginal_likelihood()).abs() > 0.1


@pytest.mark.parametrize("rank", [2, 5])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_low_rank_is_the_largest_eigenpairs_whatever_the_batches(rank, size, monkeypatch):
    """To 1 % of the variances of outputs by the definition: H's largest eigenpairs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    x, y = data("classification", 40)
    full = Posterior(model, "classification", structure="full")
    full.fit([(x, y)])
    values, vectors = torch.linalg.eigh(full.fitted_curvature().H)
    H = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].mT
    J = torch.cat([J.flatten(2) for J in jacobians_of(model, x)], -1)
    expected = torch.einsum("ncp,pq,ncq->nc", J, (H + torch.eye(len(H))).inverse(), J)

    def largest_error():
        low = Posterior(model, "classification", structure="lowrank", rank=rank)
        low.fit([(x[i : i + size], y[i : i + size]) for i in range(0, 40, size)])
        assert len(low.fitted_curvature().H) == rank
        variance = low.output_distribution(x, variance_only=True)[1]
        return (variance / expected - 1).abs().max()

    assert largest_error() < 0.01
    if size == 1 and rank == 2:  # the negative control
        monkeypatch.setattr("marglik.posterior.jacobian_ggn.OVERSAMPLING", -rank)
        assert largest_error() > 0.05


def jacobians_of(model, x):
    """∂f/∂θ of each parameter, (N, C, ...)."""
    named = dict(model.named_parameters())
    return jacrev(lambda values: functional_call(model, values, (x,)))(named).values()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_data_added_later_counts_as_if_it_had_been_there(structure):
    x, y = data("classification")
    at_once = fitted(structure, "classification")
    added = Posterior(
        network(), "classification", structure=structure, prior_precision=DELTA, temperature=0.8
    )
    added.fit([(x[:5], y[:5])])
    assert not torch.allclose(added.log_marginal_likelihood(), at_once.log_marginal_likelihood())
    added.fit([(x[5:], y[5:])], override=False)
    assert added.n_data == 12
    if structure == "kron":  # A is a mean, so that sums of Kronecker products are not of one
        return
    assert_close(added.log_marginal_likelihood(), at_once.log_marginal_likelihood())
    assert_close(added.output_distribution(x), at_once.output_distribution(x))


def evidences_on_ranks():
    """Of each structure, where the second rank has an empty batch, and the third has none."""
    x, y = data("regression")
    shards = [[(x, y)]] if Ranks().size == 1 else [[(x[:7], y[:7])], [(x[:0], y[:0])], []]
    if len(shards) > 1:
        shards[0].append((x[7:], y[7:]))
    found = {}
    for structure in STRUCTURES:
        posterior = Posterior(network(), "regression", structure=structure, prior_precision=DELTA)
        posterior.fit(shards[Ranks().rank])
        found[structure] = posterior.log_marginal_likelihood(), posterior.n_data
        with pytest.raises(ValueError, match="The data is empty"):
            posterior.fit([])
    return found


def test_ranks_without_data_have_the_posterior_of_all(worlds):
    """And an error on all of them where none has data."""
    (alone,) = worlds.all(1, "tests.marglik.posterior.test_precision:evidences_on_ranks")
    for of_rank in worlds.all(3, "tests.marglik.posterior.test_precision:evidences_on_ranks"):
        assert_close(of_rank, alone)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_rest_of_marglik_works_over_it(structure):
    """The evidence's maximum, calibration, and the last layer alone."""
    posterior = fitted(structure, "classification")
    x, y = data("classification")
    before = posterior.log_marginal_likelihood()
    found = maximize_evidence(posterior)
    assert_close(posterior.log_marginal_likelihood(), torch.tensor(-found.objective).double().neg())
    assert posterior.log_marginal_likelihood() > before
    assert calibrate(posterior, [(x, y)])(x).mean.shape == (12, 2)
    posterior.prior_precision = DELTA
    # The last layer alone: the others are constants.
    network_of_last = network()
    network_of_last[0].requires_grad_(False)
    alone = Posterior(
        network_of_last, "classification", structure=structure, temperature=0.8,
        prior_precision=DELTA[2:],
    )  # fmt: skip
    alone.fit([(x, y)])
    last = posterior.output_distribution(x, "last")[1]
    assert_close(last, alone.output_distribution(x)[1])
    assert not torch.allclose(last, posterior.output_distribution(x)[1], rtol=0.1)
    with pytest.raises(ValueError, match="layers='first' is not supported; choose one of 'all'"):
        posterior.output_distribution(x, "first")


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_the_matrix_is_the_one_that_fisher_names(fisher):
    """The empirical Fisher of each example's gradient; labels that are drawn, on average."""
    x, y = data("classification")
    samples = {"mc_samples": 2_000} if fisher == "mc" else {}
    torch.manual_seed(0)
    posterior = fitted("full", "classification", fisher=fisher, **samples)
    H, exact = posterior.fitted_curvature().H, Dense(fitted("full", "classification")).H
    if fisher == "mc":
        assert (H - exact).norm() < 0.05 * exact.norm()
        return
    J, p = Dense.jacobian(posterior.model, x), posterior.model(x).softmax(-1).detach()
    g = torch.einsum("ncp,nc->np", J, p - torch.eye(2).double()[y])
    assert_close(H, g.T @ g)
    assert (H - exact).norm() > 0.02 * exact.norm()  # negative control


def test_a_model_without_a_jacobian_by_vmap_is_named():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x):
            lengths = torch.full((len(x),), x.shape[1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.head(self.rnn(packed)[1][0])

    posterior = Posterior(Packed(), "classification", structure="full")
    with pytest.raises(NotImplementedError, match="packed sequences. Use structure 'kron'"):
        posterior.fit([(torch.randn(3, 4, 2), torch.tensor([0, 1, 1]))])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("structure", ["kron", "full"])
def test_checkpoints_in_train_mode_alone_are_fine_and_others_are_named(structure, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, always):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.always = nn.Linear(3, 4), nn.Linear(4, 2), always

        def forward(self, x):
            h = self.first(x)
            if self.training or self.always:
                return checkpoint(self.last, h, use_reentrant=reentrant)
            return self.last(h)

    x, y = data("classification")

    def outcome(always, trains):
        model = Checkpointed(always).double().train(trains)
        posterior = Posterior(model, "classification", structure=structure)
        posterior.fit([(x, y)])
        return posterior.output_distribution(x)

    assert_close(outcome(always=False, trains=True), outcome(always=False, trains=False))
    with pytest.raises(NotImplementedError, match="checkpoint.*only in train mode"):
        outcome(always=True, trains=False)


DENSITIES = {
    "log_det_prior_precision": lambda la: la.log_det_prior_precision,
    "log_det_posterior_precision": lambda la: la.log_det_posterior_precision,
    "log_det_ratio": lambda la: la.log_det_ratio,
    "scatter": lambda la: la.scatter,
    "log_likelihood": lambda la: la.log_likelihood,
    "log_prob": lambda la: la.log_prob(la.mean + 0.1),
    "square_norm": lambda la: la.square_norm(la.mean + 0.1),
    "posterior_variance": lambda la: la.posterior_variance.log().sum(),
    "functional_variance": lambda la: la.functional_variance(la.jacobians(inputs())[0]).sum(),
    "log_marginal_likelihood": lambda la: la.log_marginal_likelihood(),
}


def inputs():
    return data("regression")[0][:2]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", DENSITIES)
def test_densities_are_differentiable_in_hyperparameters_that_were_set(name, structure):
    """By differences; each also after a call that has kept an operator without a graph."""
    la = Laplace(network(), "regression", "all", structure, temperature=0.8)
    la.fit([data("regression")])

    def at(logs):
        la.prior_precision, la.sigma_noise = logs[:4].exp(), logs[4].exp()
        la.output_distribution(inputs())
        return DENSITIES[name](la)

    logs = torch.linspace(-0.5, 0.7, 5).double().requires_grad_()
    value = at(logs)
    (gradient,) = torch.autograd.grad(value, logs)
    assert not la.sample(2).requires_grad and not la.output_distribution(inputs())[1].requires_grad
    for i in range(5):
        step = 1e-6 * torch.eye(5).double()[i]
        by_differences = (at(logs.detach() + step) - at(logs.detach() - step)) / 2e-6
        assert_close(gradient[i], by_differences, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_is_computed_in_inference_mode_can_be_differentiated_later(structure, dtype):
    models = network().to(dtype), network().to(dtype)
    plain, inside = (
        Laplace(model, "regression", "all", structure, enable_backprop=True) for model in models
    )
    x, batch = inputs().to(dtype), [part.to(dtype) for part in data("regression")]
    for la in (plain, inside):
        la.fit([batch])
        with torch.inference_mode(la is inside):
            la.prior_precision, la.sigma_noise, la.prior_mean = DELTA * 1, 0.6, DELTA[1] * 1
            la.log_marginal_likelihood()
            la(x * 1), la.sample(2), la.functional_variance(la.jacobians(x)[0])
            la.log_prob(la.mean), la.effective_parameters(), la.H
    found = []
    for la in (plain, inside):
        at, delta = x.clone().requires_grad_(), DELTA.clone().requires_grad_()
        f, covariance = la(at)
        value = la.functional_variance(la.jacobians(at)[0]).sum() + covariance.square().sum()
        value = value + la.log_prob(la.mean + at.sum()) + la.log_marginal_likelihood(delta)
        found.append(torch.autograd.grad(value, [at, delta]))
    assert_close(*found)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_jacobians_of_several_positions(structure):
    """Their covariances together have those of each position as blocks of the diagonal."""
    la = Laplace(network(), "regression", "all", structure)
    x, y = data("regression")
    la.fit([(x.unflatten(0, (4, 3)), y.unflatten(0, (4, 3)))])
    J, _ = la.jacobians(x[:6].unflatten(0, (2, 3)))
    assert J.shape == (2, 3, 2, 26)
    together = la.functional_covariance(J)
    rows = J.flatten(0, 2)
    assert_close(together, rows @ la.posterior_covariance @ rows.mT)
    assert_close(together[2:4, 2:4], la.functional_variance(J)[0, 1])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_parameter_without_axes_is_named(structure):
    model = nn.Linear(3, 2)
    model.bias = nn.Parameter(torch.tensor(0.5))
    posterior = Posterior(model.double(), "regression", structure=structure)
    with pytest.raises(ValueError, match="'bias' is 0-dimensional.*shape"):
        posterior.fit([data("regression")])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_precision_is_an_operator_for_scipys_solvers(structure):
    precision = fitted(structure, "classification").precision()
    dense, v = precision.to_dense(), torch.randn(precision.size, dtype=torch.float64)
    operator = precision.linear_operator()
    assert_close(torch.from_numpy(operator @ v.numpy()), dense @ v)
    solution, failed = cg(operator, v.numpy(), rtol=1e-12, maxiter=10_000)
    assert not failed
    assert_close(torch.from_numpy(solution), torch.linalg.solve(dense, v), rtol=1e-6, atol=1e-8)
    inverse = precision.linear_operator(inverse=True)
    assert_close(torch.from_numpy(inverse @ v.numpy()), torch.linalg.solve(dense, v))
