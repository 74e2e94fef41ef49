"""From a model's layers to its rules, and from the rules' sums to the parameters' blocks.

Mostly a parameter belongs to one layer, and its block is that layer's B ⊗ A. The rest is here:
tensors that several layers share (tied), tensors that hold several maps (packed, as attention's
``in_proj_weight``), and tensors that are used in two ways.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_backend.blocks.block import KroneckerBlock
from kfac_backend.blocks.nearest_kronecker import nearest_kronecker
from kfac_backend.blocks.sketch import Factor, SketchedFactor, whole
from kfac_backend.layers import ExactRule, Rule, WeightSharingRule
from kfac_backend.layers.gram.gram import mirror_upper_half_
from kfac_backend.layers.uses import BlockSums
from kfac_backend.model.memory import total_memory
from kfac_backend.model.rule_assignment import RuleAssignment, TrackedLayer
from kfac_backend.options import Approximation, PassOptions
from kfac_backend.precision import at_least_float32

__all__ = ["Part", "assemble_blocks", "check_memory", "collect_sums", "make_rules"]

LARGE = 8192
"""Rows of a large weight, in words of advice."""


class Part(NamedTuple):
    """One layer's sums of a parameter, additive over the data."""

    slot: tuple[int, int]
    """Which of how many maps the parameter holds, (0, 1) for the only one."""
    sums: BlockSums


def make_rules(
    assignment: RuleAssignment,
    modes: Mapping[str, Approximation],
    options: PassOptions,
) -> dict[TrackedLayer, Rule]:
    """A rule for each layer, with empty sums; layers that share a tensor share its sums.

    Args:
        assignment: the layers.
        modes: each layer's mode, by its name.
        options: ``sketch_rank`` and ``diagonal_above`` count. Tensors that are tied or packed are
            not sketched, since their blocks are put together from several; packed ones keep the
            factor over their rows whole, too.

    Raises:
        NotImplementedError: a tensor that layers share in ways that have no common block; a large
            embedding under reduce.
    """
    rules = _separate_rules(assignment, modes, options)
    _tie(rules)
    return rules


def _separate_rules(
    assignment: RuleAssignment,
    modes: Mapping[str, Approximation],
    options: PassOptions,
) -> dict[TrackedLayer, Rule]:
    """`make_rules` with sums for each layer of its own."""
    rules: dict[TrackedLayer, Rule] = {
        tracked: tracked.rule(tracked.layer, modes.get(tracked.name, "expand"), tracked.parameters)
        for tracked in assignment.all
    }
    if options.sketch_rank is not None:
        number = Counter(name for tracked in rules for name in tracked.parameters.values())
        for tracked, rule in rules.items():
            alone = all(number[name] == 1 for name in tracked.parameters.values())
            if alone and not tracked.slots:
                rule.use_sketches(options.sketch_rank)
    for tracked, rule in rules.items():
        rule.use_diagonals(None if tracked.slots else options.diagonal_above)
    return rules


def check_memory(
    assignment: RuleAssignment,
    modes: Mapping[str, Approximation],
    options: PassOptions,
    device: torch.device,
) -> None:
    """Raise an error unless the factors and the largest's eigenvalues can fit into the memory.

    Σ d² entries of all factors are held, and two copies of the largest in float64 while its
    eigenvalues are computed. What other programs take is not known, and left out. Arguments as of
    `make_rules`.

    Raises:
        torch.OutOfMemoryError: naming the largest factor, its size, and the ways out.
    """
    memory = total_memory(device)
    if memory is None:
        return
    sizes: dict[str, tuple[int, int, int]] = {}  # of each factor: entries, d, bytes of an entry
    rules = _separate_rules(assignment, modes, options)
    for tracked, rule in rules.items():
        for (local, which), (G, d) in rule.factor_sizes().items():
            itemsize = at_least_float32(getattr(tracked.layer, local).detach()[:0]).element_size()
            name = f"{which} of '{tracked.parameters[local]}'"
            sizes[name] = max(sizes.get(name, (0, 0, 0)), (G * d * d, d, itemsize))
    if not sizes:
        return
    total = sum(entries * itemsize for entries, _, itemsize in sizes.values())
    largest = max(sizes, key=lambda name: sizes[name][0])
    entries, d, itemsize = sizes[largest]
    eigenvalues = 2 * 8 * entries
    if total + eigenvalues <= memory:
        return
    GiB = 2**30
    raise torch.OutOfMemoryError(
        f"The factors would take {total / GiB:.1f} GiB, {largest} ({d}×{d}) alone "
        f"{entries * itemsize / GiB:.1f} GiB, and its eigenvalues {eigenvalues / GiB:.1f} GiB more "
        f"for a while; {device} has {memory / GiB:.1f} GiB. Keep the factors over the rows of "
        f"large weights by their diagonal (diagonal_above={min(LARGE, d - 1)}), wide factors of "
        "weights that are not tied by r eigenvectors (sketch_rank=r), or freeze the layer "
        "(requires_grad_(False))."
    )


def collect_sums(rules: dict[TrackedLayer, Rule]) -> dict[str, list[Part]]:
    """Parameter name -> the sums of each layer that has it; ``rules`` is empty afterwards."""
    parts: dict[str, list[Part]] = {}
    while rules:  # one at a time, as what a rule holds may be as large as its sums
        tracked, rule = rules.popitem()
        for local, sums in rule.block_sums().items():
            part = Part(tracked.slots.get(local, (0, 1)), sums)
            parts.setdefault(tracked.parameters[local], []).append(part)
    return parts


def assemble_blocks(parts: Mapping[str, list[Part]]) -> dict[str, KroneckerBlock]:
    """Parameter name -> block, A a mean over its terms; the sums become the blocks in place."""
    blocks = {name: _block(name, of_name) for name, of_name in parts.items()}
    for block in blocks.values():
        for factor in (block.B, block.A):
            if isinstance(factor, Tensor):
                mirror_upper_half_(factor)
    return blocks


def _tie(rules: Mapping[TrackedLayer, Rule]) -> None:
    """Let layers that share a tensor sum up together, where both use it the same way."""
    first: dict[tuple, tuple[Rule, str]] = {}
    kinds: dict[tuple, dict[tuple, TrackedLayer]] = {}
    for tracked, rule in rules.items():
        for local, name in tracked.parameters.items():
            place = (name, tracked.slots.get(local))
            kind = _kind(rule, local)
            if (*place, kind) in first:
                other, others_local = first[*place, kind]
                rule.share(local, other, others_local)
            else:
                first[*place, kind] = rule, local
            kinds.setdefault(place, {})[kind] = tracked
    by_name: dict[str, list[tuple]] = {}
    for name, slot in kinds:
        by_name.setdefault(name, []).append((name, slot))
    for name, places in by_name.items():
        of_name = [kind for place in places for kind in kinds[place]]
        whole = any(slot is None for _, slot in places)
        if (whole and len(places) > 1) or (
            len(of_name) > len(places)
            and not (len(places) == 1 and all(kind[0] == "weight" for kind in of_name))
        ):
            layers = dict.fromkeys(str(t) for place in places for t in kinds[place].values())
            raise NotImplementedError(
                f"Parameter '{name}' is used in different ways by {' and '.join(layers)}, "
                "which have no common block. Use separate tensors, or freeze it "
                "(requires_grad_(False))."
            )


def _kind(rule: Rule, local: str) -> tuple:
    """Uses of one kind are one sum; those of a weight stored the other way round are another."""
    if isinstance(rule, WeightSharingRule):
        if local == "bias":
            return ("bias", rule.mode if isinstance(rule.mode, str) else tuple(rule.mode.items()))
        return ("weight", rule.transposed, rule.groups, str(rule.mode))
    if isinstance(rule, ExactRule):
        return ("exact",)
    return (type(rule), local)


def _block(name: str, parts: list[Part]) -> KroneckerBlock:
    """The block of a parameter: of all its slots, and of both ways that it is used in."""
    if len(parts) > 1 and parts[0].slot[1] > 1:
        return _packed(name, parts)
    blocks = [_one_block(name, part.sums) for part in parts]
    return blocks[0] if len(blocks) == 1 else nearest_kronecker(blocks)


def _one_block(name: str, sums: BlockSums) -> KroneckerBlock:
    B = _without_single_group(sums.B)
    if sums.A is None:
        return KroneckerBlock(name, B)
    terms = max(sums.num_terms, 1)
    if isinstance(sums.A, SketchedFactor):
        A = sums.A * (1 / terms)
    else:
        A = _without_single_group(sums.A.div_(terms))
    return KroneckerBlock(name, B, A, sums.num_terms)


def _packed(name: str, parts: list[Part]) -> KroneckerBlock:
    """Several maps' blocks as groups of one tensor."""
    ordered = sorted(parts, key=lambda part: part.slot[0])
    assert [part.slot[0] for part in ordered] == list(range(parts[0].slot[1]))
    sums = [part.sums for part in ordered]
    B = torch.cat([_whole(s.B, name) for s in sums])
    inputs = [_whole(s.A, name) / max(s.num_terms, 1) for s in sums if s.A is not None]
    if not inputs:
        return KroneckerBlock(name, B)
    return KroneckerBlock(name, B, torch.cat(inputs), tuple(s.num_terms for s in sums))


def _whole(factor: Factor, name: str) -> Tensor:
    return whole(factor, name, "A tensor that holds several maps")


def _without_single_group(factor: Factor) -> Factor:
    """(G, d, d), or (d, d) for one group, as a sketch is."""
    if isinstance(factor, SketchedFactor):
        return factor
    return factor[0] if len(factor) == 1 else factor
