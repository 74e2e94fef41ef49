"""What `test_ranks` compares between worlds: called on each rank, see `tests.worlds`."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from kfac_backend import corrected_factors, kronecker_factors
from kfac_backend.blocks.block import compute_eigenvalues, decompose_on_ranks
from kfac_backend.factor_derivatives import BlockDerivative, factor_gradients
from kfac_backend.laplace_torch.interface import KfacEF, KfacGGN
from kfac_backend.model.batches import examples
from kfac_backend.ranks import Ranks
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.layer_cases import CASES, case
from tests.kfac_backend.networks import OwnNorm, data, network
from tests.kfac_backend.test_factor_derivatives import Moved

ON_FOUR_RANKS = (
    "Conv1d", "LayerNorm", "attention", "two linear layers", "language model", "padded tokens",
    "graphs",
)  # fmt: skip


def sizes(N: int, world: int) -> list[int]:
    """Examples per rank: unequal, and in a world of four none on the second."""
    return {1: [N], 2: [N - 1, 1], 4: [1, 0, N - 2, 1]}[world]


def shard(x, y: Tensor, ranks: Ranks) -> list:
    """This rank's batches: of at most two examples each."""
    of_ranks = sizes(len(y), ranks.size)
    start = sum(of_ranks[: ranks.rank])
    whole = range(start, start + of_ranks[ranks.rank])
    batches = [slice(i, min(i + 2, whole.stop)) for i in range(whole.start, whole.stop, 2)]
    return [(examples(x, part), y[part]) for part in batches]


def tensors(name: str, factors) -> dict[str, Tensor]:
    """All that factors hold, by names."""
    found = {f"{name}, counts": torch.tensor([
        factors.num_data, factors.num_loss_terms, factors.loss, factors.num_outputs,
    ], dtype=torch.float64)}  # fmt: skip
    for n, block in factors.blocks.items():
        found[f"{name}, {n}, B"] = block.B
        if block.A is not None:
            found[f"{name}, {n}, A"] = block.A
        found[f"{name}, {n}, terms"] = torch.tensor(block.num_terms, dtype=torch.float64)
    return found


def of_layers(ranks: Ranks) -> dict[str, Tensor]:
    """Every kind of layer in one of the modes; with four ranks some, as proofs take their time."""
    found = {}
    for name in CASES if ranks.size < 4 else ON_FOUR_RANKS:
        model, x = case(name)
        N = len(next(iter(x.values()))) if isinstance(x, Mapping) else len(x)
        y = torch.arange(N) % 2
        # Sums of either mode are reduced alike.
        mode = MODES[len(name) % 2]
        factors = kronecker_factors(
            model, shard(x, y, ranks), "classification", unsupported="diagonal", kfac_approx=mode
        )
        found |= tensors(f"{name}, {mode}", factors)
    return found


def of_fishers(ranks: Ranks) -> dict[str, Tensor]:
    """Kinds of Fisher, corrected eigenvalues, the evidence, and laplace-torch's backend."""
    found = {}
    model, (x, y) = network(), data(9)
    for options in (
        {"fisher": "empirical"},
        {"ignore_index": 2},
        {"diagonal_above": 2},
    ):
        factors = kronecker_factors(model, shard(x, y, ranks), "classification", **options)
        found |= tensors(str(options), factors)
    # The choice is clear for any two examples, so that all ranks' first batches agree with one's.
    torch.manual_seed(0)
    flat = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    ).double()
    factors = kronecker_factors(flat, shard(x, y, ranks), "classification", kfac_approx="auto")
    assert factors.options.kfac_approx == {"0": "expand", "*": "reduce"}
    found |= tensors("auto", factors)
    one = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 4), OwnNorm(4)).double()
    found |= tensors(
        "a diagonal",
        kronecker_factors(
            one, shard(x, x.flatten(1)[:, :4], ranks), "regression", unsupported="diagonal"
        ),
    )
    batches = shard(x, y, ranks)
    factors = kronecker_factors(model, batches, "classification")
    corrected = corrected_factors(factors, model, batches)
    for name, block in corrected.blocks.items():
        found[f"corrected, {name}"] = block.to_dense()
    compute_eigenvalues(factors.blocks.values(), ranks)
    found["log det"] = factors.log_det(0.3)
    for name, values in factors.eigenvalues().items():
        found[f"eigenvalues, {name}"] = values
    moved = Moved(model)
    of_moved = kronecker_factors(moved, batches, "classification")
    weights = {name: BlockDerivative(b.B, b.A) for name, b in of_moved.blocks.items()}
    (found["gradient"],) = factor_gradients(of_moved, moved, batches, [moved.eta], weights, 0.5)
    eigen = decompose_on_ranks(factors.blocks.values(), ranks)
    for name, block in factors.blocks.items():
        spectrum = eigen[name].spectrum()
        identity = torch.eye(block.numel, dtype=torch.float64)
        found[f"decomposed, {name}"] = eigen[name].power_matvec(identity, spectrum, 1.0)
    return found | of_backend(ranks)


def of_backend(ranks: Ranks) -> dict[str, Tensor]:
    """Laplace-torch's backends, of a batch that the ranks have parts of."""
    found = {}
    model, (x, y) = network(), data(8)
    parts = torch.arange(8).tensor_split(ranks.size)[ranks.rank]
    for kind in (KfacGGN, KfacEF):
        backend = kind(model, "classification")
        loss, kron = backend.kron(x[parts], y[parts], 16)
        found[f"{kind.__name__}, loss"] = loss
        for i, F in enumerate(kron.kfacs):
            found |= {f"{kind.__name__}, {i}, {j}": factor for j, factor in enumerate(F)}
    return found


def of_labels(ranks: Ranks) -> dict[str, Tensor]:
    """Monte Carlo: what the ranks have together, beside the sum of what each has alone."""
    model, (x, y) = network(), data(9)
    batches = shard(x, y, ranks)
    generator = torch.Generator().manual_seed(3)
    own = ranks.generator(generator)
    together = [
        kronecker_factors(model, batches, "classification", fisher="mc", generator=generator)
        for _ in range(2)
    ]
    alone = None
    if batches:
        alone = kronecker_factors(
            model, batches, "classification", fisher="mc", generator=own, process_group=None
        )
    parts = [part for part in ranks.gather(alone, "a test") if part is not None]
    total = sum(parts[1:], parts[0])
    first = torch.randn(4, generator=ranks.generator(torch.Generator().manual_seed(3)))
    return (
        tensors("together", together[0])
        | tensors("the next pass", together[1])
        | tensors("one by one", total)
        | {"numbers": torch.stack(ranks.gather(first, "a test"))}
    )


def everything() -> dict[str, Tensor]:
    """All of it."""
    ranks = Ranks()
    loader = DataLoader(list(zip(*data(6), strict=True)), 2)
    alone = kronecker_factors(network(), loader, "classification", process_group=None)
    found = of_layers(ranks) | of_fishers(ranks) | tensors("no group", alone)
    return found | {f"mc, {name}": tensor for name, tensor in of_labels(ranks).items()}
