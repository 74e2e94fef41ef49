"""What the first batches of a pass decide for all later ones: the proof, and kfac_approx="auto".

`Preparation.prepare` is called before each batch is added, and does nothing once all is decided.
Ranks that share a model under `fully_shard` run it together, so that each must run it equally
often. They prepare on the same examples, a few of each rank that misses something.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.engine.batches import detached, examples, splits_by_example
from kfac_backend.engine.calls import forked_random_numbers
from kfac_backend.engine.capture import Capture
from kfac_backend.engine.checks import check_inputs
from kfac_backend.engine.proof import MOST_EXAMPLES, Proof
from kfac_backend.engine.rule_assignment import TrackedLayer
from kfac_backend.engine.task import Task
from kfac_backend.options import KfacApprox
from kfac_backend.precision import full_float32
from kfac_backend.ranks import Ranks
from kfac_backend.sharding import resharded


@dataclass
class Preparation:
    """The proof of a model and its mode, which stay for all passes."""

    model: nn.Module
    proof: Proof
    """What is known of the model and its layers."""
    task: Task
    kfac_approx: KfacApprox
    """The layers' mode; if it is "auto", the first batch decides it for all passes."""
    ranks: Ranks
    common: tuple[Any, Any] | None = None
    """An input and targets that all ranks of a sharded model have, for one without a batch."""

    def prepare(self, x: Any, y: Any) -> Any:
        """Make what is missing of the proof, and decide the mode; returns the batch's targets."""
        # First the targets, since the proof must know which loss terms count.
        y = self.task.targets(self.model, x, y)
        N = len(y) if isinstance(y, Tensor) and y.dim() else None
        mask = None if self.proof.holds_for_masks else self.task.mask(x)
        if not self.proof.is_made(N):
            check_inputs(x)
            self.proof.make(x, N, self.task.ignored(y))
        if mask is not None:
            self._prove_mask(x, y, mask)
        if self.kfac_approx == "auto":
            self.decide_mode(x, y)
        return y

    def _prove_mask(self, x: Any, y: Any, mask: Tensor) -> None:
        """Prove that a mask does no harm, on the first example that it hides a position of."""
        ignored = self.task.ignored(y)
        if splits_by_example(x, y):  # and on another one
            hiding = torch.argmin(mask.all(1).int())
            which = torch.stack([hiding, (hiding + 1) % len(mask)])[: len(mask)]
            x, mask = examples(x, which), mask[which]
            ignored = None if ignored is None else ignored[which]
        self.proof.make_for_masks(x, mask, ignored)

    def prepare_together(self, x: Any = None, y: Any = None) -> None:
        """The same on all ranks, on the same examples of those that miss something; collective.

        How often the model runs depends on what these examples show. A rank without a batch has
        neither x nor y.
        """
        N = len(y) if isinstance(y, Tensor) and y.dim() else None
        mask = None if y is None or self.proof.holds_for_masks else self.task.mask(x)
        knows_all = self.proof.is_made(N) and self.task.knows_shift and self.kfac_approx != "auto"
        misses = y is not None and (mask is not None or not knows_all)
        if not self.ranks.any(misses, self.device):
            return
        self.common = None
        for batch in self.examples_of_ranks((x, y, mask) if misses else None):
            self.common = self.common or batch
            self.prepare(*batch)
        if self.proof.assignment.diagonal:
            raise NotImplementedError(
                f"Parameter '{self.proof.assignment.diagonal[0]}' has no K-FAC rule, and the exact "
                "diagonal of its block (unsupported='diagonal') needs whole models; this one is "
                "under fully_shard. Freeze it (requires_grad_(False)), or use "
                "DistributedDataParallel."
            )

    def examples_of_ranks(self, batch: tuple[Any, Any, Tensor | None] | None) -> list[Any]:
        """A few examples of each rank's batch, most first, for all ranks; collective."""
        some = None
        if batch is not None:
            x, y, mask = batch
            if splits_by_example(x, y):
                # One whose positions a mask hides, if there are any, those whose labels tell if the
                # model shifts them, and the first ones.
                hiding = 0 if mask is None else int(torch.argmin(mask.all(1).int()))
                telling = self.task.telling_examples(y).tolist()
                which = [hiding, *telling, *range(min(len(y), MOST_EXAMPLES))]
                which = torch.tensor(list(dict.fromkeys(which)), device=self.device)
                x, y = examples(x, which), y[which]
            some = detached(x, torch.device("cpu")), detached(y, torch.device("cpu"))
        batches = [some for some in self.ranks.gather(some) if some is not None]
        batches.sort(key=lambda some: -len(some[1]) if isinstance(some[1], Tensor) else 0)
        return [tuple(detached(value, self.device) for value in some) for some in batches]

    def prove_masked(self, masked: set[TrackedLayer], x: Any, y: Any, *, together: bool) -> None:
        """Prove that masks do no harm in layers some of whose rows they hide, unless it is.

        Collective if all ranks run the model ``together``.
        """
        is_new = bool(masked - self.proof.masked)
        batches = [(x, y)] if is_new else []
        if together:
            if not self.ranks.any(is_new, self.device):
                return
            batches = self.examples_of_ranks((x, y, self.task.mask(x)) if is_new else None)
        for x, y in batches:
            self.proof.make_for_masks(x, self.task.mask(x), self.task.ignored(y))

    def run_along(self) -> None:
        """Run the model on the common examples, as often as other ranks do on a batch."""
        with full_float32(), resharded(self.model):  # as where a batch is added
            self.prepare_together()
            assert self.common is not None
            x, y = self.common
            with Capture(self.model, self.proof.assignment) as capture:
                f = capture.forward(x)
                nothing = self.ranks.in_step((), self.device)
                capture.backward(f, (torch.zeros_like(f) for _ in nothing))
            self.prove_masked(set(), x, y, together=True)

    def decide_mode(self, x: Any = None, y: Any = None) -> None:
        """Decide kfac_approx="auto", by the first batch or without any; collective."""
        # Loaded only where the mode is not given.
        from kfac_backend.engine.automatic_mode import mode_of_first_batches

        # Dropout that is on must not use up the user's random numbers.
        no_autocast = torch.autocast(self.device.type, enabled=False)
        with forked_random_numbers(self.model), no_autocast:
            mask = None if y is None else self.task.mask(x)
            self.kfac_approx = mode_of_first_batches(
                self.model, self.proof, self.task.likelihood, self.ranks, x, y, mask
            )

    @property
    def device(self) -> torch.device:
        """The model's device, which may be another in the next pass."""
        return next(self.model.parameters()).device
