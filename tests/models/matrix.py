"""Which families of models are accepted, in which way, and why others are refused.

``python -m tests.models.matrix --json FILE`` prints the table and writes it (``make models``).
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfac_backend import kronecker_factors
from kfac_backend.engine.model_calls import DtypesInUse
from kfac_backend.layers.gram import LARGEST_DENSE
from tests.models.brute_force import Reference, reference
from tests.models.families import FAMILIES, Case

__all__ = ["Outcome", "casts", "check", "outcome", "table"]

MODES = ("expand", "reduce")
TOLERANCE = 1e-8
"""Relative error of a block that counts as equal."""
IN_FLOAT32 = 2e-4
"""The same for models that compute norms in float32, whatever their dtype is."""

Outcome = dict[str, Any]


def outcome(name: str) -> Outcome:
    """What becomes of one family: for each mode "exact", "diagonal", "refused: why", or an error.

    "exact" means that each block is what `brute_force.reference` says: by K-FAC's definition for
    weights, the GGN's own block for all else (its diagonal from 1,025 entries on). "diagonal" means
    that some parameters have the exact diagonal of their block, which was asked for.
    """
    torch.manual_seed(0)
    found: Outcome = {"family": name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = FAMILIES[name]()
        for mode in MODES:
            found[mode] = check(case, mode)
            if found[mode].startswith(("refused", "raw")):
                found[f"{mode}, diagonal"] = check(case, mode, unsupported="diagonal")
    return found


def check(case: Case, mode: str, **options: Any) -> str:
    """How the blocks compare with brute force, in a word."""
    data = [({**case.x, "labels": case.y} if isinstance(case.x, dict) else (case.x, case.y))]
    try:
        factors = kronecker_factors(
            case.model,
            data,
            "classification",
            kfac_approx=mode,
            dict_key_mask=None,
            shift_labels=False,
            **options,
        )
    except NotImplementedError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001
        return f"raw {type(error).__name__}: {error}"
    expected = reference(case.model, case.x, "classification", mode)
    tolerance = IN_FLOAT32 if casts(case) else TOLERANCE
    names = [n for n, p in case.model.named_parameters() if p.requires_grad]
    if list(factors.blocks) != names:
        return f"WRONG: blocks of {list(factors.blocks)}"
    kinds = {name: _kind(name, factors.blocks[name], expected, tolerance) for name in names}
    wrong = [f"{name} ({kind})" for name, kind in kinds.items() if kind.startswith("WRONG")]
    if wrong:
        return f"WRONG: {', '.join(wrong)}"
    sizes = {name: p.numel() for name, p in case.model.named_parameters()}
    diagonal = [
        name
        for name, kind in kinds.items()
        if kind == "diagonal" and (name in expected.products or sizes[name] <= LARGEST_DENSE)
    ]
    return f"diagonal: {', '.join(diagonal)}" if diagonal else "exact"


def casts(case: Case) -> bool:
    """Whether the model computes with coarser numbers than its own."""
    with torch.no_grad(), DtypesInUse() as used:
        case.model(**case.x) if isinstance(case.x, dict) else case.model(case.x)
    return used.tolerance > TOLERANCE


def _kind(name: str, block: Any, expected: Reference, tolerance: float) -> str:
    """Whether a block is the expected product, or exact, or the exact diagonal."""
    gradients = expected.gradients[name]
    v = torch.randn(gradients.shape[1], 2, generator=torch.Generator().manual_seed(0)).double()
    found = torch.stack([block.matvec(column) for column in v.T], 1).double()
    exact = gradients.T @ (gradients @ v)
    if name in expected.products and _error(found, _times(expected.products[name], v)) < tolerance:
        return "product"
    error = _error(found, exact)
    if error < tolerance:
        return "exact"
    if _error(found, gradients.square().sum(0)[:, None] * v) < tolerance:
        return "diagonal"
    return f"WRONG by {error:.1g}"


def _times(products: Iterable[tuple[Tensor, Tensor]], v: Tensor) -> Tensor:
    """The block-diagonal matrix of Kronecker products times vectors (P, k)."""
    out, start = [], 0
    for first, second in products:
        size = len(first) * len(second)
        V = v[start : start + size].T.reshape(-1, len(first), len(second))
        out.append((first @ V @ second.T).flatten(1).T)
        start += size
    return torch.cat(out)


def _error(found: Tensor, expected: Tensor) -> float:
    scale = expected.norm().clamp(min=1e-12)
    return float((found - expected).norm() / scale) if found.shape == expected.shape else torch.inf


def table(families: list[Outcome]) -> str:
    """The families with exact blocks in both modes as Markdown, a row for each library.

    Args:
        families: of each family, what `outcome` returned.
    """
    rows: dict[str, list[str]] = {}
    for row in families:
        library, _, name = row["family"].partition(" ")
        if all(row[mode] == "exact" for mode in MODES):
            rows.setdefault(library if name else "none", []).append(name or library)
    lines = ["| library | families |", "|---|---|"]
    lines += [f"| {library} | {', '.join(names)} |" for library, names in rows.items()]
    return "\n".join(lines)


def main() -> None:
    """Print the table, and fail if a family has an error without a name or a wrong block."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--json", type=Path, help="where the table goes")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows: list[Outcome] = []
    for name in FAMILIES:
        if arguments.only not in name:
            continue
        rows.append(outcome(name))
        for key, value in rows[-1].items():
            if key != "family":
                print(f"{name:45} {key:18} {value}", flush=True)
    refused = sum(row["expand"].startswith("refused") for row in rows)
    print(f"{len(rows)} families, {refused} refused")
    if arguments.json:
        packages = ("torch", "torchvision", "transformers", "timm", "peft", "torch-geometric")
        versions = {name: version(name) for name in packages}
        table = {"versions": versions, "families": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")
    sys.exit(any(v.startswith(("WRONG", "raw")) for row in rows for v in row.values()))


if __name__ == "__main__":
    main()
