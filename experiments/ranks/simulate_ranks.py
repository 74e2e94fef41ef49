"""A simulation of an update of the weight decays on many GPUs: seconds and bytes.

The formulas are those of ``docs/scaling.md``: flops of a curvature pass, bytes of its reduction,
the busiest rank's share of the decompositions, memory per rank. They are checked against measured
ranks (`ranks_timing`): the speeds of one rank and of the reduction predict the times of two ranks.
The speeds of GPUs are assumed, not measured; see `GPU`. ``make simulate-ranks`` prints the tables
in a second.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.options import SHIPPED
from kfac_backend.distributed import share_out

__all__ = ["GPU", "Layer", "Machine", "Update", "bytes_of_factors", "simulate"]

FLOAT32, FLOAT64 = 4, 8
EIGENVALUES = 4 / 3
"""Flops of the eigenvalues of a d×d matrix, over d³: the reduction to tridiagonal form."""
EIGENVECTORS = 9.0
"""The same with eigenvectors, approximately (Golub & Van Loan 2013, section 8.3)."""


@dataclass(frozen=True)
class Layer:
    """A linear layer, or a convolution as one: weight (d_out, d_in) at R positions an example."""

    d_in: int
    d_out: int
    positions: int = 1
    input_is_diagonal: bool = False
    """True for embeddings: of their input factor only the counts of tokens are kept."""

    @property
    def sizes(self) -> list[int]:
        """Widths of the factors that are decomposed."""
        return [self.d_out] if self.input_is_diagonal else [self.d_out, self.d_in]

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return self.d_in * self.d_out


@dataclass(frozen=True)
class Machine:
    """Speed and memory of one rank, and its link to the others."""

    flops: float
    """Float32 operations per second of matrix products."""
    solver_flops: float
    """Float64 operations per second of an eigensolver."""
    bandwidth: float
    """Bytes per second from one rank to the next."""
    latency: float
    """Seconds per message."""
    memory: float
    """Memory in bytes."""


GPU = Machine(flops=4e13, solver_flops=5e11, bandwidth=5e10, latency=2e-5, memory=80e9)
"""Assumed: an H100 with TF32 off at two thirds of its peak, 400 Gbit/s; not measured."""


@dataclass(frozen=True)
class Update:
    """Seconds of each phase of an update, and bytes per rank."""

    pass_seconds: float
    reduce_seconds: float
    decompose_seconds: float
    gather_seconds: float
    reduced_bytes: float
    memory_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds of all phases, one after the other."""
        return (
            self.pass_seconds + self.reduce_seconds + self.decompose_seconds + self.gather_seconds
        )


def bytes_of_factors(layers: Sequence[Layer]) -> float:
    """4 Σ (d_in² + d_out²), the bytes that one reduction sends and each rank keeps."""
    return FLOAT32 * sum(size**2 for layer in layers for size in layer.sizes)


def flops_of_pass(layers: Sequence[Layer], examples: float, vectors: int, reduce: bool) -> float:
    """Flops of the forward pass, V backward passes to the inputs, and the Gram matrices."""
    total = 0.0
    for layer in layers:
        R = layer.positions
        total += 2 * R * layer.numel * (1 + vectors) * (not layer.input_is_diagonal)
        rows = 1 if reduce else R
        grams = [vectors * layer.d_out**2] + [layer.d_in**2] * (not layer.input_is_diagonal)
        total += 2 * rows * sum(grams) / 2  # symmetric: one half
    return total * examples


def seconds_to_reduce(size: float, ranks: int, machine: Machine) -> float:
    """Seconds of a ring: each rank sends 2 (W − 1)/W of the bytes, in 2 (W − 1) messages."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * size / machine.bandwidth + 2 * (ranks - 1) * machine.latency


def simulate(
    layers: Sequence[Layer],
    ranks: int,
    machine: Machine,
    *,
    examples: float,
    vectors: int = 1,
    reduce: bool = False,
    activation_bytes: float = 0.0,
) -> Update:
    """One update of the decays: pass, reduction, eigenvalues shared out as in the code, gather.

    Args:
        layers: of the model.
        ranks: number of ranks; each sees an equal part of the examples.
        machine: speed and memory of each rank.
        examples: total number in the curvature pass.
        vectors: V, backward passes; 1 for fisher="mc".
        reduce: True for the reduce mode.
        activation_bytes: memory of a training step beside parameters.
    """
    size = bytes_of_factors(layers)
    costs = [float(d) ** 3 for layer in layers for d in layer.sizes]
    loads = [0.0] * ranks
    for cost, owner in zip(costs, share_out(costs, ranks), strict=True):
        loads[owner] += cost
    values = FLOAT64 * sum(d for layer in layers for d in layer.sizes)
    parameters = sum(layer.numel for layer in layers)
    return Update(
        flops_of_pass(layers, examples / ranks, vectors, reduce) / machine.flops,
        seconds_to_reduce(size, ranks, machine),
        EIGENVALUES * max(loads) / machine.solver_flops,
        0.0 if ranks == 1 else ranks * machine.latency + values / machine.bandwidth,
        size,
        size + 4 * FLOAT32 * parameters + activation_bytes,  # weights, gradients, Adam's moments
    )


def transformer(
    dim: int, depth: int, hidden: int, vocabulary: int, positions: int, gated: bool = False
) -> list[Layer]:
    """Layers of a decoder: attention's four maps, an MLP, embedding and head."""
    block = [Layer(dim, dim, positions)] * 4
    block += [Layer(dim, hidden, positions)] * (2 if gated else 1) + [Layer(hidden, dim, positions)]
    ends = [Layer(vocabulary, dim, positions, True), Layer(dim, vocabulary, positions)]
    return block * depth + ends


MODELS = {
    "1e8 (GPT-2: 12 × 768)": transformer(768, 12, 3072, 50_257, 1024),
    "1e10 (Llama-13B: 40 × 5,120)": transformer(5120, 40, 13_824, 32_000, 2048, gated=True),
}
EXAMPLES = 8192.0
"""Number of sequences in the curvature pass."""


def without_head(layers: Sequence[Layer]) -> list[Layer]:
    """The layers without those of the vocabulary, whose factors become too large first."""
    largest = max(layer.d_out for layer in layers)
    return [la for la in layers if la.d_out != largest and not la.input_is_diagonal]


def plan(ranks: Sequence[int] = (1, 8, 64, 1000), machine: Machine = GPU) -> str:
    """The tables of ``docs/scaling.md`` as Markdown."""
    lines = []
    for name, layers in MODELS.items():
        for what, some in (
            ("all layers", layers),
            ("embedding and head frozen", without_head(layers)),
        ):
            lines += ["", f"{name}, {what}; {EXAMPLES:,.0f} sequences, mc, expand", ""]
            lines += [
                "| ranks | pass (s) | reduce (s) | eigenvalues (s) | gather (s) | GB reduced "
                "| GB per rank |",
                "|---|---|---|---|---|---|---|",
            ]
            for number in ranks:
                u = simulate(some, number, machine, examples=EXAMPLES)
                full = " (too large)" if u.memory_bytes > machine.memory else ""
                lines.append(
                    f"| {number:,} | {u.pass_seconds:.3g} | {u.reduce_seconds:.3g} "
                    f"| {u.decompose_seconds:.3g} | {u.gather_seconds:.3g} "
                    f"| {u.reduced_bytes / 1e9:.3g} | {u.memory_bytes / 1e9:.3g}{full} |"
                )
    return "\n".join(lines).strip()


def check(measured: dict) -> str:
    """Two ranks, predicted from one and measured, as Markdown."""
    seconds = measured["median_seconds"]
    size = measured["bytes_reduced"]
    two = {
        "pass": seconds["pass, one rank"] / 2 + seconds["reduction alone"],
        "eigenvalues": seconds["eigenvalues, one rank"] * measured["busiest_share"],
    }
    lines = ["| two ranks | predicted (s) | measured (s) |", "|---|---|---|"]
    for name, predicted in two.items():
        lines.append(f"| {name} | {predicted:.3f} | {seconds[f'{name}, two ranks']:.3f} |")
    return "\n".join([*lines, "", f"{size / 2**20:.1f} MiB were reduced."])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and the check if there is a measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--measured", type=Path, default=SHIPPED / "ranks_timing.json",
        help="file that `ranks_timing` wrote; default: the one that comes with the project",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    print(plan())
    if options.measured.is_file():
        print("\n" + check(json.loads(options.measured.read_text())))


if __name__ == "__main__":
    main()
