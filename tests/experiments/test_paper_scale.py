"""The trainings at the paper's size, on a few made-up molecules and images."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score
from torch import nn
from torch.testing import assert_close

from experiments.data import algoperf
from experiments.models.algoperf import ImageTransformer, MoleculeNetwork
from experiments.optimizers import paper_scale
from experiments.optimizers.paper_scale import WORKLOADS, Config, NAdamW, candidate_of, run
from experiments.optimizers.training import Candidate, Method
from kfac_backend import kronecker_factors
from kfac_backend.optimizer import KfacPreconditioner
from tests.random_numbers import error

PROPERTIES = 4


def dataset(number=24):
    """An object with what molpcba's of ogb has: graphs, labels with NaN, and the split."""
    random = np.random.default_rng(0)
    graphs = []
    for n in range(number):
        nodes = 2 + n % 3
        bonds = np.array([[i, i + 1] for i in range(nodes - 1)]).T
        graphs.append(
            {
                "num_nodes": nodes,
                "node_feat": random.integers(0, 5, (nodes, 9)),
                "edge_index": np.concatenate([bonds, bonds[::-1]], 1),
                "edge_feat": random.integers(0, 3, (2 * nodes - 2, 3)),
            }
        )
    labels = random.integers(0, 2, (number, PROPERTIES)).astype(float)
    labels[random.random(labels.shape) < 0.3] = np.nan
    parts = np.split(np.arange(number), [16, 20])
    split = dict(zip(("train", "valid", "test"), parts, strict=True))
    return SimpleNamespace(graphs=graphs, labels=labels, get_idx_split=lambda: split)


def small_molecules(**options):
    torch.manual_seed(0)
    return MoleculeNetwork(num_classes=PROPERTIES, dim=8, depth=2, **options)


@pytest.fixture
def molecules(monkeypatch):
    """Molpcba's workload in small."""
    small = replace(
        WORKLOADS["molpcba"], load=lambda folder: algoperf.molecules_of(dataset()),
        make_model=small_molecules, batch_size=8, measure_every=2, target=2.0,
    )  # fmt: skip
    monkeypatch.setitem(WORKLOADS, "molpcba", small)
    return small


def write_images(folder: Path) -> Path:
    """A folder train/CLASS/IMAGE and val/CLASS/IMAGE of JPEGs."""
    random = np.random.default_rng(0)
    for part, number in (("train", 6), ("val", 3)):
        for name, level in (("a", 40), ("b", 200)):
            (folder / part / name).mkdir(parents=True)
            for i in range(number):
                pixels = random.integers(level - 40, level + 40, (20 + i, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.jpeg")
    return folder


@pytest.fixture
def images(monkeypatch, tmp_path):
    """ImageNet's workloads in small, and their folder."""
    for name in ("imagenet", "imagenet_every_step"):
        small = replace(
            WORKLOADS[name], load=lambda folder: algoperf.ImageData(folder, 8), batch_size=4,
            make_model=lambda: ImageTransformer(2, 8, 4, 8, 2, 2), measure_every=2, target=2.0,
        )  # fmt: skip
        monkeypatch.setitem(WORKLOADS, name, small)
    return write_images(tmp_path / "images")


def test_molecules_are_those_of_the_dataset():
    source = dataset()
    data = algoperf.molecules_of(source)
    assert data.sizes == (16, 4)
    x, y = data.batch(torch.tensor([5, 2]), seed=0)
    graph = source.graphs[2]
    assert_close(x.graphs[1].nodes, torch.from_numpy(graph["node_feat"]).float())
    ends = torch.stack([x.graphs[1].senders, x.graphs[1].receivers])
    assert_close(ends, torch.from_numpy(graph["edge_index"]))
    labels = torch.from_numpy(source.labels[2]).float()
    assert torch.equal(x.known[1], ~labels.isnan())
    assert torch.equal(y[1], labels.nan_to_num())


def test_unknown_properties_have_no_curvature():
    """Blocks are those of the network without the outputs that are never known."""
    data = algoperf.molecules_of(dataset())
    x, y = data.batch(torch.arange(8), 0)
    x.known[:] = torch.tensor([True, True, False, True])
    model, fewer = small_molecules(dropout=0.0), small_molecules(dropout=0.0)
    keep = [0, 1, 3]
    fewer.head.weight = nn.Parameter(model.head.weight[keep].detach())
    fewer.head.bias = nn.Parameter(model.head.bias[keep].detach())
    one = kronecker_factors(model.double(), [(x.to(torch.float64), y)], "bernoulli")
    x = replace(x, known=x.known[:, keep]).to(torch.float64)
    other = kronecker_factors(fewer.double(), [(x, y[:, keep])], "bernoulli")
    for name in one.blocks:
        if not name.startswith("head"):
            assert_close(one.to_dense(name), other.to_dense(name))
    unknown = one.blocks["head.weight"].B[2]
    assert not unknown.any() and one.blocks["head.weight"].B.any()


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_a_step_has_the_curvature_of_the_mean_over_known_properties(kfac_approx, molecules):
    model = small_molecules(dropout=0.0).double()
    x, y = algoperf.molecules_of(dataset()).batch(torch.arange(8), 0)
    x, y = x.to(torch.float64), y.double()
    factors = kronecker_factors(model, [(x, y)], "bernoulli", kfac_approx=kfac_approx)
    total, terms = paper_scale.property_loss(model(x), y, x)
    gradients = torch.autograd.grad(total / terms, list(model.parameters()))
    preconditioner = KfacPreconditioner(
        model, "bernoulli", fisher="exact", damping_on="product", kl_clip=None, ema_decay=0.0,
        kfac_approx=kfac_approx,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    method, candidate = Method("", "nesterov", kfac_approx), Candidate(0.1, 0.02)
    paper_scale._step(molecules, model, optimizer, preconditioner, method, candidate, 1.0, x, y, 1)
    for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
        F = factors.to_dense(name) / terms
        damped = F + 0.02 * torch.eye(len(F)).double()
        assert_close(p.grad.flatten(), torch.linalg.solve(damped, g.flatten()))
        assert error(p.grad, g) > 0.1


class Killed(Exception):
    pass


@pytest.mark.parametrize("method", ["nesterov", "expand", "reduce"])
def test_a_training_resumes_from_its_checkpoint(method, molecules, tmp_path, monkeypatch):
    config = Config("molpcba", method, Candidate(0.05, 0.1), 1, steps=12)
    whole = run(config, tmp_path / "whole", "")
    measure, calls = paper_scale.measure, []

    def killed(*arguments):
        if len(calls) == 2:
            raise Killed
        calls.append(1)
        return measure(*arguments)

    monkeypatch.setattr(paper_scale, "measure", killed)
    with pytest.raises(Killed):
        run(config, tmp_path / "killed", "", checkpoint_every=3)
    monkeypatch.setattr(paper_scale, "measure", measure)
    resumed = run(config, tmp_path / "killed", "", checkpoint_every=3)
    assert [(c["step"], c["metric"]) for c in resumed["curve"]] == [
        (c["step"], c["metric"]) for c in whole["curve"]
    ]
    states = [
        torch.load(tmp_path / kind / f"{config.name}.pt", weights_only=True)["model"]
        for kind in ("whole", "killed")
    ]
    for name, p in states[0].items():
        assert torch.equal(p, states[1][name]), name
    with pytest.raises(ValueError, match="other folder|settings"):
        run(replace(config, candidate=Candidate(0.1, 0.1)), tmp_path / "killed", "")
    # At the target a training ends.
    monkeypatch.setitem(WORKLOADS, "molpcba", replace(molecules, target=0.0))
    short = run(config, tmp_path / "target", "")
    assert short["reached_at"]["step"] == 2 and not whole["reached_at"]


@pytest.mark.parametrize(
    ("workload", "method"),
    [("imagenet", "nadamw"), ("imagenet", "reduce"), ("imagenet_every_step", "expand")],
)
def test_images_of_a_folder(workload, method, images, tmp_path):
    found = candidate_of(
        SimpleNamespace(workload=workload, method=method, trial=None, lr=None, damping=None),
        WORKLOADS[workload],
    )
    config = Config(workload, method, found, 2, steps=8, workers=2)
    result = run(config, tmp_path, str(images))
    steps = 8 if method == "nadamw" else 6
    assert [c["step"] for c in result["curve"]] == list(range(2, steps + 1, 2))
    assert all(0 <= c["metric"] <= 1 for c in result["curve"])
    assert json.loads((tmp_path / f"{config.name}.json").read_text())["ranks"] == 1
    data = WORKLOADS[workload].load(str(images))
    assert data.sizes == (12, 6)
    (x, y), (again, _), (other, _) = (data.batch(torch.arange(4), s) for s in (1, 1, 2))
    assert x.shape == (4, 3, 8, 8) and torch.equal(x, again) and not torch.equal(x, other)
    assert_close(y.sum(1), torch.ones(4))
    x, y = data.validation(torch.tensor([0, 5]))
    assert y.argmax(1).tolist() == [0, 1]


RANKS = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.experiments import test_paper_scale as small
from experiments.optimizers.paper_scale import WORKLOADS, Candidate, Config, run
WORKLOADS["molpcba"] = replace(
    WORKLOADS["molpcba"], load=lambda folder: small.algoperf.molecules_of(small.dataset()),
    make_model=lambda: small.small_molecules(dropout=0.0), batch_size=8, measure_every=2,
    target=2.0,
)
for method in ("nesterov", "reduce"):
    run(Config("molpcba", method, Candidate(0.05, 0.1), 1, steps=8), Path(sys.argv[1]), "")
"""


@pytest.mark.slow
def test_ranks_train_as_one_process(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    for folder, command in (("one", ()), ("two", launcher)):
        subprocess.run(
            [sys.executable, *command, str(script), str(tmp_path / folder)],
            env=environment, check=True, capture_output=True, timeout=600,
        )  # fmt: skip
    one, two = (
        torch.load(tmp_path / folder / "molpcba_nesterov_seed1.pt", weights_only=True)["model"]
        for folder in ("one", "two")
    )
    for name, p in one.items():
        assert_close(two[name], p, rtol=1e-3, atol=1e-5)
    assert not torch.equal(one["head.weight"], small_molecules().head.weight)
    result = json.loads((tmp_path / "two/molpcba_reduce_seed1.json").read_text())
    assert result["ranks"] == 2 and result["curve"][-1]["step"] == 6


def test_nadamw_takes_algoperfs_first_step():
    p = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = NAdamW([p], 0.01, (0.9, 0.99), 0.5)
    p.grad = torch.tensor([5.0, -0.1])
    optimizer.step()
    # m̂ = (1 + β₁) g and v̂ = g².
    expected = torch.tensor([3.0, -2.0]) * (1 - 0.01 * 0.5) - 0.01 * 1.9 * torch.tensor([1.0, -1.0])
    assert_close(p.detach(), expected)


def test_average_precision_is_of_known_properties():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(30, 3, generator=generator)
    y = (torch.rand(30, 3, generator=generator) < 0.4).float()
    known = torch.rand(30, 3, generator=generator) < 0.7
    y[:, 2] = 0.0  # no positive example: left out, as ogb does
    found = paper_scale.mean_average_precision(f, y, known)
    expected = [
        average_precision_score(y[known[:, c], c], f[known[:, c], c], pos_label=1) for c in (0, 1)
    ]
    assert found == pytest.approx(sum(expected) / 2)
    everything = paper_scale.mean_average_precision(f, y, torch.ones_like(known))
    assert abs(found - everything) > 1e-3


def test_command(molecules, tmp_path, capsys):
    arguments = ["--steps", "6", "--output", str(tmp_path), "--seed", "3"]
    assert paper_scale.main([*arguments, "--method", "reduce"]) == 0
    control = ["--method", "nesterov short"]
    with pytest.raises(SystemExit):
        paper_scale.main([*arguments, *control])
    assert "Pass --trial, or --lr" in capsys.readouterr().err
    assert paper_scale.main([*arguments, *control, "--trial", "4"]) == 0
    assert paper_scale.main(["--report", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "table.md").read_text()
    assert "never run" in text and "0 of 1" in text
    with pytest.raises(SystemExit):
        paper_scale.main(["--help"])
    assert paper_scale.NEVER_RUN in " ".join(capsys.readouterr().out.split())


def test_ogb_reads_a_dataset_of_this_form(tmp_path, monkeypatch):
    """From files like those of molpcba, from what is kept of them, and from them again."""
    graphproppred = pytest.importorskip("ogb.graphproppred")
    source, folder = dataset(), tmp_path / "ogbg_molpcba"
    write_as_ogb(source, folder)
    meta = {
        "dir_path": str(folder), "version": 1, "download_name": "", "num tasks": PROPERTIES,
        "eval metric": "ap", "task type": "binary classification", "num classes": 2,
        "binary": "False", "url": "", "add_inverse_edge": "True",
        "additional node files": "None", "additional edge files": "None", "split": "scaffold",
    }  # fmt: skip
    real = graphproppred.GraphPropPredDataset
    monkeypatch.setattr(
        graphproppred, "GraphPropPredDataset", lambda name, root: real(name, root, meta)
    )
    for again in range(3):
        if again == 2:
            (folder / "graphs.safetensors").unlink()
        data = algoperf.molpcba(tmp_path)
        assert data.sizes == (16, 4)
        assert_close(data.train[1], algoperf.molecules_of(source).train[1])
        nodes = algoperf.molecules_of(source).train[0].graphs.nodes
        assert_close(data.train[0].graphs.nodes, nodes)


def write_as_ogb(source, folder: Path) -> None:
    for part in ("raw", "split/scaffold", "processed"):
        (folder / part).mkdir(parents=True)
    (folder / "RELEASE_v1.txt").touch()

    def table(name, rows):
        kind = "%d" if np.asarray(rows).dtype.kind == "i" else "%g"
        np.savetxt(folder / f"{name}.csv.gz", rows, kind, ",")

    bonds = [graph["edge_index"][:, : graph["num_nodes"] - 1].T for graph in source.graphs]
    table("raw/num-node-list", [graph["num_nodes"] for graph in source.graphs])
    table("raw/num-edge-list", [len(one) for one in bonds])
    table("raw/edge", np.concatenate(bonds))
    table("raw/node-feat", np.concatenate([graph["node_feat"] for graph in source.graphs]))
    features = [g["edge_feat"][: len(b)] for g, b in zip(source.graphs, bonds, strict=True)]
    table("raw/edge-feat", np.concatenate(features))
    table("raw/graph-label", source.labels)
    for name, indices in source.get_idx_split().items():
        table(f"split/scaffold/{name}", indices)
