"""backward_precision="auto": whether the backward passes of a long pass take a faster precision.

A trial on a few examples decides: each layer's B in full and in the faster precision.
"""

import logging
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfac_backend.engine.batches import detached, examples
from kfac_backend.engine.factor_sums import FactorSums, total_memory
from kfac_backend.engine.model_calls import forked_random_numbers, is_out_of_memory
from kfac_backend.precision import BackwardPrecision, full_float32

if TYPE_CHECKING:
    from kfac_backend.engine.driver import Driver

FASTER: dict[str, BackwardPrecision] = {"cuda": "tf32"}
"""The precision that is tried, by device. On a CPU bf16 makes errors of 3e-3 (B of WRN-16-4), and
is faster on few processors."""
LARGEST_ERROR = 1e-3
"""‖B − B_float32‖ / ‖B_float32‖ (Frobenius) of any factor up to which it is taken."""
EXAMPLES = 32
"""Examples on which it is tried."""

_logger = logging.getLogger(__name__)


def fitting_precision(driver: "Driver", x: Any, y: Any) -> BackwardPrecision:
    """The precision of the rest of a driver's pass, tried on some examples of a batch (x, y).

    The device's faster precision if every B is the same up to `LARGEST_ERROR`, or "float32".

    Raises:
        torch.OutOfMemoryError: a trial does not fit. What happens to be free must decide nothing.
    """
    device = driver.device
    # Other sinks, and passes that keep graphs, sum up no factors, by which a precision is judged.
    if not isinstance(driver.sink, FactorSums) or driver.sink.differentiable:
        return "float32"
    # A trial holds the factors twice more. Whether they fit is asked of the device's memory as a
    # whole: what happens to be free must not decide.
    memory = total_memory(device)
    rules = driver.sink.rules.values()
    grams = {sums.gram for rule in rules for sums in (*rule.A.values(), *rule.B.values())}
    if memory is not None and 3 * sum(gram.nbytes for gram in grams) > memory:
        return "float32"
    faster = FASTER.get(device.type)
    if faster is None:
        return "float32"
    try:
        exact, rounded = (_factors(driver, x, y, precision) for precision in ("float32", faster))
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


def _factors(
    driver: "Driver", x: Any, y: Any, precision: BackwardPrecision
) -> dict[str, list[Tensor]]:
    """Name -> the B of each use, of a few examples in a precision."""
    # The same examples each time, with the same labels if these are drawn. Only B is kept.
    x, y = detached(x, driver.device), detached(y, driver.device)
    y = driver.task.targets(driver.model, x, y)
    if driver.proof.plan.splits:
        x, y = examples(x, slice(EXAMPLES)), y[:EXAMPLES]
    trial = copy(driver)
    trial.generator = torch.Generator(driver.device).manual_seed(0)
    trial.start(copy(driver.sink))
    trial.arithmetic.precision = precision
    with full_float32(), forked_random_numbers(driver.model):
        trial.add_part(x, y, driver.task.mask(x))
    return {name: [use.B.matrix for use in uses] for name, uses in trial.sink.sums()[0].items()}
