"""Layers that run once for all examples, as an embedding of positions does that all share.

Their outputs are broadcast: a copy for each example changes nothing, and has its gradient.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.batches import examples
from kfac_backend.calls import call_with, num_examples
from kfac_backend.capture import Capture, first_input
from kfac_backend.comparison import close
from kfac_backend.coverage import Coverage
from kfac_backend.memory import is_out_of_memory
from kfac_backend.rows import current_rows

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
        rows = current_rows()
        # Rows whose examples are told may be as many by chance.
        told = rows is not None and not rows.of_positions
        shape = None if told else first_input(args, kwargs).shape
        shapes.setdefault(layer, []).append(shape)

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            call_with(model, {}, examples(x, torch.tensor([0])))
            of_one, shapes = shapes, {}
            call_with(model, {}, examples(x, torch.tensor([0, 0])))
    except Exception as error:  # the whole batch will show it, if it is wrong, too
        if is_out_of_memory(error):
            raise
        return coverage
    finally:
        for handle in handles:
            handle.remove()
    broadcast = frozenset(
        layer for layer, seen in of_one.items() if None not in seen and seen == shapes.get(layer)
    )
    if not broadcast:
        return coverage
    found = replace(coverage, broadcast=broadcast)
    _verify(model, found, x)
    return found


def _verify(model: nn.Module, coverage: Coverage, x: Any) -> None:
    """Prove that a copy of their outputs for each example changes no output of the model."""
    names = [str(tracked) for tracked in coverage.layers if tracked.layer in coverage.broadcast]
    error: Exception | None = None
    same = False
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        f = call_with(model, {}, x)
        torch.set_rng_state(state)
        with Capture(model, coverage, lambda *_: None, lambda *_: None) as capture:
            try:
                g = capture.forward(x)
                same = not isinstance(f, Tensor) or close(f.detach(), g.detach())
            except (RuntimeError, IndexError, ValueError) as raised:
                if is_out_of_memory(raised) or isinstance(raised, NotImplementedError):
                    raise
                error = raised
    if not same:
        raise NotImplementedError(
            f"{' and '.join(names)} has the same input for all examples, and its output cannot be "
            "given to each, (N, ...): the model's output would be another, so that the rows of "
            "different examples mix. Give it a batch axis (N, ...), or freeze it "
            "(requires_grad_(False))."
        ) from error
