"""Which inputs to label: scores by quadrature and by loops over parameters, choices by search."""

import math
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.testing import assert_close

from marglik import (
    Ensemble,
    Posterior,
    acquire,
    calibrate,
    laplace_predictive,
    map_predictive,
)
from marglik.prediction import acquisition
from marglik.prediction.acquisition import choose_by_outputs, given_label
from tests.random_numbers import normal

M = 30


def posterior(likelihood, outputs, prior_precision=1.0, **options):
    """Of a small network in float64, with its data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x = normal(20, 2)
    y = (x[:, 0] > 0).long() if likelihood == "classification" else normal(20, outputs)
    y = (y > 0).double() if likelihood == "bernoulli" else y
    fitted = Posterior(model, likelihood, prior_precision=prior_precision, **options)
    fitted.fit([(x, y)])
    return fitted, x, y


def pool(scale=2.0):
    return scale * normal(M, 2)


def dense_outputs(fitted, x):
    """Outputs, Jacobians (M, C, P) and the dense covariance of the parameters."""
    parameters = {name: p.detach() for name, p in fitted.model.named_parameters()}
    jacobians = jacrev(lambda p: functional_call(fitted.model, p, (x,)))(parameters)
    f = fitted.model(x).detach()
    J = torch.cat([jacobians[name].flatten(2) for name in parameters], -1)
    blocks = [
        torch.linalg.inv(fitted.factors.to_dense(n) + fitted.prior_precision * torch.eye(s))
        for n, s in ((n, p.numel()) for n, p in parameters.items())
    ]
    return f, J, torch.block_diag(*blocks)


def entropy(p):
    return -sum(q * math.log(q) for q in p if q > 0)


def test_information_of_yes_or_no_is_that_of_a_fine_quadrature():
    fitted, *_ = posterior("bernoulli", 1, 0.1)
    x = pool()
    f, J, covariance = dense_outputs(fitted, x)
    nodes = torch.linspace(-9, 9, 20001).double()
    weights = torch.exp(-0.5 * nodes**2) / torch.exp(-0.5 * nodes**2).sum()
    expected = []
    for n in range(M):
        p = (f[n, 0] + (J[n] @ covariance @ J[n].T)[0, 0].sqrt() * nodes).sigmoid()
        of_mean = entropy([float(weights @ p), 1 - float(weights @ p)])
        expected.append(
            of_mean - float(weights @ torch.special.entr(torch.stack([p, 1 - p])).sum(0))
        )
    found = acquire(fitted, x, 3, batch_size=7)
    assert_close(found.scores, torch.tensor(expected).double(), rtol=1e-4, atol=1e-6)
    assert found.index.tolist() == np.argsort(expected)[::-1][:3].tolist()
    assert_close(found.gain, found.scores[found.index])
    # The control: the MAP's entropy ranks otherwise.
    of_map = acquire(map_predictive(fitted.model, "bernoulli"), x, 3, "entropy")
    p = f[:, 0].sigmoid()
    assert_close(of_map.scores, torch.special.entr(torch.stack([p, 1 - p])).sum(0))
    assert np.corrcoef(of_map.scores, expected)[0, 1] < 0.9


def test_information_of_classes_is_that_of_sampled_parameters():
    """All parameters' outputs one by one, 40,000 of them."""
    fitted, *_ = posterior("classification", 3, 0.3)
    x = pool()[:6]
    f, J, covariance = dense_outputs(fitted, x)
    root = torch.linalg.cholesky(covariance)
    changes = normal(40_000, len(root)) @ root.T
    p = (f + torch.einsum("ncp,sp->snc", J, changes)).softmax(-1)
    expected = [
        entropy(p[:, n].mean(0).tolist()) - float(torch.special.entr(p[:, n]).sum(-1).mean())
        for n in range(6)
    ]
    found = acquire(fitted, x, 2, joint=False, samples=40_000)
    assert_close(found.scores, torch.tensor(expected).double(), rtol=0.03, atol=1e-3)
    # The controls: the entropy, which is larger by the noise of the labels, and no samples at all.
    assert (acquire(fitted, x, 2, "entropy").scores > found.scores + 0.1).all()
    margins = acquire(map_predictive(fitted.model), x, 6, "margin").scores
    largest = f.softmax(-1).sort().values
    assert_close(margins, largest[:, 1] - largest[:, 2])


@pytest.mark.parametrize("outputs", [1, 2])
def test_information_of_numbers_is_a_log_determinant(outputs):
    fitted, *_ = posterior("regression", outputs, sigma_noise=0.3)
    x = pool()
    f, J, _ = dense_outputs(fitted, x)
    covariance = fitted.precision().covariance()
    expected = [
        0.5 * torch.logdet(torch.eye(outputs) + J[n] @ covariance @ J[n].T / 0.09) for n in range(M)
    ]
    found = acquire(fitted, x, 4, "mutual_information")
    assert_close(found.scores, torch.stack(expected))
    # Of any predictive by its variances, which are the same for one output.
    by_variances = acquire(calibrate(fitted, [(x, f)]), x, 4).scores
    assert torch.allclose(by_variances, found.scores) == (outputs == 1)
    with pytest.raises(ValueError, match="'entropy' is for class probabilities"):
        acquire(fitted, x, 1, "entropy")


@pytest.mark.parametrize("outputs", [1, 2])
def test_joint_choice_of_numbers_is_greedy_search(outputs):
    """Among all sets by dense log determinants; twins are chosen once."""
    fitted, *_ = posterior("regression", outputs, sigma_noise=0.3)
    x = pool()[:8]
    score = "mutual_information"
    x[5] = x[2] = x[acquire(fitted, x, 1, score).index.item()]
    _, J, _ = dense_outputs(fitted, x)
    covariance = fitted.precision().covariance()

    def information(chosen):
        rows = torch.cat([J[n] for n in chosen])
        return float(0.5 * torch.logdet(torch.eye(len(rows)) + rows @ covariance @ rows.T / 0.09))

    found, greedy = acquire(fitted, x, 3, score, joint=True), []
    for _ in range(3):
        left = [n for n in range(8) if n not in greedy]
        greedy.append(max(left, key=lambda n: information([*greedy, n])))
    assert found.index.tolist() == greedy
    assert_close(float(found.gain.sum()), information(greedy))
    best = max(map(information, combinations(range(8), 3)))
    assert (1 - 1 / math.e) * best <= information(greedy) <= best + 1e-12
    # The control: single scores choose twins.
    single = acquire(fitted, x, 3, score, joint=False)
    assert information(single.index.tolist()) < information(greedy) - 1e-3
    assert float(single.gain.sum()) > information(single.index.tolist())


@pytest.mark.parametrize("outputs", [1, 2])
def test_predictive_information_is_the_decrease_of_the_entropy_of_other_labels(
    outputs, monkeypatch
):
    """By dense posteriors: a label at x adds J(x)ᵀ J(x)/σ² to the precision of the parameters."""
    fitted, *_ = posterior("regression", outputs, sigma_noise=0.3)
    x = normal(M, 2) + 1
    x[0] = torch.tensor([-3.0, 3.0])
    _, J, _ = dense_outputs(fitted, x)
    precision = torch.linalg.inv(fitted.precision().covariance())

    def entropies(chosen):
        H = precision + sum(J[n].T @ J[n] / 0.09 for n in chosen)
        S = J @ torch.linalg.solve(H, J.mT) + 0.09 * torch.eye(outputs)
        return 0.5 * torch.logdet(S)

    def information(chosen, targets=slice(None)):
        return float((entropies([]) - entropies(chosen))[targets].mean())

    found, greedy = acquire(fitted, x, 2), []
    for _ in range(2):
        left = [n for n in range(M) if n not in greedy]
        greedy.append(max(left, key=lambda n: information([*greedy, n])))
    assert (found.method, found.index.tolist()) == ("epig", greedy)
    assert_close(found.scores.tolist(), [information([n]) for n in range(M)])
    assert_close(float(found.gain.sum()), information(greedy))
    # The controls: the information about the parameters is highest for the input unlike all others,
    # and single scores count shared information twice.
    of_parameters = acquire(fitted, x, 2, "mutual_information").index.tolist()
    assert 0 in of_parameters and 0 not in greedy
    assert information(of_parameters) < 0.9 * information(greedy)
    single = acquire(fitted, x, 2, joint=False)
    assert_close(single.scores, found.scores)
    assert float(single.gain.sum()) > information(single.index.tolist()) + 1e-3
    # Of a large pool, some inputs are the targets.
    monkeypatch.setattr(acquisition, "MOST_TARGETS", 4)
    targets = torch.randperm(M, generator=torch.Generator().manual_seed(0))[:4]
    some = acquire(fitted, x, 1, batch_size=7).scores.tolist()
    assert_close(some, [information([n], targets) for n in range(M)])
    # Where the joint distribution of the outputs is not supported.
    assert acquire(fitted, x.split(4), 3).method == "mutual_information"
    assert acquire(fitted, x, 3, layers="last").method == "mutual_information"
    for source, inputs in ((posterior("classification", 3)[0], x), (fitted, x.split(4))):
        with pytest.raises(NotImplementedError, match="Pass method='mutual_information'"):
            acquire(source, inputs, 1, "epig")


@pytest.mark.parametrize("outputs", [1, 2])
def test_choice_in_clusters_is_that_of_loops_over_dense_variances(outputs, monkeypatch):
    fitted, *_ = posterior("regression", outputs, sigma_noise=0.3)
    x = normal(M, 2) + 1
    x[0], x[9] = torch.tensor([-3.0, 3.0]), x[8]
    _, J, _ = dense_outputs(fitted, x)
    covariance, labelled = fitted.precision().covariance(), [4, 7, 11]

    def variance(a, b):
        difference = J[a] - J[b]
        return float((difference @ covariance @ difference.T).trace() / 0.09)

    def greedy(number, candidates):
        centers, gains = list(labelled), []
        for _ in range(number):
            clusters = {c: [] for c in centers}
            for n in candidates:
                nearest = min(centers, key=lambda c: variance(n, c))
                clusters[nearest].append((variance(n, nearest), n))
            gain, best = max(max(clusters.values(), key=lambda each: sum(v for v, _ in each)))
            centers.append(best)
            gains.append(gain)
        return centers[len(labelled) :], gains

    candidates = [n for n in range(M) if n not in labelled]
    found, (index, gains) = acquire(fitted, x, 5, labelled=labelled), greedy(5, candidates)
    assert (found.method, found.index.tolist()) == ("lcmd", index)
    assert_close(found.gain.tolist(), gains)
    assert acquire(fitted, x, 1, labelled=labelled).index.tolist() == index[:1]
    own = {n: min(variance(n, c) for c in labelled) for n in candidates}
    assert_close(found.scores[candidates].tolist(), list(own.values()))
    assert found.scores[labelled].isnan().all()
    # The control: the inputs with the largest variances.
    single = acquire(fitted, x, 5, labelled=labelled, joint=False).index.tolist()
    assert single == sorted(candidates, key=lambda n: -own[n])[:5]
    assert 0 in single and set(single) != set(index)
    # Equal inputs are chosen last.
    assert acquire(fitted, x, len(candidates), labelled=labelled).index[-1] in (8, 9)
    # Of a large pool, some inputs are the candidates.
    monkeypatch.setattr(acquisition, "MOST_CLUSTERED", 6)
    some = sorted(acquire(fitted, x, 6, labelled=labelled).index.tolist())
    assert some != candidates[:6]
    assert acquire(fitted, x, 3, labelled=labelled).index.tolist() == greedy(3, some)[0]
    with pytest.raises(ValueError, match="'lcmd' compares .* labelled is empty"):
        acquire(fitted, x, 3, "lcmd")


def test_deviations_given_a_label_have_the_expected_covariance():
    """E_y Cov(f | y) by loops over labels, with weights p_s(y) of the samples."""
    S, K = 9, 3
    f = normal(S, 4, 2)
    p = (3 * f[:, :K, 0]).softmax(-1)
    p[:, 2] *= 1e-30  # a label that never occurs
    p = p / p.sum(1, keepdim=True)
    deviations = (f - f.mean(0)).flatten(1)
    expected = torch.zeros(8, 8).double()
    for y in range(K):
        weights = p[:, y] / p[:, y].sum()
        d = f.flatten(1) - weights @ f.flatten(1)
        expected += p[:, y].mean() * (d.T * weights) @ d
    found = given_label(f - f.mean(0), p)
    assert found.shape == f.shape
    assert_close(found.flatten(1).T @ found.flatten(1) / S, expected)
    # The controls: without the label, and with one that says nothing.
    before = deviations.T @ deviations / S
    assert (before - expected).trace() > 0.1 * before.trace()
    assert_close(given_label(f - f.mean(0), p.mean(0).expand(S, K)), f - f.mean(0))


def test_joint_choice_of_labels_is_greedy_by_conditional_information():
    """Each choice by loops; the square root of I − U Uᵀ by its eigenvalues."""
    S, T, C = 12, 6, 3
    f = 2 * normal(S, T, C)
    f[:, 4] = f[:, 0]
    chosen, gains = choose_by_outputs(f, 4, lambda f: f.softmax(-1))
    deviations, greedy = f - f.mean(0), []
    for step in range(4):
        p = (f.mean(0) + deviations).softmax(-1)
        information = [
            entropy(p[:, n].mean(0).tolist()) - sum(entropy(row.tolist()) for row in p[:, n]) / S
            for n in range(T)
        ]
        best = max((n for n in range(T) if n not in greedy), key=lambda n: information[n])
        greedy.append(best)
        assert gains[step].item() == pytest.approx(information[best])
        mean = p[:, best].mean(0)
        U = (p[:, best] - mean) / (S * mean).sqrt()
        values, vectors = torch.linalg.eigh(torch.eye(S).double() - U @ U.T)
        root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        deviations = torch.einsum("st,tnc->snc", root, deviations)
    assert chosen == greedy and len({0, 4} & set(chosen[:2])) < 2


def exact_information(p, chosen):
    """I(y_B; θ) of S equally probable θ, by the probabilities of all labels."""
    each = torch.ones(len(p), 1).double()
    for n in chosen:
        each = (each[:, :, None] * p[:, None, n]).flatten(1)  # (S, K^|B|)
    return float(torch.special.entr(each.mean(0)).sum() - torch.special.entr(each).sum(1).mean())


def test_joint_choice_is_near_the_best_by_exact_information():
    """Among all sets of three, by sums over all labels of many correlated samples."""
    root = normal(7, 6)
    f = 1.5 * torch.einsum("nk,skc->snc", root, normal(400, 6, 3))
    p = f.softmax(-1)
    best = max(range(7), key=lambda n: exact_information(p, [n]))
    f[:, best - 1] = f[:, best] + 0.01
    p = f.softmax(-1)
    chosen, gains = choose_by_outputs(f, 3, lambda f: f.softmax(-1))
    every = {set_: exact_information(p, set_) for set_ in combinations(range(7), 3)}
    found = every[tuple(sorted(chosen))]
    assert found > 0.97 * max(every.values())
    assert float(sum(gains)) == pytest.approx(found, rel=0.1)
    # The control: own scores, whose sum is an upper bound, choose twins.
    own = sorted(range(7), key=lambda n: -exact_information(p, [n]))[:3]
    assert every[tuple(sorted(own))] < found
    assert sum(exact_information(p, [n]) for n in chosen) > 1.05 * found


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_choices_are_joint_by_default_where_this_is_supported(likelihood):
    fitted, *_ = posterior(likelihood, 2, 0.1)
    x = pool()
    x[M - 1] = x[acquire(fitted, x, 1).index.item()] + 1e-3
    choose = partial(acquire, fitted, method="mutual_information")
    joint, single = (choose(x, 4, joint=joint) for joint in (True, False))
    assert joint.index.tolist() != single.index.tolist()

    def assert_same(found, expected):
        assert found.index.tolist() == expected.index.tolist()
        assert_close(found.gain, expected.gain)

    assert_same(choose(x, 4), joint)
    assert_same(choose(x.numpy(), 4), joint)
    # One input, a loader, the last layer alone, and a score without a joint form.
    assert_same(choose(x, 1), choose(x, 1, joint=False))
    assert_same(choose(x.split(7), 4), single)
    last = choose(x, 4, layers="last")
    assert_same(last, choose(x, 4, layers="last", joint=False))
    assert_close(last.gain, last.scores[last.index])
    if likelihood == "classification":
        of_entropy = acquire(fitted, x, 4, "entropy")
        assert_close(of_entropy.gain, of_entropy.scores[of_entropy.index])


@pytest.mark.parametrize("joint", [False, True])
def test_labelled_inputs_are_not_chosen(joint):
    fitted, *_ = posterior("classification", 3)
    x = pool()
    before = acquire(fitted, x, 5, joint=joint)
    mask = torch.zeros(M, dtype=torch.bool).index_fill(0, before.index, True)
    for labelled in (before.index, mask, before.index.tolist(), mask.numpy()):
        after = acquire(fitted, x, M - 5, labelled=labelled, joint=joint)
        assert sorted([*after.index.tolist(), *before.index.tolist()]) == list(range(M))
        assert after.scores[mask].isnan().all()
        assert_close(after.scores[~mask], before.scores[~mask])
    with pytest.raises(ValueError, match=f"number={M - 4} is too .* {M - 5} unlabelled"):
        acquire(fitted, x, M - 4, labelled=mask, joint=joint)
    for wrong in ([M], [-1], mask[1:]):
        with pytest.raises(ValueError, match="Pass a mask"):
            acquire(fitted, x, 1, labelled=wrong)


def test_pools_and_sources():
    """In any form of a pool the same; an ensemble's score is the members' disagreement."""
    fitted, *_ = posterior("classification", 3)
    x = pool()
    expected = acquire(fitted, x, 4, joint=False)
    for form in (x.numpy(), x.split(7), [(part, None) for part in x.split(7)]):
        found = acquire(fitted, form, 4, joint=False)
        assert_close(found.scores, expected.scores)
        assert found.index.tolist() == expected.index.tolist()
    chosen = acquire(fitted, x, 10, "random").index
    assert len(chosen.unique()) == 10 and chosen.tolist() != expected.index[:10].tolist()
    twin = posterior("classification", 3)[0].model
    ensemble = Ensemble([fitted.model, twin], "classification")
    equal = acquire(ensemble, x, 3)
    assert not equal.scores.any() and equal.index.tolist() == [0, 1, 2]  # the first of equal ones
    with torch.no_grad():
        twin[2].weight.mul_(-1)
    assert acquire(ensemble, x, 1).scores.max() > 0.01
    with pytest.raises(NotImplementedError, match="this Ensemble and pool.*needs a posterior"):
        acquire(ensemble, x, 2, joint=True)
    with pytest.raises(ValueError, match="'margin' is for class probabilities"):
        acquire(posterior("bernoulli", 1)[0], x, 1, "margin")
    for source, inputs in ((posterior("bernoulli", 1)[0], x), (fitted, x.split(7))):
        with pytest.raises(NotImplementedError, match="Pass method='mutual_information' and joint"):
            acquire(source, inputs, 2, joint=True)
    fitted.fit([(normal(4, 5, 2), torch.zeros(4, 5).long())])
    with pytest.raises(NotImplementedError, match="outputs \\(N, C\\)"):
        acquire(fitted, normal(4, 5, 2), 1)


def test_calibration_is_left_out():
    """A calibration may find s = 0, whose predictive has no epistemic uncertainty."""
    fitted, x, y = posterior("classification", 3)
    expected = acquire(fitted, pool(), 4, samples=100).scores
    predict = calibrate(fitted, [(x, y)])
    found = acquire(predict, pool(), 4)
    assert_close(found.scores, expected, rtol=0.3, atol=0.01)  # other samples
    assert predict.calibration.covariance_scale != 1
    with pytest.raises(ValueError, match="This predictive is calibrated"):
        acquire(laplace_predictive(fitted), pool(), 4)
