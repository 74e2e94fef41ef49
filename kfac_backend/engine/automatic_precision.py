"""backward_precision="auto": whether the backward passes of a long pass take a faster precision.

A trial on a few examples decides: each layer's B in full and in the faster precision.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kfac_backend.engine.checks import is_out_of_memory
from kfac_backend.precision import BackwardPrecision

FASTER: dict[str, BackwardPrecision] = {"cuda": "tf32"}
"""The precision that is tried, by device. On a CPU bf16 makes errors of 3e-3 (B of WRN-16-4), and
is faster on few processors."""
LARGEST_ERROR = 1e-3
"""‖B − B_float32‖ / ‖B_float32‖ (Frobenius) of any factor up to which it is taken."""
EXAMPLES = 32
"""Examples on which it is tried."""

_logger = logging.getLogger(__name__)


def fitting_precision(
    device: torch.device,
    B_in: Callable[[BackwardPrecision], Mapping[str, Sequence[Tensor]]],
) -> BackwardPrecision:
    """The device's faster precision if every B is the same up to `LARGEST_ERROR`, or "float32".

    Args:
        device: of the pass.
        B_in: returns B of a few examples in a precision, name -> the B of each use.

    Raises:
        torch.OutOfMemoryError: a trial does not fit. What happens to be free must decide nothing.
    """
    faster = FASTER.get(device.type)
    if faster is None:
        return "float32"
    try:
        exact, rounded = B_in("float32"), B_in(faster)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            f"Out of memory on {device} where backward_precision='auto' tries "
            f"{faster!r}, which takes the factors' memory twice more. Choose one of "
            f"backward_precision='float32' and {faster!r}."
        ) from error
    errors = {
        name: max(
            float((low - B).norm() / B.norm())
            for low, B in zip(rounded[name], of_name, strict=True)
        )
        for name, of_name in exact.items()
        if all(B.any() for B in of_name)
    }
    if not errors:  # nothing to judge by
        return "float32"
    worst = max(errors, key=lambda name: errors[name])
    fits = errors[worst] <= LARGEST_ERROR
    _logger.info(
        "backward_precision='auto' takes %s: in %s, B of '%s' differs by %.2g (up to %g is taken)",
        faster if fits else "float32", faster, worst, errors[worst], LARGEST_ERROR,
    )  # fmt: skip
    return faster if fits else "float32"
