"""Popular models of other libraries: each block against brute force, in both modes."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.models.brute_force import reference
from tests.models.families import DEFAULT, FAMILIES
from tests.models.matrix import MODES, check, table

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
