"""Without the other library an adapter says what to install."""

import importlib
import sys

import pytest

PACKAGES = {
    "botorch": "botorch",
    "posteriors": "posteriors",
    "torch_uncertainty": "torch-uncertainty",
}


@pytest.mark.parametrize("module", PACKAGES)
def test_a_missing_package_is_named(module, monkeypatch):
    adapter = f"marglik.adapters.{module}"
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    for name in [name for name in sys.modules if name.startswith((f"{module}.", adapter))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=f"{adapter} needs .*: pip install {PACKAGES[module]}"):
        importlib.import_module(adapter)
