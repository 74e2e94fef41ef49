"""Models under `fully_shard` give what one process gives.

The functions at the end run on each rank. A world of ranks computes all of it at once, as starting
one takes seconds.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from kfac_backend import kronecker_factors
from kfac_backend.blocks.block import decompose
from kfac_backend.engine.batches import examples
from kfac_backend.factor_derivatives import factor_gradients
from kfac_backend.laplace_torch.interface import KfacGGN
from kfac_backend.likelihoods import IGNORED
from kfac_backend.optimizer import KFAC
from kfac_backend.options import TargetOptions
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import gathered_state, local_part, local_parts
from marglik import Posterior, PriorLearner
from marglik.training.average import renew_batch_norm
from tests.kfac_backend.layer_cases import case
from tests.kfac_backend.test_ranks import error_of, tensors
from tests.random_numbers import normal
from tests.worlds import failed

LAYERS = "LSTM, packed", "padded tokens", "graphs", "two linear layers", "own parameters"
"""Cases whose rules read the weights, or whose batches are more than a tensor."""


@pytest.fixture(scope="module")
def alone(worlds) -> dict[str, Any]:
    """What one process has."""
    (results,) = worlds.all(1, "tests.kfac_backend.test_sharding:everything")
    return results


@pytest.fixture(scope="module")
def of_ranks(worlds) -> list[dict[str, Any]]:
    """What each of two ranks has."""
    return worlds.all(2, "tests.kfac_backend.test_sharding:everything")


def assert_equal(sharded: dict[str, Tensor], alone: dict[str, Tensor]) -> None:
    """Equal to 1e-10; label noise to 1e-7, as the search for ε stops where rounding makes it."""
    assert sharded.keys() == alone.keys()
    for name, tensor in alone.items():
        # Gradients that cancel leave squares of rounding.
        rtol = 1e-7 if "noisy" in name else 1e-10
        atol = rtol * float(tensor.abs().max()) + 1e-24
        assert_close(sharded[name], tensor, rtol=rtol, atol=atol, msg=name)


def assert_all_equal(of_ranks: list[dict[str, Tensor]], alone: dict[str, Tensor]) -> None:
    """`assert_equal` of each rank."""
    for of_rank in of_ranks:
        assert_equal(of_rank, alone)


def test_sharded_models_have_the_factors_and_evidence_of_one_process(alone, of_ranks):
    for of_rank in of_ranks:
        assert_equal(of_rank["numbers"], alone["numbers"])
    assert len(alone["numbers"]) > 150


@pytest.mark.parametrize("is_sharded", [True, False])
def test_each_rank_keeps_its_share_of_parameters_and_factors(alone, of_ranks, is_sharded):
    shares = [of_rank["at rest"][is_sharded] for of_rank in of_ranks]
    assert_shares(shares, alone["at rest"][is_sharded], is_sharded)


def assert_shares(shares: list[dict[str, int]], whole: dict[str, int], is_sharded: bool) -> None:
    """Each rank has its share of the bytes, beyond the largest block."""
    for of_rank in shares:
        share = whole["parameters"] / (len(shares) if is_sharded else 1)
        assert share / 1.15 <= of_rank["parameters"] <= 1.15 * share
        assert of_rank["factors"] <= 1.15 * whole["factors"] / len(shares) + whole["largest"]
        assert of_rank["reduced"] == whole["factors"] == FACTORS_OF_GPT
    assert sum(of_rank["factors"] for of_rank in shares) == whole["factors"]


@pytest.mark.parametrize("what", ["likelihoods", "K-FAC"])
def test_training_is_that_of_one_process(alone, of_ranks, what):
    for of_rank in of_ranks:
        assert_equal(of_rank[what], alone[what])
    assert len(alone[what]) >= 2


TRAINING = "tests.kfac_backend.test_sharding:part_of_training"


def assert_trained(of_ranks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """The network and its decays are those after a training by one process."""
    for of_rank in of_ranks:
        assert_equal(of_rank["model"], whole["model"])
        assert_close(of_rank["decays"], whole["decays"], rtol=1e-10, atol=0)


def assert_goes_on(worlds, ranks: int, saved: dict[str, Any], whole: dict[str, Any]) -> None:
    """A training goes on from a state with this number of ranks, as if nothing had ended it."""
    assert saved["learner"]["averages"][0]["count"]
    assert_trained(worlds.all(ranks, TRAINING, range(4, 5), saved), whole)


def test_a_learner_trains_as_in_one_process(alone, of_ranks):
    assert_trained([of_rank["training"] for of_rank in of_ranks], alone["training"])


def test_a_training_goes_on_with_more_ranks(worlds, alone):
    assert_goes_on(worlds, 2, alone["state"], alone["training"])


def test_a_rank_that_is_killed_ends_a_training_which_resumes_with_fewer(worlds, alone, tmp_path):
    left, gone = worlds.run(2, TRAINING, range(5), None, tmp_path / "state.pt", 4, timeout=20)
    assert failed(left) and failed(gone)
    assert_goes_on(worlds, 1, torch.load(tmp_path / "state.pt"), alone["training"])


OF_ANOTHER = "ValueError: The state belongs to rank {} of 2, but this is rank {} of 2"
DIFFER = "RankError: Ranks disagree: the loaded"
REFUSED = {
    ("3.0", "3.1"): None,
    ("whole", "whole"): None,
    ("3.1", "3.0"): (OF_ANOTHER.format(1, 0), OF_ANOTHER.format(0, 1)),
    ("3.0", "3.0"): ("RankError: Rank 1 cannot load its state: ", OF_ANOTHER.format(0, 1)),
    ("3.0", "2.1"): (DIFFER, DIFFER),
    ("whole", "changed"): (DIFFER, DIFFER),
}
"""The files of both ranks' states, ``step.rank`` -> the errors of ranks that share a model."""


@pytest.mark.parametrize(
    ("files", "is_sharded"),
    [*((files, True) for files in REFUSED), (("3.1", "3.0"), False), (("3.0", "2.1"), False)],
)
def test_ranks_load_the_same_state_and_each_its_own_part(worlds, tmp_path, files, is_sharded):
    """Of the learner, and of K-FAC. The control: states that fit go on as if nothing ended it."""
    errors = REFUSED[files]
    if not is_sharded and files == ("3.1", "3.0"):
        errors = None  # both are the same, and whole
    use = "tests.kfac_backend.test_sharding:of_loaded_states"
    for rank, of_rank in enumerate(
        worlds.run(2, use, str(tmp_path), files, is_sharded, timeout=20)
    ):
        assert not failed(of_rank), of_rank
        for name in ("learner", "K-FAC"):
            if errors is None:
                assert_close(of_rank[name], of_rank["expected"], rtol=1e-12, atol=1e-14)
            else:
                assert errors[rank] in of_rank[name]


def test_finish_keeps_weights_that_were_restored(worlds):
    """Of a sharded model, also where they are the part of one rank; as in one process."""
    use = "tests.kfac_backend.test_sharding:of_restored_weights"
    (alone,) = worlds.all(1, use)
    of_ranks = worlds.all(2, use)
    for name in ("restored", "one rank's part"):
        for numbers in (alone, *of_ranks):
            assert numbers[f"{name}, averaged"] == 0 and numbers[f"{name}, keeps"] == 1
    for of_rank in of_ranks:
        shared = {n: t for n, t in of_rank.items() if not n.startswith("one rank")}
        assert_equal(shared, {n: alone[n] for n in shared})
        # The other rank's part has not changed, and the control takes the average.
        assert of_rank["restored, is the last"] == 0 and of_rank["none, averaged"] == 1
    assert [float(r["one rank's part, is the last"]) for r in of_ranks] == [0, 1]


def test_data_left_out_changes_the_evidence(alone):
    # The control: the tolerance above tells when a shard of the data is missing.
    numbers = alone["numbers"]
    (less,) = (tensor for name, tensor in numbers.items() if "half of the data" in name)
    assert abs(less - numbers["gpt, blocks, reduce, evidence"]) > 1


def test_parameters_are_gathered_only_while_modules_run(of_ranks):
    for of_rank in of_ranks:
        assert of_rank["whole parameters after the pass"] == []


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "tensor parallelism": "Parameter '0.weight' is sharded by tensor parallelism",
        "FSDP1": "NotImplementedError: The model uses FSDP1",
        "diagonal": "needs a whole model, but this one is under fully_shard",
        "sample": "NotImplementedError: A sample of parameters needs whole parameters",
        "all layers": "NotImplementedError: The covariance of outputs by more than the last layer",
        "Jacobians": "NotImplementedError: structure 'diag' needs whole parameters",
        "derivatives": "NotImplementedError: The gradient of factors in variables of the inputs",
        "laplace-torch": "NotImplementedError: laplace-torch needs whole parameters",
        "whole model": "ValueError: The state's 'momentum_buffer' is sharded over ranks",
        "one rank saves": "RuntimeError: The values of",
        "one rank alone": "are kept by another rank. Bring all blocks to this one first",
        "no process group": "ValueError: The model is sharded over 2 ranks, but 1",
        **dict.fromkeys(
            ["classes second", "in training"],
            "ValueError: An example has outputs (8, 8, 8), whose classes may be second or last",
        ),
        "in steps of K-FAC": "gradient shows that their classes are second; they must be last",
        "the group has ended": "RuntimeError: The process group of the ranks that share the model",
    }.items(),
)
def test_what_needs_whole_models_is_refused(of_ranks, name, words):
    for of_rank in of_ranks:
        assert words in of_rank["refused"][name]


@pytest.mark.slow
def test_replicated_shards_and_four_ranks(worlds, alone):
    for of_rank in worlds.all(4, "tests.kfac_backend.test_sharding:numbers", ["gpt", "cnn"], True):
        assert_equal(of_rank, {k: v for k, v in alone["numbers"].items() if k in of_rank})
        assert len(of_rank) > 100
    saved, *_ = worlds.all(4, TRAINING, range(4))
    assert_goes_on(worlds, 2, saved, alone["training"])
    here, names = "tests.kfac_backend.test_sharding", list(MODELS)
    uses = {"numbers": [names], "of_kfac": names}
    for use, arguments in (uses | {"of_corrected_eigenvalues": []}).items():
        (whole,) = worlds.all(1, f"{here}:{use}", *arguments)
        for size in (2, 4):
            assert_all_equal(worlds.all(size, f"{here}:in_ddp", use, *arguments), whole)
            assert_all_equal(worlds.all(size, f"{here}:{use}", *arguments), whole)
    for is_sharded in (True, False):
        of_ranks = worlds.all(4, f"{here}:at_rest", is_sharded)
        assert_shares(of_ranks, alone["at rest"][is_sharded], is_sharded)


# --- on each rank ---


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, d: int = 8):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(d), nn.MultiheadAttention(d, 2, batch_first=True)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """A language model with an embedding of positions that no rule has, and a padding token."""

    def __init__(self, V: int = 5, d: int = 8):
        super().__init__()
        self.tokens = nn.Embedding(V, d, padding_idx=0)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 4, d))
        self.blocks = nn.ModuleList([Block(d), Block(d)])
        self.head = nn.Linear(d, V)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Checkpointed(nn.Module):
    """In train mode, backward passes compute the blocks' activations anew."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)[:, :8]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.training else block(h)
        return self.head(h)


class ViT(nn.Module):
    """Patches, a class token and a block."""

    def __init__(self, d: int = 8):
        super().__init__()
        self.patches = nn.Conv2d(3, d, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, d))
        self.blocks = nn.ModuleList([Block(d)])
        self.head = nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).mT
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1)
        for block in self.blocks:
            h = block(h)
        return self.head(h[:, 0])


def cnn() -> nn.Module:
    """A convolution network."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(54, 3),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": GPT, "vit": ViT, "cnn": cnn}
MADE = MODELS | {"checkpointed": Checkpointed}


def made(name: str) -> nn.Module:
    """A model of the table, the same on all ranks."""
    torch.manual_seed(1)
    return MADE[name]().double()


FACTORS_OF_GPT = 8 * (
    # Of a block: norm, attention's three maps and output, up, down. d_in² + d_out² of each map.
    2 * (2 * 8**2 + 3 * (8**2 + 8**2) + (8**2 + 8**2) + 2 * (8**2 + 16**2))
    + (5 + 8**2)  # embedding: counts of tokens
    + (4 * 8) ** 2  # positions: dense
    + (8**2 + 5**2)  # head
)
"""Bytes of all factors, each once: what a rank hands to the reduction of a pass."""

WHOLE: list[str] = []
"""Not empty where each rank has whole models, in DistributedDataParallel."""


def in_ddp(use: str, *arguments: Any) -> Any:
    """What a function here gives with whole models."""
    WHOLE.append(use)
    return globals()[use](*arguments)


def trained(model: nn.Module) -> nn.Module:
    """What training steps run."""
    return DistributedDataParallel(model) if WHOLE and Ranks().size > 1 else model


def shard(model: nn.Module, by_block: bool = True, **options: Any) -> nn.Module:
    """The model under `fully_shard`, unless this process is alone, or ranks have whole models."""
    if Ranks().size > 1 and not WHOLE:
        for block in getattr(model, "blocks", model.children()) if by_block else ():
            if any(p.requires_grad for p in block.parameters()):
                fully_shard(block, **options)
        fully_shard(model, **options)
    return model


def whole_data(name: str, N: int = 7) -> tuple[Any, Tensor]:
    """Data of a model of the table."""
    x = normal(N, 3, 8, 8)
    if name == "gpt":
        tokens = (100 * normal(N, 4)).long() % 5
        return tokens, tokens.roll(1, 1)
    return x, torch.arange(N) % 3


def batches(x: Any, y: Tensor, size: int = 2) -> list:
    """This rank's batches: all but one example on the first rank."""
    ranks = Ranks()
    if ranks.size == 2:
        own = range(len(y) - 1) if ranks.rank == 0 else range(len(y) - 1, len(y))
    else:
        own = range(len(y))[ranks.rank :: ranks.size]
    parts = [torch.tensor(own[i : i + size]) for i in range(0, len(own), size)]
    return [(examples(x, part), y[part]) for part in parts]


def numbers(names: list[str], replicated: bool = False) -> dict[str, Tensor]:
    """Factors, evidence and last-layer predictives of models of the table."""
    results: dict[str, Tensor] = {}
    options: dict[str, Any] = {}
    if replicated:
        names_of_axes = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names_of_axes)
    cases = [
        (name, "whole", "expand", "empirical") if name == "vit" else
        (name, "blocks", "reduce", "exact")
        for name in names
    ]  # fmt: skip
    for name, way, mode, fisher in cases:
        model, (x, y) = shard(made(name), way == "blocks", **options), whole_data(name)
        posterior = Posterior(
            model, "classification", kfac_approx=mode, fisher=fisher, prior_precision=2.0,
            prior_mean=0.1,
        )  # fmt: skip
        posterior.fit(batches(x, y))
        key = f"{name}, {way}, {mode}"
        assert posterior.factors is not None
        results |= tensors(key, posterior.factors)
        results[f"{key}, evidence"] = posterior.log_marginal_likelihood()
        results[f"{key}, effective parameters"] = posterior.effective_parameters()
        if WHOLE:
            posterior.gather()
        last = posterior.output_distribution(x[:2], "last")
        results |= dict(zip((f"{key}, outputs", f"{key}, covariances"), last, strict=True))
    return results


def at_rest(is_sharded: bool) -> dict[str, int]:
    """Bytes of this rank's parameters and factors after a pass, and those handed to a reduction."""
    model, (x, y), reduce, sent = made("gpt"), whole_data("gpt"), dist.reduce, []
    if is_sharded:
        model = shard(model)

    def counting(tensor: Tensor, **keywords: Any) -> Any:
        sent.append(tensor.nbytes)
        return reduce(tensor, **keywords)

    with patch.object(dist, "reduce", counting):
        factors = kronecker_factors(model, batches(x, y), "classification")
    # A weight and its bias share their B.
    blocks = [
        {F.matrix.data_ptr(): F.matrix.nbytes for F in block.factors.values() if not F.is_meta}
        for block in factors.blocks.values()
    ]
    parameters = sum(local_part(p).nbytes for p in model.parameters())
    return {
        "parameters": parameters,
        "factors": sum({address: size for b in blocks for address, size in b.items()}.values()),
        "largest": max(sum(block.values()) for block in blocks),
        "reduced": sum(sent),
    }


def of_whole_models() -> dict[str, Tensor]:
    """Evidence, effective parameters and predictives of a model that each rank has whole."""
    model, (x, y), ranks = made("vit"), whole_data("vit"), Ranks()
    posterior = Posterior(model, "classification", kfac_approx="reduce", prior_precision=2.0)
    posterior.fit(batches(x, y))
    results = {"whole, evidence": posterior.log_marginal_likelihood()}
    results["whole, effective parameters"] = posterior.effective_parameters()
    posterior.gather()
    if ranks.rank == 0:  # one alone
        results["whole, V"] = posterior.output_distribution(x[:2])[1]
    results["whole, V"] = ranks.gather(results.get("whole, V"))[0]
    posterior.fit(batches(x, y), override=False)  # owned factors, to whole ones
    results["whole, evidence of all data twice"] = posterior.log_marginal_likelihood()
    return results


def of_layers() -> dict[str, Tensor]:
    """Factors of single layers."""
    results = {}
    for name in LAYERS:
        model, x = case(name)
        N = len(next(iter(x.values()))) if isinstance(x, dict) else len(x)
        data = batches(x, torch.arange(N) % 2)
        tied = "two linear layers"  # which FSDP wants in one group
        model = shard(model, by_block=name != tied)
        factors = kronecker_factors(model, data, "classification")
        results |= tensors(name, factors)
    return results


class OwnForward(nn.Linear):
    """A layer whose rule the proof tries, by a backward pass in mid-forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class Tokens(nn.Module):
    """A classifier of the mean token, by the number of which a mask shows; it may trim a batch.

    Its last layer runs behind a layer that is sharded by itself. `unused` shares its weight with
    the embedding.
    """

    def __init__(self, trims: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trims = trims
        self.tokens, self.unused = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.unused.weight = self.tokens.weight
        self.hidden, self.head = OwnForward(4, 5), nn.Linear(5, 3)
        self.double()
        if Ranks().size > 1:
            fully_shard(self.hidden)
            fully_shard(self)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        R = int(attention_mask.sum(1).max()) if self.trims else tokens.shape[1]
        counted = attention_mask[:, :R, None].double()
        h = self.hidden(self.tokens(tokens[:, :R])).tanh()
        return self.head((h * counted).sum(1) / counted.sum(1))


def padded(lengths: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens of some lengths, of which a mask tells."""
    N = len(lengths)
    tokens = (100 * normal(N, 5)).long() % 7
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    return {"tokens": tokens, "attention_mask": mask.long()}, torch.arange(N) % 3


def of_masks() -> dict[str, Tensor]:
    """Masks of which the ranks learn at different times, in passes and in steps of K-FAC."""
    # The second rank has the last example alone, of full length, and runs along with the others.
    data = batches(*padded([3, 2, 5, 3, 5, 4, 5]))
    factors = kronecker_factors(Tokens(True), data, "classification", kfac_approx="reduce")
    results, ranks = tensors("masks", factors.gathered(Ranks())), Ranks()
    for name, first in (("one rank", [5, 3]), ("both, then one rank", [4, 3])):
        model = Tokens()
        optimizer = KFAC(
            model, "classification", lr=0.05, kl_clip=None, kfac_approx="reduce", fisher="exact",
            factor_every=1,
        )  # fmt: skip
        for lengths in (first, [5, 2]):
            x, y = padded(lengths * 2)
            part = torch.arange(4)[ranks.rank :: ranks.size]
            optimizer.zero_grad()
            F.cross_entropy(model(**examples(x, part)), y[part]).backward()
            optimizer.step()
        results |= {f"{name}, {n}": p for n, p in gathered_state(parts_of(model)).items()}
    return results


def parts_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, detached."""
    return {name: p.detach() for name, p in model.named_parameters()}


class Causal(nn.Module):
    """A language model that shifts labels inside, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = made("gpt")  # under `fully_shard` by itself

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        f = self.gpt(x)
        if labels is None:
            return {"logits": f}
        loss = F.cross_entropy(f[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": f, "loss": loss}


def of_shifted_labels() -> dict[str, Tensor]:
    """Factors of a model that shifts labels, of which the first examples have none."""
    x, y = whole_data("gpt", 12)
    y[:9] = y[11:] = IGNORED
    results = {}
    for size in (2, 12):
        data = [{"x": x, "labels": y} for x, y in batches(x, y, size)]
        factors = kronecker_factors(
            shard(Causal()), data, "classification", kfac_approx="reduce", ignore_index=IGNORED
        )
        results |= tensors(f"shifted labels, {size}", factors.gathered(Ranks()))
    return results


class Segments(nn.Module):
    """A convolution whose outputs (N, 1, 8, 8, 8) have an axis that shows where the classes are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 8, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).movedim(1, -1).unsqueeze(1)


def of_pixels() -> dict[str, Tensor]:
    """Loss and factors where classes and pixels have equal numbers, and the classes are second."""
    (x, _), model = whole_data("cnn"), shard(Segments())
    y = (8 * torch.sigmoid(x[:, 0])).long()
    data = [(x, y.unsqueeze(1)) for x, y in batches(x, y)]
    factors = kronecker_factors(model, data, "classification")
    expected = F.cross_entropy(model(x).squeeze(1).movedim(-1, 1), y, reduction="sum")
    assert float(factors.loss) == pytest.approx(float(expected), rel=1e-10)
    return tensors("pixels", factors.gathered(Ranks()))


def of_corrected_eigenvalues() -> dict[str, Tensor]:
    """Evidence and predictives with corrected eigenvalues.

    In expand mode, where the gradients do not reach the factors' null spaces. Under reduce they
    reach them, and rounding chooses the basis there, in one process as well.
    """
    results: dict[str, Tensor] = {}
    for name in ("gpt", "cnn"):
        model, (x, y) = shard(made(name)), whole_data(name)
        posterior = Posterior(model, "classification", kfac_approx="expand", prior_precision=2.0)
        posterior.fit(batches(x, y), corrected=True)
        results[f"{name}, corrected evidence"] = posterior.log_marginal_likelihood()
        results[f"{name}, corrected f, V"] = torch.cat(
            [t.flatten() for t in posterior.output_distribution(x[:2], "last")]
        )
    return results


def of_checkpoints() -> dict[str, Tensor]:
    """The evidence, and steps of K-FAC, of a model with activation checkpointing."""
    name = "checkpointed"
    model, (x, y) = shard(made(name)), whole_data(name)
    posterior = Posterior(model, "classification", kfac_approx="reduce", prior_precision=2.0)
    model.eval()
    posterior.fit(batches(x, y))
    return of_kfac(name) | {f"{name}, evidence": posterior.log_marginal_likelihood()}


class AsRows(nn.Module):
    """A layer that cannot run without examples."""

    def forward(self, h: Tensor) -> Tensor:
        return h.view(len(h), -1)


def of_batch_norm() -> dict[str, Tensor]:
    """Renewed statistics over three batches: two of the first rank's, and an empty one."""
    results, (x, y), ranks = {}, whole_data("cnn", 6), Ranks()
    parts = torch.arange(6).split(2)
    own = parts if ranks.size == 1 else (parts[:2], (parts[2], parts[2][:0]))[ranks.rank]
    for sharding in (nn.Module.train, shard):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), AsRows()).double()
        sharding(model)
        renew_batch_norm(model, [(x[part], y[part]) for part in own], TargetOptions(), ranks)
        norm: Any = model[1]
        statistics = torch.cat([norm.running_mean, norm.running_var])
        results[f"batch norm, {sharding.__name__}"] = statistics
    return results


def in_lower_precision() -> dict[str, Tensor]:
    """Factors of a model that runs in float32, beside parameters in float64."""
    model, (x, y) = made("cnn"), whole_data("cnn")
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    if Ranks().size > 1:
        shard(model, mp_policy=policy)
    else:
        model, x = model.float(), x.float()
    factors = kronecker_factors(model, batches(x, y), "classification")
    blocks = factors.gathered(Ranks()).blocks
    return {n: block.B.double().norm().round(decimals=3) for n, block in blocks.items()}


LIKELIHOODS = "regression_per_output", "student_t", "heteroscedastic", "noisy_classification"
"""Whose noises, degrees of freedom or share of wrong labels are learned."""


def of_learned_likelihoods() -> dict[str, Tensor]:
    """The numbers of likelihoods, their evidences and the decays after three updates."""
    results = {}
    for name in LIKELIHOODS:
        (x, labels), ranks = whole_data("cnn", 8), Ranks()
        y = labels if name == "noisy_classification" else normal(8, 2).sinh()
        torch.manual_seed(1)
        C = 4 if name == "heteroscedastic" else 2 + (y is labels)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(36, C))
        model = shard(model.double())
        parts = [torch.arange(i, i + 4)[ranks.rank :: ranks.size] for i in (0, 4)]
        loader = [(x[part], y[part]) for part in parts]
        learner = PriorLearner(
            name, kfac_approx="reduce", every=1, burn_in=0, curvature_from="pass"
        )
        optimizer = torch.optim.SGD(model.parameters(), 1.0 if y is labels else 0.03)
        held_out = 4 * [(x, t.clamp(min=1)) for x, t in loader] if y is labels else None
        learner.start(model, optimizer, loader, 3, held_out=held_out)
        for _ in range(3):
            for inputs, targets in loader:
                optimizer.zero_grad()
                learner.likelihood.loss(model(inputs), targets).div(len(targets)).backward()
                optimizer.step()
        learner.finish()
        numbers = [xi.flatten() for xi in learner.likelihood.parameters.values()]
        sigma = learner.state.hyperparameters.sigma_noise.flatten()
        results[f"{name}, numbers"] = torch.cat([*numbers, sigma])
        results[f"{name}, decays"] = learner.weight_decays()
        results[f"{name}, evidences"] = torch.tensor(learner.evidences, dtype=torch.float64)
    return results


def part_of_training(
    epochs: range,
    saved: dict[str, Any] | None = None,
    file: Path | None = None,
    fatal: int | None = None,
) -> dict[str, Any]:
    """Some epochs of a training of five, from a state; its whole state, decays and parameters.

    Rank 0 writes the state into the file before the fatal epoch, in which rank 1 is killed.
    """
    model, (x, y), ranks = made("cnn"), whole_data("cnn", 8), Ranks()
    if saved:
        model.load_state_dict(saved["model"])
    model = shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    # Two steps an epoch: full batches have no average.
    parts = [torch.arange(first + ranks.rank, first + 4, ranks.size) for first in (0, 4)]
    loader = [(x[part], y[part]) for part in parts]
    learner = PriorLearner(
        "classification", kfac_approx="reduce", every=1, burn_in=0, curvature_from="pass"
    )
    if saved:
        learner.load_state_dict(saved["learner"])
    learner.start(model, optimizer, loader, 5)

    def whole_state() -> dict[str, Any]:
        parts = {name: p.detach() for name, p in model.named_parameters()}
        return gathered_state({"learner": learner.state_dict(), "model": parts})

    for epoch in epochs:
        if epoch == fatal and file is not None:
            state = whole_state()
            if ranks.rank == 0:
                torch.save(state, file)
            ranks.gather(None)
            if ranks.rank == 1:
                os._exit(1)
        for x_part, y_part in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x_part), y_part).backward()
            optimizer.step()
    state = whole_state()
    if epochs.stop == 5:
        learner.finish()
        state["model"] = whole_state()["model"]
    return state | {"decays": learner.weight_decays()}


def of_restored_weights() -> dict[str, Any]:
    """Weights that a loop restores after its last step, all of them or one rank's part alone."""
    results: dict[str, Any] = {}
    for name in ("restored", "one rank's part", "none"):
        model, (x, y), ranks = shard(made("cnn")), whole_data("cnn", 8), Ranks()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        parts = [torch.arange(first + ranks.rank, first + 4, ranks.size) for first in (0, 4)]
        loader = [(x[part], y[part]) for part in parts]
        learner = PriorLearner("classification", kfac_approx="reduce", curvature_from="pass")
        learner.start(model, optimizer, loader, 3)
        best: list[Tensor] = []
        for epoch in range(3):
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            if epoch == 1:
                best = [part.clone() for part in local_parts(model.parameters())]
        last = [part.clone() for part in local_parts(model.parameters())]
        with torch.no_grad():
            for part, value in zip(local_parts(model.parameters()), best, strict=True):
                if name == "restored" or (name != "none" and ranks.rank == 0):
                    part.copy_(value)
        present = [part.clone() for part in local_parts(model.parameters())]
        averaged = learner.finish()["averaged"]
        now = [part.clone() for part in local_parts(model.parameters())]
        results[f"{name}, averaged"] = torch.tensor(averaged)
        keeps = all(torch.equal(a, b) for a, b in zip(present, now, strict=True))
        results[f"{name}, keeps"] = torch.tensor(float(keeps))
        is_last = all(torch.equal(a, b) for a, b in zip(last, now, strict=True))
        results[f"{name}, is the last"] = torch.tensor(float(is_last))
        if name != "one rank's part":  # of which one process has no part
            results |= {f"{name}, {n}": p for n, p in gathered_state(parts_of(model)).items()}
            results[f"{name}, decays"] = learner.weight_decays()
    return results


def of_loaded_states(folder: str, files: list[str | None], is_sharded: bool) -> dict[str, Any]:
    """Parameters after the last of four steps, from states of the third; or the error instead.

    Each rank takes its file of ``files`` for the learner, and then for K-FAC. Of the other it takes
    its own state.
    """
    (x, y), ranks = whole_data("cnn", 8), Ranks()
    own = slice(ranks.rank, 8, ranks.size)

    def training(saved: dict[str, Any]) -> tuple[nn.Module, KFAC, PriorLearner]:
        model = made("cnn")
        model.load_state_dict(saved.get("model", model.state_dict()))
        model = shard(model) if is_sharded else model
        optimizer = KFAC(model, "classification", lr=0.05, kl_clip=None, fisher="exact")
        learner = PriorLearner("classification", kfac_approx="reduce", every=1, burn_in=0)
        if saved.get("K-FAC"):
            optimizer.load_state_dict(saved["K-FAC"])
        if saved.get("learner"):
            learner.load_state_dict(saved["learner"])
        learner.start(model, optimizer, [(x[own], y[own])], 4)
        return model, optimizer, learner

    def step(model: nn.Module, optimizer: KFAC) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x[own]), y[own]).backward()
        for p in model.parameters():
            if not hasattr(p, "to_local"):
                dist.all_reduce(p.grad)
                p.grad /= ranks.size
        optimizer.step()

    model, optimizer, learner = training({})
    for number in range(4):
        state = {"learner": learner.state_dict(), "K-FAC": optimizer.state_dict()}
        state["model"] = {n: p.clone() for n, p in gathered_state(parts_of(model)).items()}
        torch.save(state, f"{folder}/{number}.{ranks.rank}")
        step(model, optimizer)
    learner.finish()
    state = torch.load(f"{folder}/3.{ranks.rank}", weights_only=False)  # of before the last step
    whole = gathered_state(state)
    torch.save(whole, f"{folder}/whole")
    whole["learner"]["decays"] = [1.0] * 6
    whole["K-FAC"]["preconditioner"]["blocks"]["0.bias"]["B"] *= 2
    torch.save(whole, f"{folder}/changed")
    results: dict[str, Any] = {"expected": gathered_state(parts_of(model))}
    ranks.gather(None)  # all files are written
    file = files[ranks.rank]
    other = torch.load(f"{folder}/{file}", weights_only=False) if file else {}
    for name in ("learner", "K-FAC"):

        def go_on(name: str = name) -> None:
            model, optimizer, learner = training({**state, name: other.get(name)})
            step(model, optimizer)
            learner.finish()
            results[name] = gathered_state(parts_of(model))

        error = error_of(go_on)
        results.setdefault(name, error)
    return results


def of_kfac(*names: str) -> dict[str, Tensor]:
    """Parameters after some steps of K-FAC; one process' losses are means over both ranks'."""
    results = {}
    for name in names:
        fisher = "exact" if name == "cnn" else "empirical"
        model, (x, y), ranks = shard(made(name)), whole_data(name, 8), Ranks()
        optimizer = KFAC(
            model, "classification", lr=0.05, momentum=0.9, weight_decay=1e-3, kl_clip=None,
            loss_mean_over="terms" if name == "gpt" else "examples", kfac_approx="reduce",
            fisher=fisher,
        )  # fmt: skip
        steps = trained(model)
        for part in (torch.arange(i, i + 4)[ranks.rank :: ranks.size] for i in (0, 4)):
            optimizer.zero_grad()
            f = steps(x[part])
            F.cross_entropy(f.flatten(0, -2), y[part].flatten()).backward()
            optimizer.step()
        results |= {f"{name}, {n}": p for n, p in gathered_state(parts_of(model)).items()}
    return results


def refused() -> dict[str, str]:
    """The errors of what is not supported."""
    x, y = whole_data("cnn")
    mesh = init_device_mesh("cpu", (2,))
    linear = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    linear = parallelize_module(linear, mesh, {"0": ColwiseParallel()})
    wrapped: nn.Module = FullyShardedDataParallel(
        made("cnn").float(), device_id=torch.device("cpu")
    )
    model, quadratic = shard(made("cnn")), shard(case("no rule")[0], by_block=False)
    posterior = Posterior(model, "classification")
    posterior.fit(batches(x, y))
    trained = shard(made("cnn"))
    optimizer = KFAC(trained, "classification", lr=0.1, fisher="empirical")
    F.cross_entropy(trained(x), y).backward()
    optimizer.step()
    state = optimizer.state_dict()
    of_linear = (normal(4, 4), torch.arange(4) % 3)
    of_pixels, segments = (x, (x[:, 0] > 0).long()), shard(nn.Conv2d(3, 8, 1).double())

    def passes(model: nn.Module, data: Any, **options: Any) -> Any:
        return lambda: kronecker_factors(model, data, "classification", **options)

    def without_group(use: Callable[[], Any]) -> None:
        with patch.object(dist, "is_initialized", lambda: False):  # as after destroy_process_group
            use()

    uses = {
        "tensor parallelism": passes(linear, [of_linear]),
        "FSDP1": passes(wrapped, [(x.float(), y)]),
        "diagonal": passes(quadratic, [(case("no rule")[1], y[:4])], unsupported="diagonal"),
        "sample": lambda: posterior.sample(1),
        "all layers": lambda: posterior.output_distribution(x[:2]),
        "Jacobians": lambda: Posterior(model, "classification", structure="diag"),
        "no process group": passes(model, [(x, y)], process_group=None),
        "classes second": passes(segments, [of_pixels]),
        "in training": lambda: PriorLearner("classification", loss_mean_over="terms").start(
            segments, torch.optim.SGD(segments.parameters(), 0.1), [of_pixels], 2
        ),
        "in steps of K-FAC": lambda: step_of_kfac(shard(nn.Conv2d(3, 8, 1).double()), *of_pixels),
        "the group has ended": lambda: without_group(passes(model, [(x, y)])),
        "derivatives": lambda: factor_gradients(
            posterior.fitted_factors(), model, [], [y.double()], {}
        ),
        "laplace-torch": lambda: KfacGGN(model, "classification"),
        "whole model": lambda: KFAC(made("cnn"), "classification").load_state_dict(state),
        "one rank saves": lambda: posterior.fitted_factors().state_dict(),
        "one rank alone": lambda: decompose((posterior.fitted_factors() * 1).blocks.values()),
    }
    return {name: error_of(use) for name, use in uses.items()}


def step_of_kfac(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = KFAC(model, "classification", lr=0.1, loss_mean_over="terms")
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def everything() -> dict[str, Any]:
    """All of it."""
    results = numbers(list(MODELS)) | of_layers() | of_masks() | of_shifted_labels() | of_pixels()
    results |= of_batch_norm() | of_checkpoints() | of_corrected_eigenvalues() | of_whole_models()
    results |= {f"float32, {name}": tensor for name, tensor in in_lower_precision().items()}
    x, y = whole_data("gpt")
    model = shard(made("gpt"))
    posterior = Posterior(model, "classification", kfac_approx="reduce", prior_precision=2.0)
    posterior.fit(batches(x[:4], y[:4]))
    results["half of the data"] = posterior.log_marginal_likelihood()
    several = Ranks().size > 1
    whole = [n for n, p in model.named_parameters() if several and not hasattr(p, "to_local")]
    return {
        "numbers": results,
        "at rest": {is_sharded: at_rest(is_sharded) for is_sharded in (True, False)},
        "likelihoods": of_learned_likelihoods(),
        "K-FAC": of_kfac("gpt", "cnn"),
        "training": part_of_training(range(5)),
        "state": part_of_training(range(4)) if not several else None,
        "whole parameters after the pass": whole,
        "refused": refused() if several else {},
    }
