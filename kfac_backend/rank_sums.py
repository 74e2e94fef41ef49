"""The sums of a pass, and their sum over ranks.

Everything in `PassSums` is a sum over examples, so that any split of the data gives the same total,
with unequal shards and with ranks that have no data. Means and scalings come after the reduction: a
mean of the ranks' means would weigh examples by the size of their shard.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfac_backend.block_assembly import Part
from kfac_backend.blocks.sketch import Factor, add_factors
from kfac_backend.distributed import RankError, Ranks, check_same
from kfac_backend.options import KfacApprox

__all__ = ["PassSums", "sum_over_ranks"]

WHAT = "a curvature pass"
_Place = tuple[str, int, str]
"""A parameter's name, the index of one of its `Part`s, and "B" or "A"."""
COUNTS = ("num_data", "num_loss_terms", "loss", "trace", "trace_left_out")


@dataclass
class PassSums:
    """A pass's sums over the data that one process, or all of them, have seen."""

    blocks: dict[str, list[Part]]
    """Parameter name -> the sums of its layers."""
    others: dict[str, Tensor]
    """Name -> a sum of any shape, such as a diagonal."""
    kfac_approx: KfacApprox
    """The mode; "auto" if no batch has decided it yet."""
    num_outputs: int
    num_data: int
    num_loss_terms: int
    loss: float
    """Σ ℓ (nats)."""
    trace: float = 0.0
    trace_left_out: float = 0.0

    def tensors(self) -> list[Tensor]:
        """All tensors. One that a weight and its bias share comes twice."""
        factors = [F for parts in self.blocks.values() for p in parts for F in (p.sums.B, p.sums.A)]
        return [F for F in (*factors, *self.others.values()) if isinstance(F, Tensor)]

    def with_tensors(self, tensors: Iterable[Tensor]) -> "PassSums":
        """The same with other tensors, in the order of `tensors`."""
        rest = iter(tensors)
        replaced = self.map_factors(lambda _, F: next(rest) if isinstance(F, Tensor) else F)
        return replace(replaced, others={name: next(rest) for name in self.others})

    def map_factors(self, change: Callable[[_Place, Factor], Factor]) -> "PassSums":
        """The sums with each factor replaced by ``change(place, factor)``."""
        blocks = {
            name: [
                part._replace(
                    sums=part.sums._replace(
                        B=change((name, i, "B"), part.sums.B),
                        A=None if part.sums.A is None else change((name, i, "A"), part.sums.A),
                    )
                )
                for i, part in enumerate(parts)
            ]
            for name, parts in self.blocks.items()
        }
        return replace(self, blocks=blocks)

    def factor(self, place: _Place) -> Factor | None:
        """The factor at a place, as `map_factors` passes it."""
        name, i, which = place
        sums = self.blocks[name][i].sums
        return sums.B if which == "B" else sums.A


class _Message(NamedTuple):
    """What a rank sends to the others before the sums themselves."""

    same: dict[str, Any]
    """What must be the same on all ranks."""
    norms: dict[str, float]
    """The norm of each trainable parameter, which must agree up to rounding."""
    sums: PassSums | None
    """The rank's counts and sketches, with its tensors on the meta device, which have shapes but no
    entries; None without data."""
    first_of: list[int]
    """For each tensor, the index of the first one that is the same object."""


def sum_over_ranks(
    sums: PassSums, ranks: Ranks, model: nn.Module, same: Mapping[str, Any]
) -> PassSums:
    """The sums over all ranks' data, in place, the same to the bit on each rank.

    Ranks exchange a small message with counts and shapes, and then the tensors in large buckets. A
    rank without data takes the shapes from the others' messages, since it must join the reduction.

    Args:
        sums: this rank's sums.
        ranks: all ranks.
        model: the model, which must be the same on all ranks, up to rounding.
        same: what else must be the same, such as options, by the names that errors use.

    Raises:
        RankError: a rank is gone, or has another model, other options or another version.
    """
    if ranks.size == 1:
        return sums
    messages = ranks.gather(_message(sums, model, same), WHAT)
    _check(messages)
    device = next(model.parameters()).device
    with_data = [(m.sums, m.first_of) for m in messages if m.sums is not None]
    if not with_data:
        return sums
    first, first_of = with_data[0]
    if not sums.num_data:
        zeros = [torch.zeros_like(tensor, device=device) for tensor in first.tensors()]
        sums = first.with_tensors(zeros[i] for i in first_of)
    if any(other != first_of for _, other in with_data):
        # One rank has two tensors where another shares one between a weight and its bias: whether
        # B is shared depends on the batches. All ranks must reduce the same number, so all get two.
        sums = sums.with_tensors([tensor.clone() for tensor in sums.tensors()])
    ranks.sum_(sums.tensors(), WHAT)
    sums = _with_sketches(sums, [of_rank for of_rank, _ in with_data], device)
    totals: dict[str, Any] = {
        name: sum(getattr(of_rank, name) for of_rank, _ in with_data) for name in COUNTS
    }
    return replace(
        sums, **totals, blocks=_with_num_terms(sums, [of_rank for of_rank, _ in with_data])
    )


def _message(sums: PassSums, model: nn.Module, same: Mapping[str, Any]) -> _Message:
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    same = {
        "the version of torch": str(torch.__version__),
        "the trainable parameters": {name: tuple(p.shape) for name, p in trainable.items()},
        **same,
    }
    norms = torch.stack([torch.linalg.vector_norm(p).double() for p in trainable.values()])
    by_name = dict(zip(trainable, norms.tolist(), strict=True))
    if not sums.num_data:
        return _Message(same, by_name, None, [])
    tensors = sums.tensors()
    positions: dict[int, int] = {}
    first_of = [positions.setdefault(id(tensor), i) for i, tensor in enumerate(tensors)]
    shapes = sums.map_factors(lambda _, F: F if isinstance(F, Tensor) else F.to("cpu"))
    shapes = shapes.with_tensors(torch.empty_like(tensor, device="meta") for tensor in tensors)
    return _Message(same, by_name, shapes, first_of)


def _check(messages: list[_Message]) -> None:
    """Raise a RankError if a rank differs from the first."""
    check_same([message.same for message in messages], WHAT)
    for name, norm in messages[0].norms.items():
        for rank, message in enumerate(messages):
            if not math.isclose(norm, message.norms[name], rel_tol=1e-3):
                raise RankError(
                    f"Ranks disagree in {WHAT}: parameter '{name}' has norm {norm:.6g} on rank 0 "
                    f"and {message.norms[name]:.6g} on rank {rank}. Give all the same weights "
                    "first: train with DistributedDataParallel, or send rank 0's to the others "
                    "(torch.distributed.broadcast)."
                )
    with_data = [m.sums for m in messages if m.sums is not None]
    if with_data:
        check_same([_kinds(sums) for sums in with_data], WHAT)


def _kinds(sums: PassSums) -> dict[str, Any]:
    """What the data decides, and must agree between all ranks that have data."""
    tensors = [(tuple(t.shape), str(t.dtype)) for t in sums.tensors()]
    slots = {name: [part.slot for part in parts] for name, parts in sums.blocks.items()}
    return {
        "the mode": sums.kfac_approx,
        "the number of outputs": sums.num_outputs,
        "the factors' parameters": list(sums.blocks) + list(sums.others),
        "the layers of each parameter": slots,
        "the factors' shapes and dtypes": tensors,
    }


def _with_sketches(sums: PassSums, of_ranks: list[PassSums], device: torch.device) -> PassSums:
    """The sums with the ranks' sketches added in order; error bounds add up, too.

    Sketches came with the messages, since their sum is not a sum of entries: see `blocks.sketch`.
    """

    def added(place: _Place, F: Factor) -> Factor:
        if isinstance(F, Tensor):
            return F
        sketches = [of_rank.factor(place) for of_rank in of_ranks]
        total = next(iter(sketches))
        for other in sketches[1:]:
            assert total is not None and other is not None
            total = add_factors(total, other)
        assert total is not None
        return total.to(device)

    return sums.map_factors(added)


def _with_num_terms(sums: PassSums, of_ranks: list[PassSums]) -> dict[str, list[Part]]:
    """The blocks' sums, with the numbers of terms added up over the ranks."""
    return {
        name: [
            part._replace(
                sums=part.sums._replace(
                    num_terms=sum(other.blocks[name][i].sums.num_terms for other in of_ranks)
                )
            )
            for i, part in enumerate(parts)
        ]
        for name, parts in sums.blocks.items()
    }
