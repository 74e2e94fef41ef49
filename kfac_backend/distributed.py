"""The ranks of torch.distributed: sums over their shards of the data, and work shared out.

Each rank sees its own part, its shard, of the data. What a pass sums up is additive over shards, so
that one reduction at its end makes it the pass over all of them. Every method here but those
without communication is collective: all ranks of the group call it, in the same order.

Who waits for a rank that computes must tell a slow one from one that hangs. So ranks count what
they have done (`Ranks.beat`: a batch, a factor) in the store of torch.distributed, and who waits
looks at the others' counts: it gives up once one of them has not changed for the group's timeout.
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
"""Bytes that travel together: one tensor alone where it is larger, else several at once."""

AGES = timedelta(days=365)
"""A timeout for a wait that ends by other means."""
LONGEST_PAUSE = 0.05
"""Seconds between two looks at whether all have come."""
LOOKS = 20
"""At the others' counts, in the time for which one may stay the same."""


class RankError(RuntimeError):
    """Another rank has failed, is gone, or does something else than this one."""


@dataclass(frozen=True)
class Ranks:
    """The processes that have a shard of the data each; this one alone if there is no group.

    Args:
        process_group: which they are. With "default" those of `torch.distributed`, looked up at
            each use, since a group may begin and end while a model lives.
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
        """Every rank's value, in their order.

        Args:
            value: anything that can be pickled; small, as it is sent to all.
            what: is being done, for errors.
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
            what: is being done, for errors.
        """
        check_same(self.gather(dict(value), what), what)

    @contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """A context whose end all ranks reach, or none: an error on one becomes one on all.

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
        """Tell the ranks that wait for this one that it gets on; not collective.

        After each part of work that may take longer on one rank than on another: one request to the
        store.
        """
        if self.size > 1:
            with self._named_errors("telling the others that it gets on"):
                _store().add(self._count_of(self.rank), 1)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """A context in which this rank counts as getting on until it is stopped or killed.

        For a single call that is known to end: of a solver, or one that writes a file. Never around
        code of a user's, which may hang.
        """
        if self.size == 1:
            yield
            return
        interval, done = _timeout() / LOOKS, Event()

        def beat() -> None:
            try:
                while not done.wait(interval):
                    self.beat()
            except RankError:  # the others are gone, which the next collective call says
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
            what: is being done, for errors.
        """
        if self.size == 1:
            return
        tensors = list({id(tensor): tensor for tensor in tensors}.values())
        with self._named_errors(what), torch.no_grad():
            waiting = []
            for bucket in _buckets(tensors):
                flat = _flat(bucket)
                work = dist.all_reduce(flat, group=self._group, async_op=True)
                waiting.append((work, flat, bucket))
            for work, flat, bucket in waiting:
                assert work is not None
                work.wait()
                _spread(flat, bucket)

    def owners(self, costs: Sequence[float]) -> list[int]:
        """The rank that does each piece of work, see `share_out`; without communication."""
        return share_out(costs, self.size)

    def exchange_(self, tensors: Sequence[Tensor], owners: Sequence[int], what: str) -> None:
        """Fill each tensor with its owner's values, to the bit.

        Args:
            tensors: of the same shapes and dtypes on all ranks.
            owners: the rank that has each one's values, as of `owners`.
            what: is being done, for errors.
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
        """Random numbers of this rank alone, from the state of a generator that all have alike.

        The same for the same state, rank and number of ranks; ``common`` is not changed.
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
        """Wait until all ranks have come here, for as long as those that have not get on.

        What is waited for otherwise begins on all ranks at about the same time, so that the
        backend's own timeout holds for it.

        Raises:
            RankError: one of them has stood still for the group's timeout.
            RuntimeError: one of them is gone.
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
            self.beat()  # who waits is not who hangs
            now = [_store().add(self._count_of(rank), 0) for rank in range(self.size)]
            for rank, (count, before) in enumerate(zip(now, counts or now, strict=True)):
                # No more than two looks' time: all may have been suspended, as by Ctrl-Z.
                still[rank] = still[rank] + min(passed, 2 * between) if count == before else 0.0
                if still[rank] >= limit:
                    raise RankError(
                        f"Rank {rank} of {self.size} has done nothing for {limit:g} s, and the "
                        f"others wait for it in {what}. It hangs, or needs longer for one "
                        "batch than the timeout of torch.distributed.init_process_group."
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
    """The rank that does each piece of work: the largest first, to who has the least so far.

    The last to end takes at most 4/3 of the least time possible (Graham 1969, "Bounds on
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
    """Raise a `RankError` that names the first thing that ranks differ in.

    Args:
        values: each rank's, by names.
        what: is being done, for the error.
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
    """Where all processes of torch.distributed can look."""
    return dist.distributed_c10d._get_default_store()


def _timeout() -> float:
    """The default group's timeout (seconds), which its store has, too."""
    return _store().timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device, as many as a bucket holds; at least one."""
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
    """The tensors in one; the tensor itself if it is alone and contiguous."""
    if len(bucket) == 1:
        return bucket[0].detach().contiguous()
    return torch.cat([tensor.detach().flatten() for tensor in bucket])


def _spread(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Back from one tensor to those that it was made of."""
    parts = flat.flatten().split([tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        if tensor.data_ptr() != part.data_ptr():
            tensor.copy_(part.view(tensor.shape))
