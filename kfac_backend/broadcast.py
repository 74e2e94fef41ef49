"""Layers that run once for all examples, as an embedding of positions does that all share.

Their outputs are broadcast: a copy for each example changes nothing, and has its gradient.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.batches import examples
from kfac_backend.calls import call_with, explicit_forwards, forked_random_numbers, num_examples
from kfac_backend.capture import Capture, first_input
from kfac_backend.comparison import close
from kfac_backend.coverage import Coverage
from kfac_backend.memory import is_out_of_memory
from kfac_backend.rows import SharedAxes, current_rows
from kfac_backend.verification import verify_independence

__all__ = ["with_broadcast_layers"]


def with_broadcast_layers(model: nn.Module, coverage: Coverage, x: Any) -> Coverage:
    """The coverage, knowing the layers whose inputs have one shape for one example and for two.

    Args:
        model: the model.
        coverage: its tracked layers.
        x: one example or more; nothing is told from an input whose examples cannot be taken apart.

    Raises:
        NotImplementedError: outputs that the model does not broadcast.
    """
    if not num_examples(x):
        return coverage
    layers = {tracked.layer for tracked in coverage.layers}
    shapes: dict[nn.Module, list[torch.Size | None]] = {}

    def record(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        rows, shape = current_rows(), first_input(args, kwargs).shape
        # Rows whose examples are told, or none at all, may be as many by chance.
        told = rows is not None and not rows.of_positions
        shapes.setdefault(layer, []).append(None if told or not shape.numel() else shape)

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad(), forked_random_numbers(model):
            call_with(model, {}, examples(x, torch.tensor([0])))
            of_one, shapes = shapes, {}
            twins = examples(x, torch.tensor([0, 0]))
            call_with(model, {}, twins)
    except Exception as error:  # the whole batch will show it, if it is wrong, too
        if is_out_of_memory(error):
            raise
        return coverage
    finally:
        for handle in handles:
            handle.remove()
    found = {
        layer: seen[0]
        for layer, seen in of_one.items()
        if None not in seen and seen == shapes.get(layer) and seen[0] is not None
    }
    if not found:
        return coverage
    # A first axis of one entry may be that of the examples, or one of positions, of which there is
    # just one here.
    for first in (True, False):
        axes = {
            layer: SharedAxes(first and len(shape) > 0 and shape[0] == 1, len(shape))
            for layer, shape in found.items()
        }
        known = replace(coverage, broadcast=axes)
        error = _wrong(model, known, twins)
        if error is None:
            return known
    names = [str(tracked) for tracked in coverage.layers if tracked.layer in found]
    raise NotImplementedError(
        f"{' and '.join(names)} has the same input for all examples, and its output cannot be "
        "given to each, (N, ...): the model's output would be another, or rows of different "
        "examples mix (dropout on what all share does that, too). Give it a batch axis (N, ...), "
        "or freeze it (requires_grad_(False))."
    ) from error


def _wrong(model: nn.Module, coverage: Coverage, twins: Any) -> Exception | None:
    """Why copies of outputs for each example are something else; None if they are not."""
    try:
        with explicit_forwards(coverage), forked_random_numbers(model):
            f = call_with(model, {}, twins)
        with (
            Capture(model, coverage, lambda *_: None, lambda *_: None) as capture,
            forked_random_numbers(model),
        ):
            g = capture.forward(twins)
        if isinstance(f, Tensor) and not close(f.detach(), g.detach()):
            return ValueError("The model's output is another one.")
        with forked_random_numbers(model):
            verify_independence(model, coverage, twins)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error
    return None
