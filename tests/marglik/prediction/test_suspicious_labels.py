"""Probabilities of training, example by example; and whether wrong labels come first."""

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from marglik import OnlineTraining, PriorLearner, suspicious_labels
from marglik.data import Batches

pytestmark = pytest.mark.usefixtures("one_thread")

N, C, EPOCHS = 60, 3, 4
WRONG = torch.arange(N) % 5 == 0


TRUE = torch.arange(N) // 5 % C


def data():
    """Three clusters; a fifth of the labels is wrong."""
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))
    x[:, :C] += 4 * nn.functional.one_hot(TRUE, C)
    return x, (TRUE + WRONG.long()) % C


def training(loader, likelihood="classification", epochs=EPOCHS):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, C))
    return OnlineTraining(
        model,
        torch.optim.SGD(model.parameters(), 0.3, momentum=0.9),
        loader,
        PriorLearner(likelihood, epochs=epochs, weight_decay=1 / N),
        curvature_loader=[data()] if likelihood == "classification" else loader,
    )


def without_some(batch):
    kept = [(x, y) for x, y in batch if x[0] > 0]
    return torch.stack([x for x, _ in kept]), torch.stack([y for _, y in kept])


SET = TensorDataset(*data())
SEEN = {
    "marglik's own": lambda: Batches(*data(), 8, shuffle=True),
    "workers": lambda: DataLoader(SET, 8, shuffle=True, drop_last=True, num_workers=2),
    "drawn with replacement": lambda: DataLoader(
        SET, 8, sampler=WeightedRandomSampler([1.0] * 30 + [0.0] * 30, 40)
    ),
}


@pytest.mark.parametrize("case", SEEN)
def test_means_are_those_of_what_each_step_predicted(case):
    """The example of each output is found by its input."""
    run, x = training(SEEN[case]()), data()[0]
    seen = [[] for _ in range(N)]

    def look(module, inputs, f):
        if module.training and torch.is_grad_enabled():
            for one, p in zip(inputs[0], f.detach().softmax(-1), strict=True):
                seen[int((x == one).all(1).nonzero())].append(p)

    run.model.register_forward_hook(look)
    mean = run.run().training_probabilities.mean()
    nan = torch.full((C,), torch.nan)
    expected = torch.stack([torch.stack(p).mean(0) if p else nan for p in seen])
    assert_close(mean, expected, equal_nan=True)
    assert sum(map(len, seen)) >= EPOCHS * 40
    found = suspicious_labels(data()[1], mean)
    assert len(found.index) == sum(map(bool, seen))  # what was never seen is not judged


def test_wrong_labels_come_first_and_others_probabilities_tell_nothing():
    mean = training(SEEN["marglik's own"](), epochs=20).run().training_probabilities.mean()
    found = suspicious_labels(data()[1], mean)
    assert roc_auc_score(WRONG[found.index], found.score) > 0.95
    assert WRONG[found.index[: found.number]].float().mean() > 0.7
    assert (found.predicted == TRUE[found.index])[WRONG[found.index]].float().mean() > 0.8
    areas = []
    for seed in range(20):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
        of_others = suspicious_labels(data()[1], mean[order])
        areas.append(roc_auc_score(WRONG[of_others.index], of_others.score))
    assert abs(torch.tensor(areas).mean() - 0.5) < 0.06


def test_scores_by_hand():
    p = torch.tensor([[[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]], [[0.2, 0.3, 0.5], [0.0, 0.9, 0.1]]])
    found = suspicious_labels(torch.tensor([1, 1]), p)  # means .4 .3 .3 and .1 .8 .1
    assert found.index.tolist() == [0, 1] and found.predicted.tolist() == [0, 1]
    entropies = [-sum(q * math.log(q) for q in row) for row in ((0.4, 0.3, 0.3), (0.1, 0.8, 0.1))]
    by_hand = [-math.log(q) / h for q, h in zip((0.3, 0.8), entropies, strict=True)]
    assert_close(found.score, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-6, atol=0)
    assert found.number == 1
    sure = suspicious_labels(torch.tensor([0, 1]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert sure.index.tolist() == [1, 0] and sure.score.isfinite().all() and sure.score[1] == 0


@pytest.mark.parametrize(
    ("loader", "likelihood", "word"),
    [
        ([data()], "classification", "examples of this list are unknown"),
        (DataLoader(SET, 8, collate_fn=without_some), "classification", "collate_fn returned"),
        ([(data()[0], data()[0][:, :C])], "regression", "regression"),
    ],
)
def test_where_examples_are_unknown_training_goes_on_and_the_question_is_refused(
    loader, likelihood, word
):
    run = training(loader, likelihood, epochs=1)
    probabilities = run.run().training_probabilities
    with pytest.raises(ValueError, match=word):
        probabilities.mean()


def test_probabilities_of_being_wrong_are_bayes_rule_and_calibrated():
    """Of labels that were drawn by the model itself: of those with .9, nine in ten are wrong."""
    generator, N, C, noise = torch.Generator().manual_seed(0), 40_000, 5, 0.4
    p = torch.softmax(2 * torch.randn(N, C, generator=generator), -1).double()
    true = torch.multinomial(p, 1, generator=generator).squeeze(1)
    drawn = torch.rand(N, generator=generator) < noise
    y = torch.where(drawn, torch.randint(C, (N,), generator=generator), true)
    found = suspicious_labels(y, p, noise)
    wrong = (y != true)[found.index].double()
    for low in torch.arange(0, 1, 0.1):
        some = (found.wrong >= low) & (found.wrong < low + 0.1)
        if some.sum() > 500:
            assert wrong[some].mean().item() == pytest.approx(
                found.wrong[some].mean().item(), abs=0.04
            )
    own = p.gather(1, y[:, None]).squeeze(1)
    by_rule = noise / C * (1 - own) / ((1 - noise) * own + noise / C)
    assert_close(found.wrong, by_rule[found.index], atol=0.01, rtol=0)
    # Predictions that have seen their labels, as those of training, give the same.
    memorised = suspicious_labels(y, (p.log() + 3 * nn.functional.one_hot(y, C)).softmax(1), noise)
    assert_close(memorised.wrong[memorised.index.argsort()], found.wrong[found.index.argsort()])
    # Blurred predictions with the temperature that sharpens them again have the same.
    blurred = suspicious_labels(y, (0.5 * p.log()).softmax(1), noise, output_temperature=0.5)
    assert_close(blurred.wrong[blurred.index.argsort()], found.wrong[found.index.argsort()])
    # Negative control: with another share of wrong labels they are not.
    other = suspicious_labels(y, p, 0.1)
    some = other.wrong > 0.3
    share = (y != true)[other.index][some].double().mean()
    assert share > 0.1 + other.wrong[some].mean()
    assert suspicious_labels(y, p).wrong is None and suspicious_labels(y, p, 0.0).wrong is None


def test_logits_are_no_probabilities():
    logits = torch.randn(6, 3)
    for wrong in (logits, logits.log_softmax(1), logits.sigmoid()):
        with pytest.raises(ValueError, match="do not sum to 1. Pass the softmax"):
            suspicious_labels(torch.zeros(6, dtype=torch.long), wrong)
    suspicious_labels(torch.zeros(6, dtype=torch.long), logits.softmax(1).bfloat16())


@pytest.mark.parametrize("seed", range(8))
def test_of_two_classes_only_what_is_beyond_chance_counts(seed):
    """Labels drawn from p̄ contradict a quarter of the predictions, and none is to be looked at."""
    generator, N = torch.Generator().manual_seed(seed), 720
    own = torch.sigmoid(1.5 * torch.randn(N, generator=generator)).double()
    p = torch.stack([1 - own, own], 1)
    y = torch.bernoulli(own, generator=generator).long()
    clean = suspicious_labels(y, p)
    assert (clean.score > 1).sum() > N / 5 and clean.number <= 12
    # Negative control: of a fifth of changed labels most are counted, where predictions are sure.
    sure = torch.stack([1 - own, own], 1).pow(6)
    sure /= sure.sum(1, keepdim=True)
    true = sure.argmax(1)
    is_wrong = torch.rand(N, generator=generator) < 0.2
    found = suspicious_labels(torch.where(is_wrong, 1 - true, true), sure)
    assert 0.5 < found.number / is_wrong.sum() <= 1
    assert is_wrong[found.index[: found.number]].double().mean() > 0.9
    # Its order is that of the probabilities, which add up to what held-out labels say.
    with_noise = suspicious_labels(torch.where(is_wrong, 1 - true, true), sure, 0.4)
    assert torch.equal(with_noise.index, found.index)
    assert torch.equal(with_noise.wrong, with_noise.wrong.sort(descending=True).values)
    assert with_noise.number == pytest.approx(0.2 * N, abs=25)


def test_arrays_and_lists_are_tensors_too():
    p, y = torch.softmax(torch.randn(6, 3, dtype=torch.float64), 1), torch.arange(6) % 3
    expected = suspicious_labels(y, p, 0.1)
    for labels, probabilities in ((y.numpy(), p.numpy()), (y.tolist(), p.tolist())):
        found = suspicious_labels(labels, probabilities, 0.1)
        assert_close(found.wrong, expected.wrong, rtol=1e-5, atol=0)
        assert torch.equal(found.index, expected.index)


def test_self_influence_is_a_column_in_the_same_order():
    _, y = data()
    p = torch.rand(N, C, generator=torch.Generator().manual_seed(2)).softmax(1)
    p[7] = torch.nan  # never used
    values = torch.arange(N).double()
    labels = suspicious_labels(y, p, self_influence=values)
    assert labels.self_influence is not None and 7 not in labels.index
    assert_close(labels.self_influence, values[labels.index])
    assert not torch.equal(labels.self_influence, labels.self_influence.sort().values)
    assert suspicious_labels(y, p).self_influence is None
    assert_close(labels.score, suspicious_labels(y, p).score)
    with pytest.raises(ValueError, match="Pass one value for each label"):
        suspicious_labels(y, p, self_influence=values[:5])
