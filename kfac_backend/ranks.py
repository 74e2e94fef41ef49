"""Sum over the data shards of torch.distributed ranks, and divide work among ranks.

Each rank reads its own part of the data, its shard. The sums of a pass are additive over shards. So
one reduction at the end gives the pass over all the data, with unequal shards and with ranks
without data. Means and scalings come afterwards, because a mean of the ranks' means would weight
examples by the size of their shard.

A method is collective if it exchanges data between ranks: all ranks of the group must call it, in
the same order. A rank that fails ends, and torchrun then ends the others. Ranks that wait for a
rank that hangs fail after the timeout of the process group, with an error of torch.distributed.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from kfac_backend.options import KfacApprox
from kfac_backend.sharding import squared_norms

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
ProcessGroupOption: TypeAlias = "ProcessGroup | Literal['default'] | None"
"""Ranks that share the data: a process group, the default one if there is one, or none."""


class RankError(RuntimeError):
    """Ranks disagree."""


@dataclass(frozen=True)
class Ranks:
    """Processes that have a shard of the data each; a single one without a group.

    Args:
        process_group: the group of these processes. "default" is the default group of
            `torch.distributed`, looked up at each use, because a group may begin and end while a
            model lives.
    """

    process_group: ProcessGroupOption = "default"

    @property
    def size(self) -> int:
        """Number of ranks."""
        group = self.process_group and self._group
        return 1 if group is None else dist.get_world_size(group)

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        group = self.process_group and self._group
        return 0 if group is None else dist.get_rank(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        """Return the same ranks, because a process group cannot be copied."""
        return copy(self)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank; collective.

        The value must be small and picklable, because every rank receives it.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def agree(self, value: Mapping[str, Any]) -> None:
        """Raise a `RankError` on all ranks unless all pass equal values; collective.

        The error names the difference by the mapping's keys.
        """
        _check_same(self.gather(dict(value)))

    def agree_on_state(self, check: Callable[[], Mapping[str, Any]]) -> None:
        """Raise an error on all ranks if any rank's state to load does not fit; collective.

        Otherwise the other ranks would wait for a rank that rejects its state.

        Args:
            check: raises the error of this rank's state; returns values that must be equal on all
                ranks.
        """
        value, error = dict[str, Any](), None
        try:
            value = dict(check())
        except Exception as own:
            error = own
        of_ranks = self.gather((value, error and str(error)))
        if error is not None:
            raise error
        for rank, (_, reason) in enumerate(of_ranks):
            if reason is not None:
                raise RankError(f"Rank {rank} cannot load its state: {reason}")
        _check_same([values for values, _ in of_ranks])

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, the same to the bit on each; collective.

        The tensors must not share memory.
        """
        if self.size > 1:
            start = partial(dist.all_reduce, group=self._group, async_op=True)
            _send((tensor, start) for tensor in tensors)

    def any(self, is_so: bool, device: torch.device) -> bool:
        """Return whether the condition holds on any rank; collective."""
        if self.size == 1:
            return is_so
        flag = torch.tensor(int(is_so), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def in_step(self, items: Iterable[T], device: torch.device) -> Iterator[T | None]:
        """Yield the items, then None as long as another rank has more; collective at each step."""
        iterator, end = iter(items), object()
        while True:
            item = next(iterator, end)
            if not self.any(item is not end, device):
                return
            yield None if item is end else item  # pyright: ignore[reportReturnType]

    def reduce_(self, owned: Iterable[tuple[Tensor, int]]) -> None:
        """Give the sum of each tensor over all ranks to its owner, one rank; collective.

        On other ranks the tensors are meaningless afterwards. This moves half of the bytes of
        `sum_`.
        """
        if self.size > 1:
            start = partial(dist.reduce, group=self._group, async_op=True)
            _send((tensor, partial(start, group_dst=owner)) for tensor, owner in owned)

    def holders(self, is_here: Sequence[bool]) -> list[list[int]]:
        """Return the ranks that have each piece, from whether it is here; collective."""
        return [
            [rank for rank, has in enumerate(of_ranks) if has]
            for of_ranks in zip(*self.gather(list(is_here)), strict=True)
        ]

    def owners(
        self, costs: Sequence[float], holders: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """Assign each piece of work to a rank: the largest first, to the rank with the least work.

        ``holders`` lists the ranks that can do each piece, if not all ranks can.

        The last rank finishes after at most 4/3 of the shortest possible time (Graham 1969, "Bounds
        on multiprocessing timing anomalies"). Not collective.
        """
        loads, owners = [0.0] * self.size, [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
            able = range(self.size) if holders is None else holders[index]
            owners[index] = min(able, key=lambda rank: (loads[rank], rank))
            loads[owners[index]] += costs[index]
        return owners

    def exchange_(self, owned: Iterable[tuple[Tensor, int]]) -> None:
        """Fill each tensor with the values of its owner, one rank; collective.

        The values are the same to the bit. The tensors have the same shapes and dtypes on all
        ranks.
        """
        if self.size > 1:
            start = partial(dist.broadcast, group=self._group, async_op=True)
            _send((tensor, partial(start, group_src=owner)) for tensor, owner in owned)

    def generator(self, common: torch.Generator) -> torch.Generator:
        """Return a generator of this rank alone, seeded by the state of a common generator.

        Its numbers depend on that state, the rank and the number of ranks. ``common`` is not
        changed.
        """
        # Use the state, which every draw changes, not the seed: two passes with one generator must
        # draw different labels.
        state = common.get_state().numpy().tobytes()
        word = blake2b(state + f"{self.rank} of {self.size}".encode(), digest_size=7).digest()
        return torch.Generator(common.device).manual_seed(int.from_bytes(word, "big"))

    @property
    def _group(self) -> "ProcessGroup | None":
        if self.process_group != "default":
            return self.process_group
        is_initialised = dist.is_available() and dist.is_initialized()
        return dist.group.WORLD if is_initialised else None


def _send(tensors: Iterable[tuple[Tensor, Callable[[Tensor], Any]]]) -> None:
    """Run each tensor's collective call in place."""
    with torch.no_grad():
        # Start all calls before waiting for the first.
        sent = [(start(flat := tensor.contiguous()), flat, tensor) for tensor, start in tensors]
        for work, flat, tensor in sent:
            work.wait()
            if flat is not tensor:
                tensor.copy_(flat)


@dataclass
class PassSums:
    """Sums of a pass over the data of one process, or of all."""

    blocks: dict[str, list[Any]]
    """Maps a parameter's name to the sums of its layers, each a `layers.rule.BlockSums`."""
    others: dict[str, Tensor]
    """Maps a name to a sum of any shape, such as a diagonal."""
    kfac_approx: KfacApprox
    """The mode; "auto" if no batch has decided it yet."""
    num_outputs: int
    num_data: int
    num_loss_terms: int
    loss: float
    """Σ ℓ (nats)."""
    padding: Mapping[str, int]
    """Maps a parameter's name to its constant row."""

    def shapes(self) -> "PassSums":
        """Return the sums on the meta device, without values or memory."""
        blocks = {
            name: [one.map(lambda factor: factor.to("meta", None)) for one in layers]
            for name, layers in self.blocks.items()
        }
        others = {name: torch.empty_like(t, device="meta") for name, t in self.others.items()}
        return replace(self, blocks=blocks, others=others)

    def same_B(self) -> dict[str, str]:
        """Map a parameter to an earlier one with the same B, as a bias to its weight."""
        first, same = dict[Any, str](), dict[str, str]()
        for name, layers in self.blocks.items():
            if (other := first.setdefault(tuple(one.B for one in layers), name)) != name:
                same[name] = other
        return same

    def separate_(self, same_B: Collection[str]) -> None:
        """Copy all Bs that another parameter shares, except for the names in ``same_B``."""
        earlier = set[Any]()
        for name, layers in self.blocks.items():
            for i, one in enumerate(layers):
                if one.B in earlier and name not in same_B:
                    layers[i] = one._replace(B=one.B.clone())
                earlier.add(one.B)

    def owners(self, ranks: Ranks, same_B: Mapping[str, str]) -> dict[str, int]:
        """Map parameters to the rank that keeps their sums, balanced by the eigenvalues' cost d³.

        Parameters with the same B have one owner.
        """
        costs = {name: 0.0 for name in (*self.blocks, *self.others) if name not in same_B}
        for name in self.blocks:
            for F in self.factors(name, same_B):
                costs[same_B.get(name, name)] += F.cost
        owners = dict(zip(costs, ranks.owners(list(costs.values())), strict=True))
        return owners | {name: owners[other] for name, other in same_B.items()}

    def factors(self, name: str, same_B: Collection[str] = ()) -> list[Any]:
        """Return all factors of a parameter, except a B of another parameter by ``same_B``."""
        layers = self.blocks[name]
        Bs = [] if name in same_B else [one.B for one in layers]
        return Bs + [one.A for one in layers if one.A is not None]

    def kinds(self) -> dict[str, Any]:
        """Return the proof's decisions on each rank's data, by their names in errors."""
        slots = {name: [sums.slot for sums in layers] for name, layers in self.blocks.items()}
        block_factors = [F for name in self.blocks for F in self.factors(name)]
        shapes = [(tuple(t.shape), t.dtype) for t in (*block_factors, *self.others.values())]
        return {
            "the layers of each factor": slots,
            "the factors' shapes and dtypes": shapes,
            "the padding of embeddings": dict(self.padding),
        }

    def with_counts_of(self, of_ranks: "Sequence[PassSums]") -> "PassSums":
        """Return these tensors with the sums of all ranks' counts."""
        counts = ("num_data", "num_loss_terms", "loss")
        totals: Any = {name: sum(getattr(one, name) for one in of_ranks) for name in counts}
        blocks = {
            name: [
                sums._replace(num_terms=sum(one.blocks[name][i].num_terms for one in of_ranks))
                for i, sums in enumerate(layers)
            ]
            for name, layers in self.blocks.items()
        }
        return replace(self, blocks=blocks, **totals)


def sum_over_ranks(
    sums: PassSums,
    ranks: Ranks,
    model: nn.Module,
    must_agree: Mapping[str, Any],
    *,
    by_owners: bool = False,
) -> PassSums:
    """Sum over all ranks' data in place, the same to the bit on each rank; collective.

    All ranks must have the same model, up to rounding, and the same objects in ``must_agree``: they
    are compared as texts (``str``), and their keys are their names in errors. With ``by_owners`` a
    single rank, its owner, keeps each sum. On the others it lies on the meta device: it has no
    values and takes no memory.
    """
    # Step 1: a small message with counts and shapes. Ranks must agree before they reduce.
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    must_agree = {
        "the version of torch": str(torch.__version__),
        "the trainable parameters": {name: tuple(p.shape) for name, p in trainable.items()},
        **{name: str(value) for name, value in must_agree.items()},
    }
    norms = squared_norms(list(trainable.values())).sqrt()
    by_name = dict(zip(trainable, norms.tolist(), strict=True))
    shapes = sums.shapes() if sums.num_data else None
    of_ranks = ranks.gather((must_agree, by_name, shapes, sums.same_B()))
    of_same, of_norms, of_shapes, of_same_B = zip(*of_ranks, strict=True)
    with_data: list[PassSums] = [one for one in of_shapes if one is not None]
    _check_same(of_same)
    _check_norms(of_norms)
    _check_same([one.kinds() for one in with_data])
    if not with_data:
        return sums
    # Step 2: whether a weight and its bias share their B depends on a rank's batches. If they share
    # it on all ranks with data, it is summed once, for one owner.
    pairs = [of_rank.items() for of_rank, one in zip(of_same_B, of_shapes, strict=True) if one]
    shapes, same_B = with_data[0], dict(set(pairs[0]).intersection(*pairs))
    owners = shapes.owners(ranks, same_B) if by_owners else {}
    sums.separate_(same_B)
    # Step 3: the sums of all factors, whose counts came with the messages. One parameter after the
    # other, so that another rank's sums are dropped before the next matrix is made of its rows.
    device = next(model.parameters()).device
    own = sums if sums.num_data else replace(shapes, blocks=dict(shapes.blocks))
    whole = replace(own, blocks={}, others={})

    def reduce(name: str, tensors: list[Tensor]) -> bool:
        """Sum one parameter's tensors; return whether this rank keeps them."""
        if not by_owners:
            ranks.sum_(tensors)
            return True
        ranks.reduce_((tensor, owners[name]) for tensor in tensors)
        return owners[name] == ranks.rank

    def summands(name: str, i: int, one: Any) -> Any:
        """Return this rank's part of a layer's factors."""
        of_ranks = [None if other is None else other.blocks[name][i] for other in of_shapes]
        A = None
        if name in same_B:
            B = whole.blocks[same_B[name]][i].B
        else:
            Bs = [None if other is None else other.B for other in of_ranks]
            B = one.B.summand(Bs, ranks.rank, device)
        if one.A is not None:
            As = [None if other is None else other.A for other in of_ranks]
            A = one.A.summand(As, ranks.rank, device)
        return one._replace(B=B, A=A)

    for name in shapes.blocks:
        layers = [summands(name, i, one) for i, one in enumerate(own.blocks.pop(name))]
        part = replace(whole, blocks={name: layers})
        if not reduce(name, [F.entries for F in part.factors(name, same_B)]):
            part = part.shapes()
        whole.blocks.update(part.blocks)
        del layers, part
    for name, shape in shapes.others.items():
        total = own.others[name] if sums.num_data else torch.zeros_like(shape, device=device)
        whole.others[name] = total if reduce(name, [total]) else shape
    return whole.with_counts_of(with_data)


def _check_norms(of_ranks: Sequence[Mapping[str, float]]) -> None:
    """Raise a RankError unless a parameter's norms agree up to rounding."""
    for name, norm in of_ranks[0].items():
        for rank, norms in enumerate(of_ranks):
            if not math.isclose(norm, norms[name], rel_tol=1e-3):
                raise RankError(
                    f"Ranks disagree: parameter '{name}' has norm {norm:.6g} on rank 0 and "
                    f"{norms[name]:.6g} on rank {rank}. Give all ranks the same weights first: "
                    "train with DistributedDataParallel, or broadcast the weights of rank 0 "
                    "(torch.distributed.broadcast)."
                )


def _check_same(values: Sequence[Mapping[str, Any]]) -> None:
    """Raise a `RankError` that names the first difference between ranks, if any."""
    for name in dict.fromkeys(name for value in values for name in value):
        first = values[0].get(name)
        for rank, other in enumerate(values):
            if other.get(name) != first:
                raise RankError(
                    f"Ranks disagree: {name} is {first!r} on rank 0 and {other.get(name)!r} on "
                    f"rank {rank}. Run the same program with the same model on all ranks."
                )
