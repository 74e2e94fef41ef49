"""Popular models of other libraries: each block against brute force, in both modes."""

import importlib.util

import pytest

from tests.models.families import DEFAULT, FAMILIES, REFUSED
from tests.models.matrix import MODES, check, outcome

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
@pytest.mark.parametrize("name", FAMILIES)
def test_exact_or_refused_by_name(name):
    needs(name)
    found = outcome(name)
    for mode in MODES:
        if name in REFUSED:
            assert found[mode].startswith("refused: "), found[mode]
            assert REFUSED[name] in found[mode]
            assert found[f"{mode}, diagonal"].startswith("diagonal: ")
        else:
            assert found[mode] == "exact"


def test_few_are_refused():
    assert len(REFUSED) < 0.05 * len(FAMILIES)
    assert REFUSED.keys() < FAMILIES.keys() and set(DEFAULT) < FAMILIES.keys()
