"""Popular models of other libraries: each block against brute force, in both modes."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from marglik import Posterior, influence
from marglik.eval_mode import eval_mode
from tests.models.brute_force import reference
from tests.models.families import DEFAULT, FAMILIES
from tests.models.matrix import MODES, casts, check, table

ROOT = Path(__file__).parents[2]

PACKAGES = {"torch-geometric": "torch_geometric", "U-Net": "torch"}


def needs(name):
    """Skip where the family's package is missing."""
    package = name.split()[0]
    package = PACKAGES.get(package, package)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make models")


@pytest.mark.parametrize("name", DEFAULT)
def test_exact_without_a_declaration(name):
    needs(name)
    case = FAMILIES[name]()
    for mode in MODES:
        assert check(case, mode) == "exact"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in DEFAULT])
def test_each_family_is_exact_without_a_declaration(name):
    test_exact_without_a_declaration(name)


INFLUENCE = ["transformers T5", "torchvision ConvNeXt", "peft LoRA"]
"""Those of the default suite: tied embeddings, scaled convolutions, adapters on a frozen base."""


@pytest.mark.parametrize("name", INFLUENCE)
def test_influence_by_dense_blocks(name):
    """Exact blocks from autograd alone, whatever the rules are; and the control without them."""
    needs(name)
    torch.manual_seed(0)
    case, delta = FAMILIES[name](), 0.3
    data = [({**case.x, "labels": case.y} if isinstance(case.x, dict) else (case.x, case.y))]
    options = {"dict_key_mask": None, "shift_labels": False, "kfac_approx": "expand"}
    posterior = Posterior(case.model, "classification", prior_precision=delta, **options)
    posterior.fit(data)
    rows = reference(case.model, case.x, "classification", "expand").gradients
    with eval_mode(case.model):
        f = case.model(**case.x) if isinstance(case.x, dict) else case.model(case.x)
    f = getattr(f, "logits", f)
    parameters = dict(case.model.named_parameters())
    losses = torch.nn.functional.cross_entropy(
        f.flatten(0, -2), case.y.flatten(), reduction="none"
    ).view(len(case.y), -1).sum(1)  # fmt: skip
    expected, dot = torch.zeros(2, len(losses), len(losses), dtype=torch.float64)
    for name, R in rows.items():
        of_each = [
            torch.autograd.grad(
                loss, parameters[name], retain_graph=True, materialize_grads=True
            )[0].flatten()
            for loss in losses
        ]  # fmt: skip
        g, R = torch.stack(of_each).double(), R.double()
        # (δ I + Rᵀ R)⁻¹ g, by the small system of the rows.
        inner = torch.linalg.solve(delta * torch.eye(len(R)).double() + R @ R.T, R @ g.T)
        expected += g @ (g.T - R.T @ inner) / delta
        dot += g @ g.T / delta
    found = influence(posterior, data, data, blocks="tensor")
    assert (found - expected).norm() < (2e-4 if casts(case) else 1e-6) * expected.norm()
    assert (dot - expected).norm() > 0.1 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in INFLUENCE])
def test_influence_of_each_family(name):
    test_influence_by_dense_blocks(name)


def test_routers_have_the_product_of_kfacs_definition():
    """Of Mixtral's. It is .8 to 1.1 of its norm from the GGN's own block."""
    needs("transformers Mixtral")
    case = FAMILIES["transformers Mixtral"]()
    for name, p in case.model.named_parameters():
        p.requires_grad_("experts" not in name)
    for mode in MODES:
        assert check(case, mode) == "exact"
        expected = reference(case.model, case.x, "classification", mode)
        for name in (n for n in expected.products if n.endswith("gate.weight")):
            exact = expected.gradients[name].T @ expected.gradients[name]
            product = torch.kron(*expected.products[name][0])
            assert 0.8 < (product - exact).norm() / exact.norm() < 1.1


def test_the_table_is_that_of_the_results():
    folder = ROOT / "experiments/results/models"
    families = json.loads((folder / "models.json").read_text())["families"]
    assert [row["family"] for row in families] == list(FAMILIES)
    assert all(row[mode] == "exact" for row in families for mode in MODES)
    readme = (ROOT / "kfac_backend/README.md").read_text()
    assert table(families) in readme
    of_all = f"all {len(FAMILIES)} model families that we tested"
    assert of_all in " ".join((ROOT / "README.md").read_text().split())
