"""Curves against plain loops over thresholds, and their areas against the metrics'."""

import numpy as np
import pytest
import torch

from marglik.prediction.curves import POINTS, errors_by_class, risk_coverage_curve, roc_curve
from marglik.prediction.metrics import classification_metrics, out_of_distribution_metrics


def classified(num, classes=4, seed=0):
    random = np.random.default_rng(seed)
    f = random.normal(size=(num, classes))
    labels = (f + random.normal(size=f.shape)).argmax(1)
    return torch.softmax(torch.from_numpy(2 * f), dim=1), torch.from_numpy(labels)


def test_risk_by_loops():
    p, y = classified(60)
    found = risk_coverage_curve(p, y)
    order = np.argsort(-p.amax(1).numpy())
    wrong = (p.argmax(1) != y).numpy()[order]
    assert found["coverage"] == pytest.approx([k / 60 for k in range(1, 61)], abs=1e-6)
    expected = [wrong[:k].mean() for k in range(1, 61)]
    assert found["risk"] == pytest.approx(expected, abs=1e-6)
    aurc = classification_metrics(p, y)["cls/AURC"]
    assert np.mean(found["risk"]) == pytest.approx(aurc, abs=1e-6)
    backwards = [wrong[::-1][:k].mean() for k in range(1, 61)]
    assert found["risk"] != pytest.approx(backwards, abs=0.05)  # the control
    assert found["risk"][-1] == pytest.approx(wrong.mean(), abs=1e-6)


def test_long_curves_are_thinned():
    p, y = classified(5000)
    found = risk_coverage_curve(p, y)
    assert len(found["risk"]) == len(found["coverage"]) == POINTS
    assert found["coverage"][0] == pytest.approx(1 / 5000) and found["coverage"][-1] == 1
    aurc = classification_metrics(p, y)["cls/AURC"]
    assert np.trapezoid(found["risk"], found["coverage"]) == pytest.approx(aurc, abs=0.005)
    random = np.random.default_rng(1)
    sides = [torch.from_numpy(random.normal(mean, 1, 4000)) for mean in (0, 1)]
    curve = roc_curve(*sides)
    assert len(curve["fpr"]) == POINTS
    area = out_of_distribution_metrics(*sides)["ood/AUROC"]
    assert np.trapezoid(curve["tpr"], curve["fpr"]) == pytest.approx(area, abs=0.003)


def test_roc_by_thresholds():
    inside, outside = torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.4, 0.6, 0.9])
    curve = roc_curve(inside, outside)
    points = set(zip(curve["fpr"], curve["tpr"], strict=True))
    expected = {
        (round(float((inside >= t).double().mean()), 6),
         round(float((outside >= t).double().mean()), 6))
        for t in (2.0, 0.9, 0.8, 0.6, 0.4, 0.1)
    }  # fmt: skip
    assert points <= expected and {(0, 0), (1, 1)} <= points
    area = out_of_distribution_metrics(inside, outside)["ood/AUROC"]
    assert np.trapezoid(curve["tpr"], curve["fpr"]) == pytest.approx(area, abs=1e-5)


def test_errors_by_loops():
    p, y = classified(80)
    found = errors_by_class(p, y)
    matrix = np.zeros((4, 4), int)
    for label, row in zip(y.tolist(), p, strict=True):
        matrix[label, int(row.argmax())] += 1
    assert found["confusion"] == matrix.tolist() and (matrix != matrix.T).any()
    assert found["counts"] == matrix.sum(1).tolist()
    assert found["right"] == matrix.diagonal().tolist()


def test_many_classes_have_no_matrix():
    p, y = classified(50, classes=21)
    found = errors_by_class(p, y)
    assert set(found) == {"counts", "right"} and len(found["counts"]) == 21
