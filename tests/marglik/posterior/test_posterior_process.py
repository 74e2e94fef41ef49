"""A process that knows nothing but a posterior's folder predicts the same, to the bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from marglik import KronLaplace
from marglik.models import MLP, WideResNetFixup
from marglik.posterior.posterior_file import save_posterior
from tests.marglik.posterior.predict_elsewhere import as_tensors
from tests.marglik.posteriors import predictions

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_new_process_predicts_the_same(worlds, tmp_path):
    torch.manual_seed(0)
    images = torch.randn(6, 3, 8, 8)
    networks = {
        "classification": (MLP, {"in_features": 192, "hidden": (7,), "num_classes": 3}),
        "regression": (MLP, {"in_features": 192, "hidden": (5,), "num_classes": 1}),
        "wide_resnet": (WideResNetFixup, {"depth": 10, "widen_factor": 1, "num_classes": 3}),
    }
    expected = {}
    for name, (kind, arguments) in networks.items():
        model = kind(**arguments)
        with torch.no_grad():
            for p in model.parameters():  # Fixup starts with zeros
                p.add_(0.1 * torch.randn_like(p))
        likelihood = "regression" if name == "regression" else "classification"
        targets = torch.randn(6, 1) if name == "regression" else torch.arange(6) % 3
        laplace = KronLaplace(model, likelihood, prior_precision=torch.rand(1) + 0.5)
        laplace.fit([(images, targets)])
        spec = {"class_path": f"marglik.models.{kind.__name__}", "init_args": arguments}
        save_posterior(laplace, tmp_path / name, model=spec)
        save_file({"x": images}, tmp_path / name / "x.safetensors")
        expected[name] = as_tensors(predictions(laplace, images))

    folders = [str(tmp_path / name) for name in networks]
    predict = "tests.marglik.posterior.predict_elsewhere:save_predictions"
    ((unpickled, after_control),) = worlds.all(1, predict, *folders)
    assert unpickled == 0 < after_control
    for name in networks:
        found = load_file(tmp_path / name / "predictions.safetensors")
        assert found.keys() == expected[name].keys()
        for key, value in found.items():
            assert torch.equal(value, expected[name][key]), (name, key)
