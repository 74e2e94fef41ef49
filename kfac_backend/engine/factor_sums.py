"""`FactorSums`: sum the factors of the layers' rules, and assemble the parameters' blocks.

Most parameters belong to one layer, and their block is that layer's B ⊗ A. This module handles the
others: tensors that several layers share (tied), tensors that contain several maps (packed, such as
attention's ``in_proj_weight``), and tensors with two kinds of use, such as a language model's
embedding that is also its output layer.

After the sum over ranks `assemble_blocks` makes the blocks. Before the first batch `check_memory`
checks that the factors fit into memory.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.blocks.nearest import nearest_kronecker
from kfac_backend.engine.capture import Sink
from kfac_backend.engine.rule_assignment import RuleAssignment, TrackedLayer
from kfac_backend.layers import ExactRule, Rule, Use, WeightSharingRule
from kfac_backend.layers.gram import Factor, Gram
from kfac_backend.layers.rule import BlockSums
from kfac_backend.options import KfacApprox, PassOptions, modes_of_layers
from kfac_backend.ranks import PassSums


@dataclass(eq=False)
class FactorSums(Sink):
    """Sum the factors of all layers by their rules."""

    takes_example_gradients = True

    options: PassOptions
    in_training: bool = False
    rules: dict[TrackedLayer, Rule] = field(default_factory=dict)
    """Rules of the layers; they store the sums."""
    _diagonal: dict[str, Tensor] = field(default_factory=dict)

    def start(self, assignment: RuleAssignment, kfac_approx: KfacApprox) -> None:
        """Make the rules."""
        self.rules = make_rules(assignment, kfac_approx, self.options)
        names = [name for tracked in self.rules for name in tracked.parameters.values()]
        if len(set(names)) < len(names):
            tie(self.rules)
        self._diagonal = {}

    def input(self, tracked: TrackedLayer, use: Use) -> None:
        """Add a aᵀ of the rows to A."""
        self.rules[tracked].add_input(use)

    def gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Add b bᵀ of the rows to B."""
        self.rules[tracked].add_gradient(use, b)

    def vector_done(self) -> None:
        """Add sums that wait for other uses: of gradients, and at a first vector of inputs."""
        for rule in self.rules.values():
            for total in (*rule.A.values(), *rule.B.values()):
                if total.waiting is not None:
                    total.end()

    def example_gradients(self, name: str, g: Tensor) -> None:
        """Add the diagonal of a parameter's block."""
        self._diagonal[name] = self._diagonal.get(name, 0) + g.square().sum((0, 1))

    def needs_examples(self, tracked: TrackedLayer) -> bool:
        """Return whether positions are summed (reduce), or the rule needs example gradients."""
        rule = self.rules[tracked]
        return rule.mode != "expand" or rule.needs_examples

    def sums(self) -> tuple[dict[str, list[BlockSums]], dict[str, Tensor]]:
        """Return the sums of each layer by parameter name, and the diagonals."""
        by_name: dict[str, list[BlockSums]] = {}
        # A rule may hold as much memory again as its sums, so drop each before the next.
        while self.rules:
            tracked, rule = self.rules.popitem()
            for local, sums in rule.block_sums().items():
                of_slot = sums._replace(slot=tracked.slots.get(local, (0, 1)))
                by_name.setdefault(tracked.parameters[local], []).append(of_slot)
        diagonal, self._diagonal = self._diagonal, {}
        return by_name, diagonal


def make_rules(
    assignment: RuleAssignment, kfac_approx: KfacApprox, options: PassOptions
) -> dict[TrackedLayer, Rule]:
    """Make a rule with empty sums for each layer, in the mode of the layer's name.

    Packed tensors keep the whole factor over their rows, for any ``diagonal_above``.
    """
    modes = modes_of_layers(kfac_approx, [tracked.name for tracked in assignment.layers])
    return {
        tracked: tracked.rule(
            tracked.layer,
            modes.get(tracked.name, "expand"),
            tracked.parameters,
            None if tracked.slots else options.diagonal_above,
            options.expand_scaling,
        )
        for tracked in assignment.all
    }


def assemble_blocks(model: nn.Module, sums: PassSums) -> dict[str, KroneckerBlock]:
    """Return the blocks by parameter name, in the model's order. The sums are changed in place.

    A becomes a mean over its terms, or a sum divided by the number of examples (`expand_scaling`).
    """
    blocks, packed = {}, dict[Any, Factor]()
    for name, uses in sums.blocks.items():
        # Uses that never ran keep their zero, by which `nearest_kronecker` leaves them out.
        for i, use in enumerate(uses):
            if use.per_example and use.num_terms:
                uses[i] = use._replace(num_terms=sums.num_data)
        if len(uses) > 1 and uses[0].slot[1] > 1:
            blocks[name] = _packed(name, uses, packed)
            continue
        # In place, because a second copy of all input factors would be the peak of the pass's
        # memory.
        of_uses = [
            KroneckerBlock(name, use.B)
            if use.A is None
            else KroneckerBlock(name, use.B, use.A.divide_(max(use.num_terms, 1)), use.num_terms)
            for use in uses
        ]
        blocks[name] = of_uses[0] if len(of_uses) == 1 else nearest_kronecker(of_uses)
    blocks |= {name: KroneckerBlock(name, d.reshape(-1, 1, 1)) for name, d in sums.others.items()}
    # Take the names from the blocks, not from this rank's assignment: a rank without data has made
    # no proof, and the other ranks may have given up parameters.
    shapes = {name: p.shape for name, p in model.named_parameters() if name in blocks}
    for name, row in sums.padding.items():
        if name in blocks:
            size = shapes[name][1:].numel()
            constants = row * size, (row + 1) * size
            blocks[name] = blocks[name].replace(constants=constants)
    return {name: blocks[name] for name in shapes}


def tie(rules: Mapping[TrackedLayer, Rule]) -> None:
    """Let layers that share a tensor add to the same sums if they use it in the same way.

    Uses of one kind share a sum, because an example's gradient is the sum over all uses. Uses of a
    weight in two orientations, or in two modes, get two sums, which `nearest_kronecker` combines.
    Other mixtures have no common block and raise an error.
    """
    first: dict[tuple, tuple[Rule, str]] = {}  # the layer whose sums the others share
    uses: dict[str, dict[Any, dict[tuple, TrackedLayer]]] = {}  # parameter -> slot -> kind of use
    # Step 1: the first use of each kind keeps the sums, and later uses of that kind add to them.
    for tracked, rule in rules.items():
        for local, name in tracked.parameters.items():
            slot, kind = tracked.slots.get(local), _kind(rule, local)
            other, others_local = first.setdefault((name, slot, kind), (rule, local))
            if other is not rule or others_local != local:
                rule.share(local, other, others_local)
            uses.setdefault(name, {}).setdefault(slot, {})[kind] = tracked
    # Step 2: refuse uses without a common block, before any data is read.
    for name, slots in uses.items():
        # The tensor is used both whole and in slots, or in ways other than orientations or modes of
        # one weight.
        whole_and_in_slots = None in slots and len(slots) > 1
        in_several_ways = any(len(kinds) > 1 for kinds in slots.values())
        of_one_weight = len(slots) == 1 and all(
            kind[0] == "weight" for kinds in slots.values() for kind in kinds
        )
        if whole_and_in_slots or (in_several_ways and not of_one_weight):
            layers = dict.fromkeys(str(t) for kinds in slots.values() for t in kinds.values())
            raise NotImplementedError(
                f"Parameter '{name}' is used in different ways by {' and '.join(layers)}. These "
                "uses have no common block. Use separate tensors, or freeze it "
                "(requires_grad_(False))."
            )


def _kind(rule: Rule, local: str) -> tuple:
    """Return a description of how a rule uses a parameter. Equal descriptions can share sums."""
    if isinstance(rule, WeightSharingRule):
        if local == "bias":
            return ("bias", rule.mode)
        return ("weight", rule.transposed, rule.groups, rule.mode)
    if isinstance(rule, ExactRule):
        return ("exact",)
    return (type(rule), local)


def _packed(name: str, of_slots: list[BlockSums], packed: dict[Any, Factor]) -> KroneckerBlock:
    """Return the blocks of several maps as the groups of the tensor that contains them.

    ``packed`` collects the Bs of all parameters: weights and biases share one.
    """
    sums = sorted(of_slots, key=lambda of_slot: of_slot.slot[0])
    assert [of_slot.slot[0] for of_slot in sums] == list(range(sums[0].slot[1]))
    # Each map becomes a group with its own terms, because keys may be more than queries.
    Bs = tuple(s.B for s in sums)
    if Bs not in packed:
        packed[Bs] = Factor.concatenated(Bs)
    B = packed[Bs]
    inputs = [s.A.divide_(max(s.num_terms, 1)) for s in sums if s.A is not None]
    if not inputs:
        return KroneckerBlock(name, B)
    A = Factor.concatenated(inputs)
    return KroneckerBlock(name, B, A, tuple(s.num_terms for s in sums))


LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with a container's memory limit (cgroup v2 and v1)."""
LARGE = 8192
"""Number of rows above which an error message calls a weight large."""


def total_memory(device: torch.device) -> int | None:
    """Return the memory of a GPU, machine or container in bytes; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():  # not "max"
            total = min(total, int(text))
    return total


def check_memory(assignment: RuleAssignment, options: PassOptions, device: torch.device) -> None:
    """Raise an OutOfMemoryError unless the factors fit into memory, and the largest's eigenvalues.

    The estimate is Σ d² entries for all factors, plus two copies of the largest in float64 for its
    eigenvalues. It does not count the memory of other programs.
    """
    # With "auto" the mode is not known yet. Factors have the same size in both modes, except for
    # embeddings.
    auto = options.kfac_approx == "auto"
    rules = make_rules(assignment, "expand" if auto else options.kfac_approx, options)
    memory = total_memory(device)
    names: dict[Gram, str] = {}  # a weight and its bias may share one
    for tracked, rule in rules.items():
        for letter, sums in (("B", rule.B), ("A", rule.A)):
            for local, of_name in sums.items():
                names.setdefault(of_name.gram, f"{letter} of '{tracked.parameters[local]}'")
    if memory is None or not names:
        return
    grams: dict[str, Gram] = {}
    for gram, name in names.items():  # the largest of the layers that share a tensor
        if name not in grams or gram.nbytes > grams[name].nbytes:
            grams[name] = gram
    total = sum(gram.nbytes for gram in grams.values())
    largest = max(grams, key=lambda name: grams[name].nbytes)
    gram = grams[largest]
    eigenvalues = 2 * 8 * gram.groups * gram.size**2
    if total + eigenvalues <= memory:
        return
    GiB = 2**30
    raise torch.OutOfMemoryError(
        f"The factors need {total / GiB:.1f} GiB, and the eigenvalues of the largest factor need "
        f"another {eigenvalues / GiB:.1f} GiB. {device} has {memory / GiB:.1f} GiB. The largest "
        f"factor is {largest} ({gram.size}×{gram.size}, {gram.nbytes / GiB:.1f} GiB). Keep only "
        "the diagonal of the factors over the rows of large weights "
        f"(diagonal_above={min(LARGE, gram.size - 1)}), or freeze the layer "
        "(requires_grad_(False))."
    )
