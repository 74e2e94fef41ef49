"""The ranks of torch.distributed: sums over their shards of the data, and work that they share.

Each rank sees its own part of the data, its shard. The sums of a pass are additive over shards, so
that one reduction at the end gives the pass over all the data. A method is collective if it
exchanges data between ranks: all of the group must call it, in the same order.

A rank that waits for another must tell a slow rank from one that hangs. So each rank counts its
progress (`Ranks.beat`: a batch, a factor) in the store of torch.distributed. A rank that waits
reads the others' counts, and gives up when one of them has not changed for the group's timeout.
"""

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ProcessGroupOption", "RankError", "Ranks", "check_same", "share_out"]

ProcessGroupOption: TypeAlias = "ProcessGroup | Literal['default'] | None"
"""The ranks that share the data: a process group, the default one if there is one, or none."""

BUCKET = 32 * 2**20
"""Bytes up to which tensors are sent together; a larger tensor is sent alone."""

AGES = timedelta(days=365)
"""A timeout that never ends a wait: `Ranks._meet` has its own limit."""
LONGEST_PAUSE = 0.05
"""Longest pause (seconds) between two checks of whether all ranks have arrived."""
LOOKS = 20
"""How often a waiting rank reads the others' counts within the timeout."""


class RankError(RuntimeError):
    """Another rank has failed, is gone, or does something other than this one."""


@dataclass(frozen=True)
class Ranks:
    """The processes that have a shard of the data each; only this one if there is no group.

    Args:
        process_group: the group of these processes. "default" is the default group of
            `torch.distributed`, looked up at each use, since a group may begin and end while a
            model lives.
    """

    process_group: ProcessGroupOption = "default"

    @property
    def size(self) -> int:
        """How many there are."""
        group = self._group
        return 1 if group is None else dist.get_world_size(group)

    @property
    def rank(self) -> int:
        """This one's number, from 0."""
        group = self._group
        return 0 if group is None else dist.get_rank(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        """The same ranks: a process group cannot be copied."""
        return copy(self)

    def gather(self, value: Any, what: str) -> list[Any]:
        """The values of all ranks, ordered by rank.

        Args:
            value: anything that can be pickled; small, as it is sent to all.
            what: the work that is being done, for errors.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._named_errors(what):
            self._meet(what)
            dist.all_gather_object(values, value, group=self._group)
        return values

    def agree(self, value: Mapping[str, Any], what: str) -> None:
        """Raise a `RankError` on all ranks unless all give the same.

        Args:
            value: what must be the same, by the names that the error gives them.
            what: the work that is being done, for errors.
        """
        check_same(self.gather(dict(value), what), what)

    @contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """A context that ends with an error on all ranks if it ends with one on any.

        Without it the other ranks would wait in the next collective call for the one that failed.

        Raises:
            RankError: another rank has failed, or is gone.
        """
        failure: Exception | None = None
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            failure = error
        told = self.gather(
            None if failure is None else f"{type(failure).__name__}: {failure}", what
        )
        if failure is not None:
            raise failure
        for rank, of_rank in enumerate(told):
            if of_rank is not None:
                raise RankError(
                    f"Rank {rank} of {self.size} failed in {what}, which ends it for all: {of_rank}"
                )

    def beat(self) -> None:
        """Tell the ranks that wait for this one that it makes progress; not collective.

        Call it after each piece of work that may take longer on one rank than on another. It costs
        one request to the store.
        """
        if self.size > 1:
            with self._named_errors("telling the others that it gets on"):
                _store().add(self._count_of(self.rank), 1)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """A context in which a thread calls `beat`, so that the others wait as long as it takes.

        Use it for a single call that is known to end, such as a solver or the writing of a file.
        Never use it around a user's code, which may hang.
        """
        if self.size == 1:
            yield
            return
        interval, done = _timeout() / LOOKS, Event()

        def beat() -> None:
            try:
                while not done.wait(interval):
                    self.beat()
            except RankError:  # the others are gone: the next collective call raises
                pass

        thread = Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def sum_(self, tensors: Sequence[Tensor], what: str) -> None:
        """Replace each tensor by its sum over all ranks; the same to the bit on each.

        Args:
            tensors: of the same shapes and dtypes on all ranks. One that comes twice is summed
                once.
            what: the work that is being done, for errors.
        """
        if self.size == 1:
            return
        tensors = list({id(tensor): tensor for tensor in tensors}.values())
        with self._named_errors(what), torch.no_grad():
            waiting = []  # all buckets are started before the first is waited for
            for bucket in _buckets(tensors):
                flat = _flat(bucket)
                work = dist.all_reduce(flat, group=self._group, async_op=True)
                waiting.append((work, flat, bucket))
            for work, flat, bucket in waiting:
                assert work is not None
                work.wait()
                _spread(flat, bucket)

    def owners(self, costs: Sequence[float]) -> list[int]:
        """The rank that does each piece of work, see `share_out`; not collective."""
        return share_out(costs, self.size)

    def exchange_(self, tensors: Sequence[Tensor], owners: Sequence[int], what: str) -> None:
        """Fill each tensor with its owner's values, to the bit.

        Args:
            tensors: of the same shapes and dtypes on all ranks.
            owners: the rank that has each one's values, as of `owners`.
            what: the work that is being done, for errors.
        """
        if self.size == 1:
            return
        with self._named_errors(what), torch.no_grad():
            waiting = []
            for owner in range(self.size):
                own = [t for t, o in zip(tensors, owners, strict=True) if o == owner]
                source = dist.get_global_rank(self._group, owner)  # pyright: ignore[reportArgumentType]
                for bucket in _buckets(own):
                    flat = _flat(bucket)
                    work = dist.broadcast(flat, source, group=self._group, async_op=True)
                    waiting.append((work, flat, bucket))
            for work, flat, bucket in waiting:
                assert work is not None
                work.wait()
                _spread(flat, bucket)

    def generator(self, common: torch.Generator) -> torch.Generator:
        """A generator of this rank alone, seeded by the state of one that all ranks have alike.

        Its numbers depend on that state, the rank and the number of ranks; ``common`` is not
        changed.
        """
        state = common.get_state().numpy().tobytes()
        word = blake2b(state + f"{self.rank} of {self.size}".encode(), digest_size=7).digest()
        return torch.Generator(common.device).manual_seed(int.from_bytes(word, "big"))

    @property
    def _group(self) -> "ProcessGroup | None":
        if self.process_group != "default":
            return self.process_group
        there = dist.is_available() and dist.is_initialized()
        return dist.group.WORLD if there else None

    def _count_of(self, rank: int) -> str:
        assert self._group is not None
        return f"kfac_backend/{self._group.group_name}/{rank}"

    def _meet(self, what: str) -> None:
        """Wait until all ranks have arrived here, as long as the missing ones make progress.

        After it all ranks enter the collective call at about the same time, so that the backend's
        own timeout suits that call.

        Raises:
            RankError: a rank has made no progress for the group's timeout.
            RuntimeError: a rank is gone.
        """
        group = self._group
        assert group is not None
        if dist.get_backend(group) != "gloo":
            return  # NCCL has one timeout for all calls
        options = dist.AllreduceOptions()
        options.timeout = AGES
        all_here = group.allreduce([torch.zeros(1)], options)
        limit = _timeout()
        between, pause = limit / LOOKS, 1e-4
        counts: list[int] = []
        still = [0.0] * self.size
        looked = time.monotonic()
        while not all_here.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            passed = time.monotonic() - looked
            if passed < between:
                continue
            looked += passed
            self.beat()  # a rank that waits does not hang
            now = [_store().add(self._count_of(rank), 0) for rank in range(self.size)]
            for rank, (count, before) in enumerate(zip(now, counts or now, strict=True)):
                # Counted is the time of two looks at most. More has passed if all ranks were
                # suspended together, as by Ctrl-Z, which is no rank's fault.
                still[rank] = still[rank] + min(passed, 2 * between) if count == before else 0.0
                if still[rank] >= limit:
                    raise RankError(
                        f"Rank {rank} of {self.size} has done nothing for {limit:g} s, and the "
                        f"others wait for it in {what}. It hangs, or one batch takes it longer "
                        "than the timeout of torch.distributed.init_process_group."
                    )
            counts = now
        all_here.wait()

    @contextmanager
    def _named_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:  # also torch.distributed's own, which are RuntimeErrors
            raise RankError(
                f"Rank {self.rank} of {self.size} lost the others in {what}: {error}\n"
                "One of them has failed, died or hung, or does something else; its own output says "
                "why. End all ranks and start anew, where a run was kept with resume. (How long a "
                "rank waits is the timeout of torch.distributed.init_process_group.)"
            ) from error


def share_out(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank that does each piece of work: the largest first, to the rank with the least so far.

    The last rank finishes after at most 4/3 of the shortest possible time (Graham 1969, "Bounds on
    multiprocessing timing anomalies").
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + costs[index], rank))
    return owners


def check_same(values: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raise a `RankError` that names the first difference between ranks, if there is any.

    Args:
        values: each rank's values, by name.
        what: the work that is being done, for the error.
    """
    for name in dict.fromkeys(name for value in values for name in value):
        first = values[0].get(name)
        for rank, other in enumerate(values):
            if other.get(name) != first:
                raise RankError(
                    f"Ranks disagree in {what}: {name} is {first!r} on rank 0 and "
                    f"{other.get(name)!r} on rank {rank}. All must run the same program, on the "
                    "same model."
                )


def _store() -> dist.Store:
    """The key-value store that all processes of torch.distributed share."""
    return dist.distributed_c10d._get_default_store()


def _timeout() -> float:
    """The default group's timeout (seconds), which its store has as well."""
    return _store().timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors of one dtype and device, of at most `BUCKET` bytes or one tensor."""
    by_kind: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in by_kind.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        if bucket:
            yield bucket


def _flat(bucket: Sequence[Tensor]) -> Tensor:
    """The tensors as one; the tensor itself, not a copy, if it is alone and contiguous."""
    if len(bucket) == 1:
        return bucket[0].detach().contiguous()
    return torch.cat([tensor.detach().flatten() for tensor in bucket])


def _spread(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Copy the entries of `_flat` back into the tensors."""
    parts = flat.flatten().split([tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        if tensor.data_ptr() != part.data_ptr():
            tensor.copy_(part.view(tensor.shape))
