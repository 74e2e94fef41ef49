"""Objects made of options."""

import json

import pytest
import torch
from torch import nn

from kfac_backend.likelihoods import likelihood_of
from marglik.application.runs.build import check_model, sizes_of
from marglik.application.runs.config import CurvatureConfig
from marglik.data import DataSource, Splits
from marglik.specification import build_from_spec


@pytest.mark.parametrize(
    "spec",
    [
        {"class_path": "marglik.models.NoSuchNet"},
        {"class_path": "no_such_package.Net"},
        {"class_path": "marglik.data.Digits"},  # no network
        {"class_path": "fractions.Fraction"},
        {"class_path": "marglik.application.cli.main", "init_args": {"arguments": ["train"]}},
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
    # What the user has typed was not saved; and a sentence ends with one full stop.
    typed = {"class_path": "marglik.data.Digits", "init_args": {"test_fraction": 1}}
    with pytest.raises(ValueError, match=r"built from its arguments: .* both excluded\.$"):
        build_from_spec(DataSource, typed, named=None)


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
    with pytest.raises(ValueError, match=f"pass it on the command line: --model {evil}"):
        build_from_spec(nn.Module, {"class_path": evil})
    net = build_from_spec(nn.Module, {"class_path": evil, "init_args": {"width": 3}}, named=[evil])
    assert net.in_features == 3 and (tmp_path / "ran").exists()  # the control


def spec_of(class_path, /, **arguments):
    return {"class_path": class_path, "init_args": arguments}


FORGED = {
    "a root anywhere": spec_of("marglik.data.CIFAR10", root="/OUTSIDE/new", download=False),
    "the usual root": spec_of("marglik.data.SVHN", download=False),
    "a download": spec_of("marglik.data.CIFAR10", root="/FOLDER/data", download=1),
    "a download unasked": spec_of("marglik.data.CIFAR10", root="/FOLDER/data"),
    "inside another": spec_of(
        "marglik.data.ClassSubset", data=spec_of("marglik.data.CIFAR10", root="/OUTSIDE/new"),
        classes=["cat"],
    ),
    "a file": spec_of("marglik.data.TensorFile", path="/OUTSIDE/x.npz"),
    "a file by dots": spec_of("marglik.data.TableFile", path="/FOLDER/../outside/x.csv"),
    "a file through a link": spec_of("marglik.data.TensorFile", path="/FOLDER/link/x.npz"),
    "a folder": spec_of("marglik.data.ImageFolder", path="/OUTSIDE"),
    "weights": spec_of("torchvision.models.resnet18", weights="DEFAULT"),
    "weights by their old name": spec_of("torchvision.models.resnet18", pretrained=True),
    "weights of a backbone": spec_of(
        "torchvision.models.get_model", name="fasterrcnn_resnet50_fpn", num_classes=2
    ),
    "weights unasked": spec_of("torchvision.models.detection.fasterrcnn_resnet50_fpn"),
    "a data set of torchvision": spec_of(
        "torchvision.datasets.MNIST", root="/OUTSIDE/new", download=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_file_asks_for_nothing_outside_of_its_folder_and_for_no_download(
    case, tmp_path, monkeypatch
):
    def fetch(*arguments, **options):
        (tmp_path / "fetched").touch()
        raise OSError("no network here")

    monkeypatch.setattr("torch.hub.download_url_to_file", fetch)
    monkeypatch.setattr("urllib.request.urlopen", fetch)
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "link").symlink_to(outside)
    text = json.dumps(FORGED[case])
    spec = json.loads(text.replace("/OUTSIDE", str(outside)).replace("/FOLDER", str(folder)))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="a file may not request.*pass the class|a file may"):
        found = build_from_spec((nn.Module, DataSource), spec, folder=folder)
        found.load()  # when sources read and fetch
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_file_may_ask_for(tmp_path):
    """And what the user may."""
    inside = spec_of("marglik.data.TensorFile", path=str(tmp_path / "x.npz"))
    assert build_from_spec(DataSource, inside, folder=tmp_path).path == tmp_path / "x.npz"
    with pytest.raises(ValueError, match=r"--data marglik.data.TensorFile --data.path \S+x.npz"):
        build_from_spec(DataSource, inside, folder=tmp_path / "other")
    assert build_from_spec(DataSource, inside, named=None).path == tmp_path / "x.npz"
    small = spec_of("torchvision.models.shufflenet_v2_x0_5", num_classes=3, weights=None)
    assert build_from_spec(nn.Module, small).fc.out_features == 3
    # By its name alone, a class does what it does by default, but nothing that a file adds.
    cifar = spec_of("marglik.data.CIFAR10", root="data", download=True, max_test=10)
    named = ["marglik.data.CIFAR10"]
    assert build_from_spec(DataSource, cifar, named=named).max_test == 10
    cifar["init_args"]["root"] = "somewhere"
    with pytest.raises(ValueError, match="root='somewhere' is outside"):
        build_from_spec(DataSource, cifar, named=named)
    own = "tests.marglik.application.runs.test_build.OwnNetwork"
    assert build_from_spec(nn.Module, spec_of(own, name="wide"), named=[own]).name == "wide"
    for name in ("/etc/passwd", "~/secret", "someone/weights"):
        with pytest.raises(ValueError, match="is outside of the saved folder"):
            build_from_spec(nn.Module, spec_of(own, name=name), named=[own])


class OwnNetwork(nn.Linear):
    def __init__(self, name="small/er"):
        super().__init__(2, 2)
        self.name = name


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
    with pytest.raises(ValueError, match=r"shape \(2,\), but .* omit squeeze"):
        check_model(Squeezed(3, 1), splits, CurvatureConfig(), "regression")


LABELS, NUMBERS = torch.tensor([0, 2, 1]), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("likelihood", "y", "outputs"),
    [
        ("classification", LABELS, 3),
        ("ordinal(cuts=[0.0, 1.0])", LABELS, 1),
        ("regression", NUMBERS, 2),
        ("heteroscedastic", NUMBERS, 4),
        ("weibull", NUMBERS, 1),
        ("bernoulli", NUMBERS.long(), 2),
        ("poisson", NUMBERS, 2),
    ],
)
def test_the_outputs_that_data_and_likelihood_need(likelihood, y, outputs):
    """A network of that size passes the likelihood's own check; one more output does not."""
    part = torch.ones(3, 5), y
    sizes = sizes_of(Splits(part, None, part, "data"), likelihood)
    assert sizes == {"in_features": 5, "num_classes": outputs}
    of = likelihood_of(likelihood)
    of.check(torch.zeros(3, outputs), y)
    if likelihood != "classification":
        with pytest.raises(ValueError, match="."):
            of.check(torch.zeros(3, outputs + 1), y)
