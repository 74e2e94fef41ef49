"""The pools of active learning: their labels, their ambiguous inputs, and no overlap."""

import io

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.testing import assert_close

from experiments.predictions import active_learning
from experiments.predictions.active_learning import (
    DROPOUT,
    PROBLEMS,
    Config,
    area,
    dropout_predictive,
    trained,
)
from tests.experiments.data.text_and_graphs import write_uci

DIGITS = ("clean", "blends", "wrong_labels")


def pixels_of(x):
    """Pixels 0 to 16 of standardised digits, of blends in halves."""
    pixels = torch.tensor(load_digits().data, dtype=torch.float32)
    return (2 * (x * pixels.std() + pixels.mean())).round() / 2


def label_of_pixels():
    """Bytes of each image -> its label; no two images are equal."""
    images, labels = load_digits(return_X_y=True)
    pairs = zip(images.astype("float32"), labels, strict=True)
    labels_of = {image.tobytes(): int(y) for image, y in pairs}
    assert len(labels_of) == len(labels)
    return labels_of


def keys(x):
    return [row.numpy().tobytes() for row in pixels_of(x)]


@pytest.mark.parametrize("name", DIGITS)
def test_pools_of_digits_have_their_labels_and_no_test_image(name):
    labels_of, pool = label_of_pixels(), PROBLEMS[name].pool(3)
    test, inside = keys(pool.x_test), keys(pool.x)
    assert len(test) == 797 and len(inside) == 1000
    assert [labels_of[key] for key in test] == pool.y_test.tolist()
    whole = [k for k, key in enumerate(inside) if name != "blends" or k < 500]
    assert len({inside[k] for k in whole} | set(test)) == len(whole) + 797  # all different
    true = torch.tensor([labels_of[inside[k]] for k in whole])
    is_other = pool.y[whole] != true
    if name == "wrong_labels":
        assert torch.equal(is_other, pool.is_ambiguous)
        assert 0.17 < is_other.double().mean() < 0.23
        assert len(set(((pool.y - true) % 10)[is_other].tolist())) == 9  # each other class
    else:
        assert not is_other.any()
        assert pool.is_ambiguous.sum() == (500 if name == "blends" else 0)


def test_blends_are_means_of_two_images_outside_the_test_with_the_label_of_one():
    """By brute force: of a blend b, some image a of the pool's part has another image 2 b − a."""
    pool, clean = PROBLEMS["blends"].pool(3), PROBLEMS["clean"].pool(3)
    assert torch.equal(pool.x[:500], clean.x[:500]) and torch.equal(pool.x_test, clean.x_test)
    a = pixels_of(clean.x[500:])
    index_of = {row.numpy().tobytes(): k for k, row in enumerate(a)}
    firsts = 0
    for n in range(500, 520):
        others = 2 * pixels_of(pool.x[n]) - a
        pairs = [
            {k, index_of[row.numpy().tobytes()]}
            for k, row in enumerate(others)
            if row.numpy().tobytes() in index_of
        ]
        assert pairs and all(pair == pairs[0] for pair in pairs)
        assert n - 500 in pairs[0]
        labels = [int(clean.y[500 + k]) for k in pairs[0]]
        assert pool.y[n] in labels
        firsts += int(pool.y[n] == clean.y[n])
    assert 2 < firsts < 19  # of either image


def small_photos():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2100, 3, 16, 16, generator=generator), torch.arange(2100) % 10


def test_half_of_the_photos_is_blurred_and_none_is_of_the_test(monkeypatch):
    monkeypatch.setattr(active_learning, "small_images", small_photos)
    x, y = small_photos()
    pool = active_learning.blurred_images(3, size=100)
    which = [int((x - image).abs().sum((1, 2, 3)).argmin()) for image in pool.x[:50]]
    of_test = [int((x - image).abs().sum((1, 2, 3)).argmin()) for image in pool.x_test[:50]]
    assert_close(x[which], pool.x[:50])
    assert_close(x[of_test], pool.x_test[:50])
    assert torch.equal(y[which], pool.y[:50]) and torch.equal(y[of_test], pool.y_test[:50])
    assert len(pool.y_test) == 2000 and not set(which) & set(of_test)
    assert pool.is_ambiguous.tolist() == [False] * 50 + [True] * 50
    assert pool.x[50:].std() < 0.2 < 0.9 < pool.x[:50].std()  # noise is blurred to its mean


def test_concrete_is_the_published_split(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).normal(size=(40, 4))
    train, test = np.arange(32), np.arange(32, 40)
    parts = {"data": rows, "index_features": np.arange(3), "index_target": [3]}
    texts = {}
    for name, part in (parts | {"index_train_3": train, "index_test_3": test}).items():
        np.savetxt(text := io.StringIO(), part)
        texts[name] = text.getvalue()
    write_uci(tmp_path / "uci.tar.gz", "concrete", texts)
    monkeypatch.setenv("MARGLIK_DATA", str(tmp_path))
    pool = active_learning.uci("concrete")(3)
    scaled = torch.tensor((rows - rows[train].mean(0)) / rows[train].std(0)).float()
    assert_close(torch.cat([pool.x, pool.x_test]), scaled[:, :3])
    assert_close(torch.cat([pool.y, pool.y_test]), scaled[:, 3:])


def test_area_is_the_mean_of_the_curve():
    curve = [{"labels": n, "accuracy": a} for n, a in ((10, 0.2), (20, 0.4), (40, 0.8))]
    assert area(curve, "accuracy") == pytest.approx((0.3 * 10 + 0.6 * 20) / 30)


def test_dropout_predicts_by_masks_and_leaves_the_network_as_it_was():
    problem, pool = PROBLEMS["clean"], PROBLEMS["clean"].pool(0)
    posterior = trained(problem, pool.x[:20], pool.y[:20], 0, 50, DROPOUT)
    before = posterior.model.eval()(pool.x_test)
    prediction = dropout_predictive(posterior)(pool.x_test)
    assert prediction.epistemic.max() > 1e-3 and not posterior.model.training
    assert_close(posterior.model(pool.x_test), before)
    assert_close(prediction.mean.sum(1), torch.ones(797))


def test_a_run_never_buys_a_label_twice_and_starts_alike_for_all_scores():
    runs = {
        method: active_learning.run(Config("blends", method, 5, rounds=1, epochs=1))
        for method in active_learning.METHODS
    }
    for result in runs.values():
        assert len(set(result["bought"])) == len(result["bought"]) == 40
        assert [point["labels"] for point in result["curve"]] == [20, 40]
        blends = np.mean(np.array(result["bought"]) >= 500)
        assert result["curve"][-1]["ambiguous"] == pytest.approx(blends)
    first = [result["curve"][0]["accuracy"] for result in runs.values()]
    assert len(set(first)) == 1
    assert len({tuple(result["bought"]) for result in runs.values()}) == len(runs)
    assert {m for m, r in runs.items() if "own" in r["curve"][0]} == {"ensemble", "dropout"}
