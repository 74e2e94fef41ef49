"""`FactorSums`: the sums of the factors, from the layers' rules to the parameters' blocks.

Most parameters belong to one layer, and their block is that layer's B ⊗ A. This module handles the
others: tensors that several layers share (tied), tensors that hold several maps (packed, as
attention's ``in_proj_weight``), and tensors that are used in two ways, such as a language model's
embedding that is also its output layer.

After the sum over ranks `assemble_blocks` makes blocks of the sums. Before the first batch
`check_memory` asks whether the factors fit into memory.
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
    """Sums up the factors of all layers, by their rules.

    Args:
        options: of the pass.
        in_training: see `Sink.in_training`.
    """

    takes_example_gradients = True

    options: PassOptions
    in_training: bool = False
    rules: dict[TrackedLayer, Rule] = field(default_factory=dict)
    """The layers' rules, which hold the sums."""
    _diagonal: dict[str, Tensor] = field(default_factory=dict)

    def start(self, assignment: RuleAssignment, kfac_approx: KfacApprox) -> None:
        """Make the rules."""
        self.rules = make_rules(assignment, kfac_approx, self.options)
        names = [name for tracked in self.rules for name in tracked.parameters.values()]
        if len(set(names)) < len(names):
            tie(self.rules)
        self._diagonal = {}

    def input(self, tracked: TrackedLayer, use: Use) -> None:
        """Add a aᵀ of its rows to A."""
        self.rules[tracked].add_input(use)

    def gradient(self, tracked: TrackedLayer, use: Use, b: Tensor) -> None:
        """Add b bᵀ of its rows to B."""
        self.rules[tracked].add_gradient(use, b)

    def vector_done(self) -> None:
        """Add the sums that waited for other uses: of gradients, at a first vector of inputs."""
        for rule in self.rules.values():
            for total in (*rule.A.values(), *rule.B.values()):
                if total.waiting is not None:
                    total.end()

    def example_gradients(self, name: str, g: Tensor) -> None:
        """Add the diagonal of a parameter's block."""
        self._diagonal[name] = self._diagonal.get(name, 0) + g.square().sum((0, 1))

    def needs_examples(self, tracked: TrackedLayer) -> bool:
        """Where positions are summed (reduce), or an example's gradient is formed in any mode."""
        rule = self.rules[tracked]
        return rule.mode != "expand" or rule.needs_examples

    def sums(self) -> tuple[dict[str, list[BlockSums]], dict[str, Tensor]]:
        """The sums of each layer by its parameters' names, and of diagonals."""
        by_name: dict[str, list[BlockSums]] = {}
        # A rule may hold as much again as its sums, so each is dropped before the next one's are
        # made.
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
    """A rule for each layer in the mode of its name, with empty sums of its own.

    Packed tensors keep the factor over their rows whole, whatever ``diagonal_above`` is.

    Raises:
        ValueError: a layer that no pattern of ``kfac_approx`` fits, a pattern that fits no layer.
        NotImplementedError: a large embedding under reduce.
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
    """Parameter name -> block, in the model's order; the sums become the blocks in place.

    A is a mean over its terms, or a sum divided by the number of examples (`expand_scaling`).
    """
    blocks, packed = {}, dict[Any, Factor]()
    for name, uses in sums.blocks.items():
        # Uses that never ran keep their zero, by which `nearest_kronecker` leaves them out.
        uses = [
            use._replace(num_terms=sums.num_data) if use.per_example and use.num_terms else use
            for use in uses
        ]
        if len(uses) > 1 and uses[0].slot[1] > 1:
            blocks[name] = _packed(name, uses, packed)
            continue
        # In place: a second copy of all input factors would be the peak of the pass's memory.
        of_uses = [
            KroneckerBlock(name, use.B)
            if use.A is None
            else KroneckerBlock(name, use.B, use.A.divide_(max(use.num_terms, 1)), use.num_terms)
            for use in uses
        ]
        blocks[name] = of_uses[0] if len(of_uses) == 1 else nearest_kronecker(of_uses)
    blocks |= {name: KroneckerBlock(name, d.reshape(-1, 1, 1)) for name, d in sums.others.items()}
    # The names are those of the blocks, not of this rank's assignment: a rank without data has
    # made no proof, and the other ranks may have given parameters up.
    shapes = {name: p.shape for name, p in model.named_parameters() if name in blocks}
    for name, row in sums.padding.items():
        if name in blocks:
            size = shapes[name][1:].numel()
            constants = row * size, (row + 1) * size
            blocks[name] = blocks[name].replace(constants=constants)
    return {name: blocks[name] for name in shapes}


def tie(rules: Mapping[TrackedLayer, Rule]) -> None:
    """Let layers that share a tensor add to the same sums, where they use it in the same way.

    Uses of one kind are one sum: an example's gradient is the sum over all of them. Uses of a
    weight in two orientations, or in two modes, get two sums, which `nearest_kronecker` joins. Any
    other mixture has no common block.

    Raises:
        NotImplementedError: such a mixture.
    """
    first: dict[tuple, tuple[Rule, str]] = {}  # the layer whose sums the others share
    uses: dict[str, dict[Any, dict[tuple, TrackedLayer]]] = {}  # parameter -> slot -> kind of use
    # Step 1: the first use of each kind keeps the sums, later ones of that kind add to them.
    for tracked, rule in rules.items():
        for local, name in tracked.parameters.items():
            slot, kind = tracked.slots.get(local), _kind(rule, local)
            other, others_local = first.setdefault((name, slot, kind), (rule, local))
            if other is not rule or others_local != local:
                rule.share(local, other, others_local)
            uses.setdefault(name, {}).setdefault(slot, {})[kind] = tracked
    # Step 2: refuse what has no common block, before any data is read.
    for name, slots in uses.items():
        # Used both whole and in slots, or in several ways that are no orientations or modes of one
        # weight.
        whole_and_in_slots = None in slots and len(slots) > 1
        in_several_ways = any(len(kinds) > 1 for kinds in slots.values())
        of_one_weight = len(slots) == 1 and all(
            kind[0] == "weight" for kinds in slots.values() for kind in kinds
        )
        if whole_and_in_slots or (in_several_ways and not of_one_weight):
            layers = dict.fromkeys(str(t) for kinds in slots.values() for t in kinds.values())
            raise NotImplementedError(
                f"Parameter '{name}' is used in different ways by {' and '.join(layers)}, "
                "which have no common block. Use separate tensors, or freeze it "
                "(requires_grad_(False))."
            )


def _kind(rule: Rule, local: str) -> tuple:
    """A description of how a rule uses a parameter; equal descriptions can share sums."""
    if isinstance(rule, WeightSharingRule):
        if local == "bias":
            return ("bias", rule.mode)
        return ("weight", rule.transposed, rule.groups, rule.mode)
    if isinstance(rule, ExactRule):
        return ("exact",)
    return (type(rule), local)


def _packed(name: str, of_slots: list[BlockSums], packed: dict[Any, Factor]) -> KroneckerBlock:
    """The blocks of several maps as the groups of the tensor that holds them.

    ``packed`` has the Bs of other parameters so far: weights and biases share one.
    """
    sums = sorted(of_slots, key=lambda of_slot: of_slot.slot[0])
    assert [of_slot.slot[0] for of_slot in sums] == list(range(sums[0].slot[1]))
    # Each map becomes a group with terms of its own, since keys may be more than queries.
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
"""Rows above which an error message calls a weight large."""


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory of a GPU, or of the machine or container; None where that is unknown."""
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
    """Raise an error unless the factors fit into memory, and the largest can be decomposed there.

    The estimate is Σ d² entries for all factors, plus two copies of the largest in float64 for its
    eigenvalues. Memory that other programs take is unknown and not counted.

    Raises:
        torch.OutOfMemoryError: they do not fit; it names the largest factor and the ways out.
        ValueError: a mode for layers that the model does not have.
    """
    # With "auto" the mode is not known yet; except those of embeddings, factors have the same size
    # in both modes.
    auto = options.kfac_approx == "auto"
    rules = make_rules(assignment, "expand" if auto else options.kfac_approx, options)
    memory = total_memory(device)
    names: dict[Gram, str] = {}  # a weight and its bias may have the same
    for tracked, rule in rules.items():
        for letter, sums in (("B", rule.B), ("A", rule.A)):
            for local, of_name in sums.items():
                names.setdefault(of_name.gram, f"{letter} of '{tracked.parameters[local]}'")
    if memory is None or not names:
        return
    grams: dict[str, Gram] = {}
    for gram, name in names.items():  # of layers that share a tensor, the largest
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
        f"The factors would take {total / GiB:.1f} GiB, {largest} ({gram.size}×{gram.size}) alone "
        f"{gram.nbytes / GiB:.1f} GiB, and its eigenvalues {eigenvalues / GiB:.1f} GiB more "
        f"while they are computed; {device} has {memory / GiB:.1f} GiB. Keep the factors over the "
        f"rows of large weights by their diagonal (diagonal_above={min(LARGE, gram.size - 1)}), or "
        "freeze the layer (requires_grad_(False))."
    )
