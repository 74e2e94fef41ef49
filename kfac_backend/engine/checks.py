"""What is refused of models, outputs and inputs: errors that say why, and what to do."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kfac_backend.likelihoods import Likelihood, Weighted
from kfac_backend.precision import at_least_float32
from kfac_backend.sharding import check_sharding, local_part


def check_module(model: object) -> None:
    """Raise an error unless this is a module that runs as Python, whole or under fully_shard.

    Raises:
        TypeError: not a module, or one that contains a wrapper for several devices.
        ValueError: parameters on the meta device, which have no values.
        NotImplementedError: parameters that are spread over ranks by other means than fully_shard.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"The model is {model!r:.80}, of type {type(model).__name__}; a torch.nn.Module is "
            "needed."
        )
    for name, module in model.named_modules():
        which = f"Layer '{name}'" if name else "The model"
        inner = f"{f'model.{name}' if name else 'model'}.module"
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"{which} is in {type(module).__name__}, whose copies or gradients a curvature "
                f"pass cannot use. Pass what it holds: {inner}. The curvature's sums are reduced "
                "over the ranks all the same."
            )
        if isinstance(module, torch.jit.ScriptModule) and any(
            p.requires_grad for p in module.parameters()
        ):
            raise NotImplementedError(
                f"{which} was compiled by torch.jit, which takes no hooks. Pass the module that it "
                "was made from, or freeze it (requires_grad_(False))."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"Parameter '{name}' is on the meta device and has no values. Move the model to a "
                "device (model.to_empty), and load its weights."
            )
    check_sharding(model)


def check_batch_norm(model: nn.Module, way_out: str = "") -> None:
    """Raise a ValueError if a BatchNorm of the model mixes the examples of a batch.

    The error names ``way_out`` beside eval mode.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if module.training:
            raise ValueError(
                f"Layer '{name}' ({type(module).__name__}) is in train mode, where it mixes the "
                "examples of a batch and the exact GGN is not defined. Call model.eval() first"
                f"{f', or {way_out}' if way_out else ''}."
            )
        if module.running_mean is None:
            raise ValueError(
                f"Layer '{name}' ({type(module).__name__}) keeps no running statistics, so that it "
                "mixes the examples of a batch in eval mode, too. Use track_running_stats=True."
            )


def check_output(output: object) -> None:
    """Raise a TypeError unless a model's output is a tensor of real numbers."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"The model returned {type(output).__name__}; a tensor of outputs (N, ..., C) is "
            "needed. Wrap it in a module that returns its logits alone."
        )
    if output.is_complex():
        raise TypeError(
            f"The model's output is complex ({output.dtype}), and likelihoods are of real outputs. "
            "Return real and imaginary parts as outputs: torch.view_as_real(f).flatten(-2)."
        )


def check_dtypes(model: nn.Module, arguments: Iterable[Any], error: Exception) -> None:
    """Raise a TypeError if a model's error is that inputs are in another dtype than parameters.

    Whether a model converts its inputs shows only when it runs.
    """
    words = "dtype", "scalar type", "Input type", "must have the type", "not implemented for"
    parameters = {p.dtype for p in model.parameters() if p.is_floating_point()}
    tensors = [t for x in arguments for t in (x.values() if isinstance(x, Mapping) else [x])]
    dtypes = {t.dtype for t in tensors if isinstance(t, Tensor)}
    # Beside numbers there may be tokens or masks; without any, one of these should be numbers.
    wrong = {dtype for dtype in dtypes if dtype.is_floating_point} - parameters
    wrong = wrong or (dtypes if not dtypes & parameters else set())
    if len(parameters) != 1 or not wrong or not any(said in str(error) for said in words):
        return
    (of_network,) = parameters
    names = " and ".join(sorted(map(str, wrong)))
    raise TypeError(
        f"The inputs have dtype {names} and the network's parameters {of_network}, which do not go "
        f"together here ({str(error).splitlines()[0]}). Convert the data: x.to({of_network}), and "
        "images in uint8 by x.float() / 255; or convert the network (model.double(), model.half())."
    ) from error


def check_finite(model: nn.Module, f: Tensor, x: Any) -> None:
    """Raise a ValueError that names what has NaN or infinity, if the outputs f have any."""
    # The sum is tested first, which takes a fifth of the time of testing each entry. If all entries
    # are finite it may still overflow, and then each entry is tested.
    if torch.isfinite(f.sum()) or torch.isfinite(f).all():
        return
    check_inputs(x)
    raise not_finite(model)


def not_finite(model: nn.Module) -> ValueError:
    """The error for outputs with NaN or infinity at inputs without."""
    for name, p in model.named_parameters():
        if not torch.isfinite(local_part(p)).all():  # each rank may call this alone
            return ValueError(
                f"Parameter '{name}' contains NaN or infinity; training has diverged. "
                "Go back to an earlier state, with a smaller learning rate."
            )
    return ValueError(
        "The model's output contains NaN or infinity though its parameters and inputs are "
        "finite; activations overflow. Normalise the inputs, or use float32 or float64."
    )


MOST_ROWS = 64
"""Rows of outputs that are enough to know that all are probabilities."""
FEWEST_OUTPUTS = 32
"""Outputs below which values in [0, 1] alone say nothing: an untrained network has such logits."""


def warn_of_probabilities(f: Tensor, likelihood: Likelihood) -> bool:
    """Warn of outputs that are probabilities already, where the likelihood takes logits.

    Those of classes lie in [0, 1] and sum to 1, which logits do not by chance. Those of Bernoulli
    outputs all lie in [0, 1]. Logits of an untrained network often do, too, close to each other: so
    a sigmoid must have made the outputs, or they must differ by more than a half.

    Returns:
        Whether there were enough outputs to tell, so that no more need to be looked at.
    """
    name = (likelihood.of if isinstance(likelihood, Weighted) else likelihood).name
    if name in ("classification", "noisy_classification"):
        rows = at_least_float32(f.detach().flatten(0, -2)[:MOST_ROWS])
        tolerance = max(1e-4, torch.finfo(f.dtype).eps)
        if len(rows) < 2:
            return False
        if ((rows >= 0).all(-1) & ((rows.sum(-1) - 1).abs() < tolerance)).all():
            warnings.warn(
                "The model's outputs are probabilities: each row lies in [0, 1] and sums to 1. "
                f"Likelihood '{likelihood}' takes logits. Return these, without the softmax (or "
                "the logarithm of its result).",
                stacklevel=2,
            )
    if name == "bernoulli":
        is_sigmoid = _is_made_by_sigmoid(f)
        if f.numel() < FEWEST_OUTPUTS and not is_sigmoid:
            return False
        smallest, largest = torch.aminmax(f.detach())
        if smallest >= 0 and largest <= 1 and (is_sigmoid or largest - smallest > 0.5):
            warnings.warn(
                "The model's outputs are probabilities: all lie in [0, 1]. Likelihood "
                f"'{likelihood}' takes logits. Return these, without the sigmoid (or torch.logit "
                "of its result).",
                stacklevel=2,
            )
    return True


def _is_made_by_sigmoid(f: Tensor) -> bool:
    """Whether a sigmoid or softmax made the outputs, but for operations that only move numbers."""
    node: Any = f.grad_fn
    while node is not None:
        if any(name in node.name().lower() for name in ("sigmoid", "softmax")):
            return True
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return False


def check_inputs(x: Any) -> None:
    """Raise a ValueError if the inputs have NaN or infinity; a mapping's masks may have −∞."""
    if any(not torch.isfinite(value).all() for value in numbers_of(x)):
        raise ValueError(INPUTS_NOT_FINITE)


class LateChecks:
    """Checks of batches that are made on the device now, and read when there is time to wait.

    Reading waits for all that the device has to do. So it happens after the first, second, fourth,
    eighth batch, ..., and at the end of a pass. What is wrong is found before the pass has taken
    twice as long as it needed to meet it.
    """

    def __init__(self, device: torch.device) -> None:
        # The smallest and largest number of inputs and outputs; NaN spreads to both.
        self._extremes = torch.zeros(4, dtype=torch.float64, device=device)
        self._targets: list[tuple[torch.Size, Tensor]] = []
        self._forms: set[Any] = set()  # shapes and dtypes of which targets were checked
        self._number = 0  # batches so far

    def is_time(self) -> bool:
        """Count a batch; whether it is one after which to read."""
        self._number += 1
        return not self._number & (self._number - 1)

    def see(self, x: Any, f: Tensor, y: Tensor) -> bool:
        """Remember a part of a batch; False if its form is new, so that it must be checked now."""
        form = f.shape[1:], y.shape[1:], y.dtype, f.shape[:1] == y.shape[:1]
        if form not in self._forms:
            self._forms.add(form)
            return False
        for i, tensors in ((0, numbers_of(x)), (2, [f.detach()])):
            for values in tensors:
                if values.numel():
                    smallest, largest = torch.aminmax(values)
                    torch.minimum(self._extremes[i], smallest, out=self._extremes[i])
                    torch.maximum(self._extremes[i + 1], largest, out=self._extremes[i + 1])
        self._targets.append((f.shape, y.clone()))  # a copy: a loader may use its memory again
        return True

    def read(self, model: nn.Module, check: Callable[[Tensor, Tensor], None]) -> None:
        """Raise the error of a part that was seen, if any.

        ``check`` raises an error unless targets fit outputs, whose shape alone counts.
        """
        targets, self._targets = self._targets, []
        if not targets:
            return
        of_inputs, of_outputs = self._extremes.view(2, 2).isfinite().all(1).tolist()
        if not of_inputs:
            raise ValueError(INPUTS_NOT_FINITE)
        for shape, y in targets:
            check(torch.empty(shape, device="meta"), y)
        if not of_outputs:
            raise not_finite(model)


def numbers_of(x: Any) -> Iterator[Tensor]:
    """The tensors of an input that must be finite."""
    for key, value in x.items() if isinstance(x, Mapping) else [("", x)]:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            # Masks that are added to the scores of attention hide positions by −∞.
            value = torch.view_as_real(value) if value.is_complex() else value
            yield value.masked_fill(value == -torch.inf, 0) if "mask" in str(key) else value


INPUTS_NOT_FINITE = "The inputs contain NaN or infinity; clean the data."
