"""Shards of the data on several ranks give what one process has of all the data.

The functions at the end are called on each rank, see `tests.worlds`.
"""

import gc
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.data import DataLoader

from kfac_backend import corrected_factors, kronecker_factors
from kfac_backend.blocks.block import compute_eigenvalues, decompose
from kfac_backend.blocks.eigen import eigendecompositions
from kfac_backend.engine.batches import examples
from kfac_backend.factor_derivatives import BlockDerivative, factor_gradients
from kfac_backend.laplace_torch.interface import KfacEF, KfacGGN
from kfac_backend.optimizer import KFAC
from kfac_backend.ranks import Ranks
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.layer_cases import case
from tests.kfac_backend.networks import OwnNorm, data, network
from tests.kfac_backend.test_factor_derivatives import Moved
from tests.random_numbers import normal


@pytest.fixture(scope="module")
def found(worlds):
    """What one process has, and what each of three ranks has."""
    use = "tests.kfac_backend.test_ranks:everything"
    return worlds.all(1, use)[0], worlds.all(3, use)


def test_factors_are_those_of_one_process(found):
    alone, of_ranks = found
    for of_rank in of_ranks:
        assert of_rank.keys() == alone.keys()
        for name, tensor in of_rank.items():
            if not name.startswith("mc, "):
                # Gradients that cancel (reduce, keys of attention) leave squares of rounding.
                atol = 1e-10 * float(alone[name].abs().max()) + 1e-24
                assert_close(tensor, alone[name], rtol=1e-10, atol=atol, msg=name)
    assert len(alone) > 250


def test_all_ranks_have_the_same_to_the_bit(found):
    _, (first, *others) = found
    for of_rank in others:
        for name, tensor in first.items():
            assert torch.equal(of_rank[name], tensor), name


def test_each_rank_draws_labels_of_its_own(found):
    _, (of_rank, *_) = found
    names = [name for name in of_rank if name.startswith("mc, together")]
    assert names
    for name in names:
        one_by_one = of_rank[name.replace("together", "one by one")]
        assert_close(of_rank[name], one_by_one, rtol=1e-10, atol=1e-12)
    other = [of_rank[name.replace("together", "the next pass")] for name in names]
    differ = [not torch.allclose(of_rank[name], o) for name, o in zip(names, other, strict=True)]
    assert any(differ)  # the next pass draws others
    numbers = of_rank["mc, numbers"]
    assert len(torch.unique(numbers)) == numbers.numel() == 4 * 3


@pytest.fixture(scope="module")
def told(worlds):
    of_first, _ = worlds.run(2, "tests.kfac_backend.test_ranks:told_of_each")
    return of_first


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "other options": "Ranks disagree: the options is",
        "another model": "Ranks disagree: the trainable parameters is",
        "other weights": "parameter '8.weight' has norm",
        "one has a value more": "Ranks disagree: b is None on rank 0 and 2 on rank 1",
        "no data": "ValueError: The data is empty",
        "under DDP": "TypeError: The model is wrapped in DistributedDataParallel",
        "in parts": "NotImplementedError: Parameter '8.weight' is sharded by tensor parallelism",
        "control": "no error",
    }.items(),
)
def test_both_ranks_are_told(told, name, words):
    for rank in (0, 1):
        assert words in told[f"{rank}, {name}"]


def test_a_rank_that_is_gone_ends_the_others(told):
    assert told["gone"] != "no error"


def test_memory_and_bytes_are_those_of_the_formulas(worlds):
    """Of four linear layers, d → d; a weight and its bias have one B.

    Each rank has 6 rows of A, and with fisher="empirical", as in K-FAC's step, of B. Those of both
    ranks are few for d = 32; for d = 15 they become matrices when they are sent.
    """
    by_size = {15: 15, 32: 6 + 6}
    for of_sizes in worlds.all(2, "tests.kfac_backend.test_ranks:bytes_and_memory"):
        for d, rows in by_size.items():
            numbers = of_sizes[d]
            # At most all four B, the two A of its own and the one that is sent, beside a few rows.
            assert numbers.pop("peak") < (4 + 2 + (rows == d)) * 8 * d**2
            assert numbers == {
                "reduced": 8 * 4 * (d**2 + rows * d),
                "solved": 4 + 4,  # on both ranks together
                "eigenvalues": 8 * 4 * (d + d) + 8 * (4 + 4),  # and how many were clipped
                "eigenvectors": 8 * 4 * 2 * (d**2 + d),
                "factors of K-FAC": 8 * 4 * (rows * d + rows * d),
                "gradients of K-FAC": 8 * 4 * (d**2 + d),
            }


# --- on each rank ---


LAYERS = (
    "Conv1d", "LayerNorm", "no rule", "attention", "two linear layers", "language model",
    "padded tokens", "Embedding with padding", "graphs", "LSTM, packed", "experts",
)  # fmt: skip
"""One of each kind of block and of rows; that sums of batches add up is tested for all layers."""


def sizes(N: int, world: int) -> list[int]:
    """Examples per rank: unequal, and none on the second of three."""
    return {1: [N], 3: [1, 0, N - 1]}[world]


def shard(x, y: Tensor, ranks: Ranks) -> list:
    """This rank's batches: of at most two examples each."""
    of_ranks = sizes(len(y), ranks.size)
    start = sum(of_ranks[: ranks.rank])
    whole = range(start, start + of_ranks[ranks.rank])
    batches = [slice(i, min(i + 2, whole.stop)) for i in range(whole.start, whole.stop, 2)]
    return [(examples(x, part), y[part]) for part in batches]


def tensors(name: str, factors) -> dict[str, Tensor]:
    """All that factors hold, by names, on whatever rank; collective."""
    factors = factors.gathered(Ranks())
    found = {f"{name}, counts": torch.tensor([
        factors.num_data, factors.num_loss_terms, factors.loss, factors.num_outputs,
    ], dtype=torch.float64)}  # fmt: skip
    for n, block in factors.blocks.items():
        found[f"{name}, {n}, B"] = block.B
        if block.A is not None:
            found[f"{name}, {n}, A"] = block.A
        terms = -1 if block.num_terms is None else block.num_terms
        found[f"{name}, {n}, terms"] = torch.tensor(terms, dtype=torch.float64)
        found[f"{name}, {n}, constants"] = torch.tensor(block.constants, dtype=torch.float64)
    return found


def of_layers(ranks: Ranks) -> dict[str, Tensor]:
    """Kinds of blocks and rows, in one of the modes."""
    found = {}
    for name in LAYERS:
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
        {"expand_scaling": "examples"},
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
    one = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 20), OwnNorm(20)).double()
    batches, options = shard(x, x.flatten(1)[:, :20], ranks), {"fisher": "empirical"}
    few = kronecker_factors(one, batches, "regression", unsupported="diagonal", **options)
    found |= tensors("a diagonal and few rows", few)
    compute_eigenvalues(few.blocks.values(), ranks)
    found |= {f"few rows, {name}": values for name, values in few.eigenvalues().items()}
    for name, factor in few.gathered(ranks).blocks["1.weight"].factors.items():
        assert factor.rows is not None and factor.rows.shape[-2] == 9, name
    batches = shard(x, y, ranks)
    factors = kronecker_factors(model, batches, "classification")
    corrected = corrected_factors(factors, model, batches)
    for name, block in corrected.gathered(ranks).blocks.items():
        found[f"corrected, {name}"] = block.to_dense()
    compute_eigenvalues(factors.blocks.values(), ranks)
    found["log det"] = factors.log_det(0.3)
    for name, values in factors.eigenvalues().items():
        found[f"eigenvalues, {name}"] = values
    moved = Moved(model)
    of_moved = kronecker_factors(moved, batches, "classification").gathered(ranks)
    weights = {name: BlockDerivative(b.B, b.A) for name, b in of_moved.blocks.items()}
    (found["gradient"],) = factor_gradients(of_moved, moved, batches, [moved.eta], weights, 0.5)
    eigen = dict(zip(factors.blocks, decompose(factors.blocks.values(), ranks), strict=True))
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
    parts = [part for part in ranks.gather(alone) if part is not None]
    total = sum(parts[1:], parts[0])
    first = torch.randn(4, generator=ranks.generator(torch.Generator().manual_seed(3)))
    return (
        tensors("together", together[0])
        | tensors("the next pass", together[1])
        | tensors("one by one", total)
        | {"numbers": torch.stack(ranks.gather(first))}
    )


def everything() -> dict[str, Tensor]:
    """All of it."""
    ranks = Ranks()
    loader = DataLoader(list(zip(*data(6), strict=True)), 2)
    alone = kronecker_factors(network(), loader, "classification", process_group=None)
    found = of_layers(ranks) | of_fishers(ranks) | tensors("no group", alone)
    return found | {f"mc, {name}": tensor for name, tensor in of_labels(ranks).items()}


def bytes_and_memory() -> dict[int, dict[str, int]]:
    """By the width d of layers."""
    return {d: _bytes_and_memory(d) for d in (15, 32)}


def _bytes_and_memory(d: int) -> dict[str, int]:
    """Most bytes of new tensors at a reduction, factors solved, and bytes of each kind sent."""
    model, x = nn.Sequential(*[nn.Linear(d, d) for _ in range(4)]).double(), normal(6, d)
    live, solved, sent, ranks = [], [], dict[str, int](), Ranks()
    before = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}

    def bytes_of_tensors() -> int:
        tensors = [t for t in gc.get_objects() if type(t) is Tensor and not t.is_meta]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for address, size in storages.items() if address not in before)

    def solving(factors: Sequence[Any], **keywords: Any) -> Any:
        solved.extend(factors)
        return eigendecompositions(factors, **keywords)

    def counted(kind: str, name: str) -> Any:
        """Count the bytes that are handed to a function of `torch.distributed`."""
        send = getattr(dist, name)

        def counting(tensor: Tensor, **keywords: Any) -> Any:
            if kind == "reduced":
                time.sleep(0.02)  # gloo's threads drop a little later what they have sent
                live.append(bytes_of_tensors())
            sent[kind] = sent.get(kind, 0) + tensor.nbytes
            return send(tensor, **keywords)

        return patch.object(dist, name, counting)

    gc.freeze()  # so that it lists new objects alone
    with counted("reduced", "reduce"):
        factors = kronecker_factors(model, [(x, x)], "regression")
    gc.unfreeze()
    with counted("eigenvalues", "broadcast"), patch(EIGENDECOMPOSITIONS, solving):
        compute_eigenvalues(factors.blocks.values(), ranks)
    with counted("eigenvectors", "broadcast"):
        decompose(factors.blocks.values(), ranks)
    optimizer = KFAC(model, "regression", lr=0.1, fisher="empirical", kl_clip=None)
    nn.functional.mse_loss(model(x), x).backward()
    with counted("factors of K-FAC", "reduce"), counted("gradients of K-FAC", "broadcast"):
        optimizer.step()
    return sent | {"peak": max(live), "solved": sum(ranks.gather(len(solved)))}


EIGENDECOMPOSITIONS = "kfac_backend.blocks.block.eigendecompositions"


def error_of(use) -> str:
    """The error's type and text."""
    try:
        use()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def spread(model: nn.Module) -> nn.Module:
    """A network with one parameter in parts, as tensor parallelism and FSDP2 have them."""
    mesh = init_device_mesh("cpu", (2,))
    model[8].weight = nn.Parameter(distribute_tensor(model[8].weight.detach(), mesh))  # pyright: ignore
    assert isinstance(model[8].weight, DTensor)  # pyright: ignore
    return model


def told_of_each() -> dict[str, str]:
    """What each use says on rank 0; the last ends rank 1."""
    ranks = Ranks()
    first = ranks.rank == 0
    model, (x, y) = network(), data(8)

    def passes(model=model, x=x, **options):
        return kronecker_factors(model, [(x, y)] if len(x) else [], "classification", **options)

    moved = network()
    with torch.no_grad():
        moved[8].weight.mul_(1.0 if first else 1.1)
    other = nn.Sequential(nn.Flatten(), nn.Linear(32, 3 if first else 4)).double()
    uses = {
        "other options": lambda: passes(kfac_approx="expand" if first else "reduce"),
        "another model": lambda: passes(model=other),
        "other weights": lambda: passes(model=moved),
        "no data": lambda: passes(x=x[:0]),
        "one has a value more": lambda: ranks.agree({"a": 1} if first else {"a": 1, "b": 2}),
        "under DDP": lambda: passes(model=DistributedDataParallel(model)),
        "in parts": lambda: passes(model=spread(network())),
        "control": passes,
    }
    found = {name: error_of(use) for name, use in uses.items()}
    of_ranks = ranks.gather(found)
    if not first:
        os._exit(0)  # as if it were killed: the other is left alone
    found = {
        f"{rank}, {name}": text for rank, of in enumerate(of_ranks) for name, text in of.items()
    }
    return found | {"gone": error_of(lambda: ranks.gather(0))}
