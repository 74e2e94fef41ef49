"""Where K-FAC is exact, after figures 1 and 2 of Eschenhagen et al. 2023 (arXiv:2311.00636).

The figures show a deep linear network with weight sharing and a Gaussian likelihood, in the paper's
two settings: a loss term at each position (expand), or one for each example, whose output is the
mean over positions (reduce). Each layer has the exact block of the GGN, its approximations by
K-FAC-expand and -reduce, and their errors. The paper's claim (propositions 1 to 4) is that each
mode is exact in its setting.

The table also has the relative errors ‖B ⊗ A − GGN‖ / ‖GGN‖ (Frobenius) of further networks:
convolutions, self-attention, and GraphNetworks on graphs of different sizes. Exact blocks are Jᵀ J
with the Jacobian from `torch.func.jacrev`, in float64; the approximations are
`kfac_backend.kronecker_factors`.

``python -m experiments.exactness.modes`` takes half a minute and writes ``results/exactness/`` in
the working directory; ``--report`` makes table and figures from the JSON there.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from experiments.exactness.networks import Case, Config, Setting, cases
from experiments.exactness.report import write_report
from experiments.options import add_results
from kfac_backend import KroneckerFactors, kronecker_factors
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json

__all__ = ["Config", "exact_blocks", "main", "run"]

MODES: tuple[Setting, ...] = ("expand", "reduce")


def run(config: Config) -> dict[str, Any]:
    """All errors by network and setting, {layer: {mode: one per seed}}; matrices for figures."""
    start = time.perf_counter()
    errors: list[dict[str, Any]] = []
    matrices: dict[str, Any] = {}
    for case in cases(config):
        layers: dict[str, dict[str, list[float]]] = {}
        for seed in range(config.seeds):
            torch.manual_seed(seed)
            exact, approximations = _blocks(case)
            for name, block in exact.items():
                of_layer = layers.setdefault(_layer(name), {mode: [] for mode in MODES})
                for mode, factors in approximations.items():
                    difference = (factors.to_dense(name) - block).norm() / block.norm()
                    of_layer[mode].append(difference.item())
            if seed == 0 and case.setting not in matrices:  # the first network
                matrices[case.setting] = _matrices(exact, approximations)
        errors.append({"network": case.network, "setting": case.setting, "layers": layers})
    return {
        "config": asdict(config),
        "errors": errors,
        "matrices": matrices,
        "seconds": time.perf_counter() - start,
        **environment(torch.device("cpu")),
    }


def exact_blocks(model: nn.Module, x: Any) -> dict[str, Tensor]:
    """Σ_n J_nᵀ J_n of each parameter (P, P), the block of the GGN for unit noise."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobians = jacrev(lambda values: functional_call(model, values, (x,)))(parameters)
    blocks = {}
    for name, p in parameters.items():
        J = jacobians[name].reshape(-1, p.numel())  # (N·T·C, P)
        blocks[name] = J.mT @ J
    return blocks


def _blocks(case: Case) -> tuple[dict[str, Tensor], dict[str, KroneckerFactors]]:
    """Exact blocks by parameter, and factors by mode."""
    model, batch = case.build()
    exact = exact_blocks(model, batch if isinstance(batch, Mapping) else batch[0])
    return exact, {
        mode: kronecker_factors(model, [batch], "regression", kfac_approx=mode) for mode in MODES
    }


def _matrices(
    exact: dict[str, Tensor], approximations: dict[str, KroneckerFactors]
) -> dict[str, Any]:
    """Matrices for the figures by layer: exact blocks and the factors B and A, as lists."""
    found: dict[str, Any] = {}
    for name, block in exact.items():
        layer: dict[str, Any] = {"exact": block.tolist()}
        for mode, factors in approximations.items():
            of_layer = factors.blocks[name]
            B, A = of_layer.whole_factors("This figure")
            assert A is not None
            layer[mode] = {"B": B.tolist(), "A": A.tolist()}
        found[_layer(name)] = layer
    return found


def _layer(name: str) -> str:
    """A weight's name in the table: "block 2, query" for "block 2.query.weight"."""
    return name.removesuffix(".weight").replace(".", ", ")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute and write the errors, or write the report alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--seeds", type=int, default=Config.seeds, help="number of seeds; default: %(default)s"
    )
    add_results(parser)
    parser.add_argument(
        "--report", action="store_true", help="make table and figures from the JSON alone"
    )
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least one is needed")
    folder = options.results / "exactness"
    path = folder / "exactness.json"
    if not options.report:
        write_json(path, run(replace(Config(), seeds=options.seeds)))
    elif not path.exists():
        parser.error(f"--report: no {path}; run without --report first")
    print(write_report(json.loads(path.read_text(encoding="utf-8")), folder))
    print(f"Written to {folder}/")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are tiny
    main()
