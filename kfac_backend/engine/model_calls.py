"""Calling a model with other parameters, and with layers split into parts that hooks can see.

Trials of calls tell whether two of them give the same, up to rounding (`close`), and how a model
takes batches (`try_batch`). Whatever happens meanwhile, an error or an interrupt, the model is
afterwards as it was before.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from kfac_backend.engine.batches import argument_names, arguments, copied, examples
from kfac_backend.engine.rule_assignment import RuleAssignment, UnexpectedRun
from kfac_backend.layers import LayerByParts
from kfac_backend.sharding import is_part, reshard, substituted, whole_parameters

T = TypeVar("T")


def state_restorer(*modules: nn.Module) -> Callable[[], None]:
    """A function that gives modules the modes, hooks, forwards and parameter objects they have now.

    For what is below these modules, too. It restores no values.
    """
    for root in modules:
        reshard(root)  # what FSDP has gathered is no parameter object of its own
    kinds = ("_forward_hooks", "_forward_pre_hooks")  # and what belongs to them
    before: list[tuple[dict, dict]] = []  # a dictionary, and its present entries
    for attributes in (vars(m) for root in modules for m in root.modules()):
        before.append(
            (
                attributes,
                {key: attributes[key] for key in ("training", "forward") if key in attributes},
            )
        )
        hooks = [value for key, value in attributes.items() if key.startswith(kinds)]
        # Not those of TorchScript's modules, which are no dictionaries and cannot change.
        entries = [d for d in (attributes.get("_parameters"), *hooks) if isinstance(d, dict)]
        before += [(d, d.copy()) for d in entries]

    def restore() -> None:
        for root in modules:
            reshard(root)
        for present, former in before:
            if "_parameters" in present:  # the module's own attributes
                present.pop("forward", None)
            else:
                present.clear()
            present.update(former)

    return restore


@contextmanager
def preserve_state(*modules: nn.Module) -> Iterator[None]:
    """A context after which modules are what they were before, see `state_restorer`."""
    restore = state_restorer(*modules)
    try:
        yield
    finally:
        restore()


def try_twice(trial: Callable[[], T]) -> T | Exception:
    """What a trial of a model returns, or the error by which the model refuses to run so.

    A model may be unable to run on fewer examples, or on tensors of other shapes, and fail in any
    way. It is then unable each time. So the trial is repeated after an error: one that does not
    come again says nothing about the model, and is raised as it is. So is exhausted memory. What
    happens to fail once must decide nothing.
    """
    try:
        return trial()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        try:
            trial()
        except Exception as again:
            if is_out_of_memory(again):
                raise
            return error
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    host = ("can't allocate memory", "not enough memory")  # in the words of Linux and of Windows
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in host)


def call_with(
    model: nn.Module, parameters: dict[str, Tensor], x: Any, labels: Tensor | None = None
) -> Any:
    """The model's output at x with these parameters, and its other parameters as constants.

    The model gets a copy of the input, which a forward may change in place. A mapping is the
    model's one argument, unless its forward names the mapping's keys, as models of Hugging Face do.
    Where the output has ``logits``, these are returned. Nothing is written into the model's own
    parameters. With ``labels`` the model gets these, too, and all that it returns is returned.

    Raises:
        TypeError: an output that is not a tensor of real numbers; inputs in another dtype than the
            parameters', which the model does not convert.
    """
    args, kwargs = ((x.clone(),), {}) if isinstance(x, Tensor) else arguments(model, copied(x))
    if labels is not None and args and isinstance(args[0], Mapping):
        args = ({**args[0], "labels": labels.clone()},)
    elif labels is not None:
        kwargs["labels"] = labels.clone()
    values: dict[int, Tensor] = {}  # of a parameter's id: what takes its place
    state: dict[str, Tensor] = {}
    whole = whole_parameters(model)  # empty unless the model is sharded
    # All parameters are given anew, so that nothing is written into the model, and under each of
    # their names. functional_call's own tie_weights visits a module with two names twice and leaves
    # it without its parameters afterwards (pytorch issue 164759).
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            p = whole.get(name, p)
            state[name] = values.setdefault(id(p), parameters.get(name, p.detach()))
        # Buffers that may change, such as running statistics, are copies.
        if module.training:
            buffers = module.named_buffers(prefix, recurse=False)
            state |= {name: buffer.clone() for name, buffer in buffers}
    # PyTorch's fused inference path would run a transformer's layers without hooks.
    mha = torch.backends.mha
    is_fused = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with uncompiled(), substituted(model, state) if whole else nullcontext():
            if whole:
                output = model(*args, **kwargs)
            else:
                output = torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if not isinstance(error, UnexpectedRun):
            explain(model, (*args, kwargs), error)
        raise
    finally:
        mha.set_fastpath_enabled(is_fused)
    if labels is None and (not isinstance(output, Tensor) or output.is_complex()):
        output = logits_of(output)
        check_output(output)
    return output


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


def explain(model: nn.Module, arguments: Sequence[Any], error: Exception) -> None:
    """Raise a TypeError if a model's error is that it does not take inputs such as these.

    These are a mapping that is one argument, and inputs in another dtype than the parameters, of
    which it shows only now whether the model converts them.
    """
    x = arguments[0]
    if isinstance(x, Mapping) and len(arguments) > 1 and type(x).__name__ in str(error):
        raise TypeError(
            f"{type(model).__name__} got a batch's mapping as its input, with the keys "
            f"{', '.join(map(str, x))}, and takes no {type(x).__name__}. Name the input's key "
            "by dict_key_x, as in dict_key_x='x'."
        ) from error
    words = "dtype", "scalar type", "Input type", "must have the type", "not implemented for"
    parameters = {p.dtype for p in model.parameters() if p.is_floating_point()}
    tensors = [t for x in arguments for t in (x.values() if isinstance(x, Mapping) else [x])]
    dtypes = {t.dtype for t in tensors if isinstance(t, Tensor)}
    # Beside numbers there may be tokens or masks; without any, one of these should be numbers.
    wrong = {dtype for dtype in dtypes if dtype.is_floating_point} - parameters
    wrong = wrong or (dtypes if not dtypes & parameters else set())
    if len(parameters) != 1 or not wrong or not any(word in str(error) for word in words):
        return
    (of_network,) = parameters
    names = " and ".join(sorted(map(str, wrong)))
    raise TypeError(
        f"The inputs have dtype {names} and the network's parameters {of_network}, which do not go "
        f"together here ({str(error).splitlines()[0]}). Convert the data: x.to({of_network}), and "
        "images in uint8 by x.float() / 255; or convert the network (model.double(), model.half())."
    ) from error


def in_channels_last(model: nn.Module) -> dict[str, Tensor]:
    """Name -> a convolution's weight in that memory format, which its outputs then have, too."""
    return {
        name: p.detach().contiguous(memory_format=torch.channels_last)
        for name, p in model.named_parameters()
        if p.dim() == 4 and not is_part(p)
    }


def takes_labels(model: nn.Module, x: Any) -> bool:
    """Whether a model's forward takes labels, from which it may compute a loss."""
    names, takes_any = argument_names(model)
    if "labels" in names or takes_any or not isinstance(x, Mapping):
        return "labels" in names or takes_any
    args, _ = arguments(model, x)
    return bool(args) and isinstance(args[0], Mapping) and "labels" in args[0]


def own_loss(model: nn.Module, x: Any, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """The logits, and the loss that the model itself computes from labels; None if it does not.

    The model must take labels (`takes_labels`), as those of Hugging Face do.

    Raises:
        ValueError: the model fails to compute it.
    """
    output = try_twice(lambda: call_with(model, {}, x, y))
    if isinstance(output, Exception):
        if argument_names(model)[1]:
            return None  # a wrapper, of a model that takes no labels
        raise ValueError(
            f"{type(model).__name__} takes labels, but computes no loss from them "
            f"({type(output).__name__}: {output}). Say whether its outputs predict the next "
            "position's label: shift_labels=True or False."
        ) from output
    f = logits_of(output)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(f, Tensor) or not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return f, loss


def logits_of(output: Any) -> Any:
    """A model's output, or the ``logits`` of an output that is an object or a mapping with them."""
    if isinstance(output, Mapping):
        logits = output.get("logits")
    else:
        logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) and not isinstance(output, Tensor) else output


def forked_random_numbers(model: nn.Module) -> AbstractContextManager[None]:
    """A context that leaves the caller's random numbers as they were.

    Dropout that is on draws the same numbers in each such context, if nothing was drawn in between.
    """
    device = next(model.parameters()).device
    return torch.random.fork_rng([] if device.type == "cpu" else [device])


def explicit_forwards(assignment: RuleAssignment) -> ExitStack:
    """A context in which layers that are divided into parts run by these parts."""
    with ExitStack() as replaced:  # ends here if one is refused
        for divided in assignment.divided:
            present = divided.layer.__dict__.get("forward")
            # One of ours may be left where an interrupted backward pass has not ended, or a copy of
            # the layer was made meanwhile.
            is_ours = isinstance(present, partial) and isinstance(
                getattr(present.func, "__self__", None), LayerByParts
            )
            if present is not None and not is_ours:
                raise NotImplementedError(
                    f"Layer '{divided.name}' ({type(divided.layer).__name__}) has a forward of its "
                    "own, which the curvature would replace. Derive a class, or freeze it "
                    "(requires_grad_(False))."
                )
            by_parts = partial(divided.by_parts.forward, divided.layer, divided.parts)
            divided.layer.forward = by_parts
            replaced.callback(divided.layer.__dict__.pop, "forward", None)
        return replaced.pop_all()


def uncompiled() -> AbstractContextManager[None]:
    """A context in which compiled code runs as Python, where hooks see all.

    Otherwise torch would compile it anew for each pass's hooks, up to a limit, and then warn.
    """
    # Nothing can have been compiled unless this module is loaded, and loading it takes seconds.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def plain_attention() -> AbstractContextManager[object]:
    """Attention by its plain formula: others can neither be differentiated twice nor mapped."""
    return sdpa_kernel(SDPBackend.MATH)


TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Relative errors up to which two results in a dtype are the same, see `close`."""
OTHER_TOLERANCE = 0.1
"""The same for all other dtypes, in half precision or coarser."""


@dataclass(eq=False)
class DtypesInUse(TorchFunctionMode):
    """A context that notes the coarsest dtype of all results, since a layer may cast inside."""

    tolerance: float = 0.0
    """The tolerance of that dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.is_floating_point():
            of_output = TOLERANCES.get(output.dtype, OTHER_TOLERANCE)
            self.tolerance = max(self.tolerance, of_output)
        return output


def close(expected: Tensor, actual: Tensor, tolerance: float = 0.0) -> bool:
    """Whether ‖expected − actual‖ ≤ tolerance · ‖expected‖; True if NaN or infinity is expected.

    ``tolerance`` is that of a coarser dtype in which they were computed (`DtypesInUse`). It or
    that of ``actual`` counts, whichever is larger.
    """
    if expected.shape != actual.shape:
        return False
    if expected.is_sparse or actual.is_sparse:
        expected, actual = expected.to_dense(), actual.to_dense()
    if not torch.isfinite(expected).all():
        return True  # reported with the model's output
    # By norms and not entry by entry: a small entry of a gradient may be the difference of large
    # terms, whose rounding is as large as it is.
    tolerance = max(tolerance, TOLERANCES.get(actual.dtype, OTHER_TOLERANCE))
    return bool((expected - actual).norm() <= tolerance * expected.norm())


def noise_like(x: Tensor) -> Tensor:
    """Normal numbers in the shape of x, the same each time; the user's generators are not used."""
    # Drawn on the CPU, so that a proof is the same on all devices.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)


@dataclass(frozen=True)
class BatchTrial:
    """How a model takes batches."""

    can_split: bool = False
    """Whether examples alone have the outputs that they have together, so that a few may run."""
    channels_last: bool = False
    """Whether convolutions run in that memory format, which is faster; only rounding changes."""


def try_batch(model: nn.Module, x: Any, N: int | None) -> BatchTrial:
    """Try how a model takes batches like this one of N examples, on its first and its last one.

    A model whose output depends on the memory format keeps its own.
    """
    if not N:
        return BatchTrial()
    on_cpu = next(model.parameters()).device.type == "cpu"

    def trial() -> BatchTrial:
        # In a sorted batch these differ most. Of a user's objects only slices are known.
        is_known = isinstance(x, Tensor | Mapping)
        ends = examples(x, slice(None, None, max(N - 1, 1)) if is_known else slice(2))
        # Dropout that is on must not use up the user's random numbers.
        with torch.no_grad(), forked_random_numbers(model):
            # Each alone, and both together: where the outputs are the same, a few examples may run
            # in the place of a batch.
            alone = [
                call_with(model, {}, examples(ends, slice(k, k + 1))) for k in range(min(N, 2))
            ]
            both = call_with(model, {}, ends)
            weights = in_channels_last(model) if on_cpu else {}
            channels_last = False
            if weights:
                f = try_twice(lambda: call_with(model, weights, ends))
                channels_last = not isinstance(f, Exception) and close(both, f)
        can_split = len(alone) == len(both) == 2 and all(
            close(both[k : k + 1], f) for k, f in enumerate(alone)
        )
        return BatchTrial(can_split, channels_last)

    tried = try_twice(trial)
    # A model that needs a whole batch gets one. If it fails on that, too, the pass says why.
    return BatchTrial() if isinstance(tried, Exception) else tried
