"""Objects made of options."""

import pytest
import torch
from torch import nn

from marglik.data import DataSource, Splits
from marglik.runs.build import build_from_spec, check_model
from marglik.runs.config import CurvatureConfig


@pytest.mark.parametrize(
    "spec",
    [
        {"class_path": "marglik.models.NoSuchNet"},
        {"class_path": "no_such_package.Net"},
        {"class_path": "marglik.data.Digits"},  # no network
        {"class_path": "fractions.Fraction"},
        {"class_path": "marglik.cli.main", "init_args": {"arguments": ["train"]}},
        {"class_path": "marglik.models.torch.hub.load"},
        "marglik.models.LeNet",
        {"class_path": "marglik.models.MLP"},  # in_features is needed
        {"class_path": "marglik.models.MLP", "init_args": {"in_features": 4, "depth": 3}},
        {"class_path": "marglik.models.MLP", "init_args": {"in_features": "many"}},
    ],
)
def test_objects_that_cannot_be_made(spec):
    with pytest.raises(ValueError, match="could not be built from its saved arguments") as error:
        build_from_spec(nn.Module, spec)
    assert isinstance(spec, str) or spec["class_path"] in str(error.value)


EVIL = """
from pathlib import Path
from torch import nn
Path("ran").touch()
class Net(nn.Linear):
    def __init__(self, width=2): super().__init__(width, width)
"""


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """The path of a class in the working directory, beside a marker of whether it was imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"evil_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(EVIL)
    return f"{name}.Net"


def test_a_file_imports_no_class_that_the_user_has_not_named(evil, tmp_path):
    def subset(data):
        inside = {"data": data, "classes": ["1"]}
        return {"class_path": "marglik.data.ClassSubset", "init_args": inside}

    resnet = {"block": evil, "layers": [1, 1, 1, 1]}
    for spec in (
        {"class_path": evil},
        {"class_path": "marglik.models.MLP", "init_args": {"in_features": {"class_path": evil}}},
        {"class_path": "marglik.models.MLP", "init_args": {"hidden": [{"class_path": evil}]}},
        {"class_path": "torchvision.models.ResNet", "init_args": resnet},
        subset({"class_path": evil}),
    ):
        with pytest.raises(ValueError, match="could not be built"):
            build_from_spec((nn.Module, DataSource), spec)
    # A name where an object belongs stays a text.
    assert build_from_spec(DataSource, subset(evil)).data == evil
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match=f"name it on the command line: --model {evil}"):
        build_from_spec(nn.Module, {"class_path": evil})
    net = build_from_spec(nn.Module, {"class_path": evil, "init_args": {"width": 3}}, named=[evil])
    assert net.in_features == 3 and (tmp_path / "ran").exists()  # the control


class Squeezed(nn.Linear):
    def forward(self, x):
        return super().forward(x).squeeze(-1)


def test_a_network_that_fits_is_left_as_it_was_and_another_is_named():
    x = torch.randn(5, 3)
    splits = Splits((x, x[:, :1]), None, (x, x[:, :1]), "waves")
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout()).train()
    before = [p.clone() for p in model.parameters()]
    check_model(model, splits, CurvatureConfig(fisher="mc"), "regression")
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"shape \(2,\); .* leave out squeeze"):
        check_model(Squeezed(3, 1), splits, CurvatureConfig(), "regression")
