"""The predictive in torch-uncertainty's own test routine, against marglik's own metrics."""

import importlib
import logging

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from marglik import Posterior, calibrate, compute_metrics, map_predictive, predict_all

pytestmark = [
    pytest.mark.slow,  # to import it takes a quarter of a minute
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def adapter():
    pytest.importorskip("torch_uncertainty")
    return importlib.import_module("marglik.adapters.torch_uncertainty").CalibratedLaplace


def parts():
    """Loaders of 40 training, 60 held-out and 60 test examples; labels are noisy."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 4, generator=generator)
    y = (x[:, :3] + torch.randn(160, 3, generator=generator)).argmax(1)
    splits = [slice(40), slice(40, 100), slice(100, 160)]
    return [DataLoader(TensorDataset(x[s], y[s]), 32) for s in splits]


def trained():
    """An overconfident network and its posterior."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    train, held_out, test = parts()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(150):
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    posterior = Posterior(model, "classification")
    posterior.fit(train)
    return posterior, held_out, test


def data_module(held_out, test):
    from torch_uncertainty.datamodules.abstract import TUDataModule

    class Data(TUDataModule):
        training_task = "classification"
        mean = std = None

        def __init__(self):
            super().__init__(
                root=".", batch_size=32, eval_batch_size=32, val_split=None, num_workers=0,
                pin_memory=False, persistent_workers=False,
            )  # fmt: skip

        def prepare_data(self):
            pass

        def setup(self, stage=None):
            pass

        def postprocess_dataloader(self):
            return held_out

        def test_dataloader(self):
            return [test]

    return Data()


def test_their_routine_reports_our_metrics(adapter, tmp_path):
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.routines import ClassificationRoutine

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    posterior, held_out, test = trained()
    routine = ClassificationRoutine(
        model=posterior.model, num_classes=3, loss=None,
        post_processing=adapter(posterior),
    )  # fmt: skip
    trainer = TUTrainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    (found,) = trainer.test(routine, datamodule=data_module(held_out, test), verbose=False)
    predict = calibrate(posterior, held_out)
    own = compute_metrics(*predict_all(predict, test), "classification")
    of_map = compute_metrics(*predict_all(map_predictive(posterior.model), test), "classification")
    theirs = [value for name, value in found.items() if "post" in name.lower() and "NLL" in name]
    assert_close(theirs, [own["cls/NLL"]], rtol=1e-5, atol=1e-6)
    # Control: it is another number than the network's own, and a better one.
    assert own["cls/NLL"] < of_map["cls/NLL"] - 0.1


def test_softmax_of_what_it_returns_are_the_probabilities(adapter):
    posterior, held_out, _ = trained()
    laplace = adapter(posterior)
    x = torch.randn(5, 4)
    with pytest.raises(RuntimeError, match="call fit"):
        laplace(x)
    laplace.fit(held_out)
    assert laplace.trained
    assert_close(laplace(x).softmax(1), calibrate(posterior, held_out)(x).mean)


def test_what_it_cannot_work_with_is_named(adapter):
    posterior, *_ = trained()
    with pytest.raises(ValueError, match="another Linear than the posterior's"):
        adapter(posterior).set_model(nn.Linear(4, 3))
    with pytest.raises(AttributeError, match="not fitted"):
        adapter(Posterior(nn.Linear(4, 3), "classification"))
    with pytest.raises(ValueError, match="likelihood is 'regression'"):
        adapter(Posterior(nn.Linear(4, 3), "regression"))
