"""Call a model with other parameters, and with layers split into parts that hooks can capture.

Trial calls show whether two outputs are equal up to rounding (`close`), and which batches a model
supports (`try_batch`). After an error or an interrupt the model is in its earlier state.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode

from kfac_backend.engine.batches import argument_names, arguments, copied, examples
from kfac_backend.engine.rule_assignment import RuleAssignment, UnexpectedRun
from kfac_backend.layers import LayerByParts
from kfac_backend.sharding import is_part, reshard, substituted, whole_parameters

T = TypeVar("T")
HOOKS = [
    name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))
]
"""Attributes of a module that hold its forward hooks and their options."""
CHANGING = "_parameters", *HOOKS
"""Attributes that `state_restorer` restores, in addition to the mode and the forward."""
ALL_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
"""Attributes of a module that hold the hooks of its calls."""
GLOBAL_HOOKS: list[Mapping[int, Any]] = [
    getattr(torch_modules, f"_global{name}") for name in ALL_HOOKS
]
"""torch's hooks on the calls of all modules, by number."""
VECTORISED: set[type[nn.Module]] = {
    getattr(nn, f"{name}{d}d")
    for name in ("AdaptiveAvgPool", "AvgPool", "BatchNorm", "Conv", "Dropout", "MaxPool")
    for d in (1, 2, 3)
} | {
    nn.Dropout, nn.ELU, nn.Flatten, nn.GELU, nn.GroupNorm, nn.Identity, nn.LayerNorm, nn.LeakyReLU,
    nn.Linear, nn.ReLU, nn.Sequential, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Tanh, nn.Unflatten,
}  # fmt: skip
"""Classes of modules that torch.vmap can map over their parameters, for `call_with_each`.

In eval mode, the forward of such a class draws no random numbers, does not branch by a value and
writes neither attributes nor buffers. Only code that is known to do none of these may be in the
set. Subclasses are not included, since they may have another forward.
"""
MOST_ENTRIES = 2**20
"""Maximum number of entries of an activation that `call_with_each` computes at once, estimated."""


def state_restorer(*modules: nn.Module) -> Callable[[], None]:
    """Return a function that restores the modules' modes, hooks, forwards and parameter objects.

    It includes submodules, and does not restore values.
    """
    for root in modules:
        reshard(root)  # a parameter that FSDP has gathered is a temporary object
    modes: list[tuple[dict[str, Any], Any, Any]] = []  # attributes, and the former mode and forward
    before: list[tuple[dict, dict]] = []  # dictionaries and their former entries
    empty: list[dict] = []  # dictionaries without entries, which most are
    every = dict.fromkeys(module for root in modules for module in root.modules())
    for attributes in map(vars, every):
        modes.append((attributes, attributes.get("training"), attributes.get("forward")))
        for name in CHANGING:
            entries = attributes.get(name)
            # Except for modules of TorchScript: theirs are no dictionaries and cannot change.
            if isinstance(entries, dict):
                if entries:
                    before.append((entries, entries.copy()))
                else:
                    empty.append(entries)

    def restore() -> None:
        for root in modules:
            reshard(root)
        for attributes, mode, forward in modes:
            for name, value in (("training", mode), ("forward", forward)):
                if value is not None:
                    attributes[name] = value
                else:
                    attributes.pop(name, None)
        for entries in empty:
            if entries:
                entries.clear()
        for entries, former in before:
            entries.clear()
            entries.update(former)

    return restore


@contextmanager
def preserve_state(*modules: nn.Module) -> Iterator[None]:
    """Context that restores the modules' state on exit, see `state_restorer`."""
    restore = state_restorer(*modules)
    try:
        yield
    finally:
        restore()


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Context that restores the attributes of all modules on exit, such as a stored activation.

    A tensor that a model stores within `torch.func`'s transforms cannot be read outside of them.
    """
    before = [(vars(module), vars(module).copy()) for module in model.modules()]
    try:
        yield
    finally:
        for present, former in before:
            for name in [*present]:
                if name not in former:
                    del present[name]
                elif present[name] is not former[name]:
                    present[name] = former[name]


def try_twice(trial: Callable[[], T]) -> T | Exception:
    """Return the result of a trial, or the error with which the model rejects it.

    A model may not support fewer examples, or tensors of other shapes, and may fail in any way. It
    then fails each time. So the trial is repeated after an error. An error that does not occur
    again says nothing about the model and is raised. So is exhausted memory. An accidental failure
    must not decide anything.
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
    """Return whether an allocation failed, on a GPU or on the host."""
    host = ("can't allocate memory", "not enough memory")  # messages of Linux and of Windows
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in host)


def call_with(
    model: nn.Module,
    parameters: Mapping[str, Tensor] | None,
    x: Any,
    labels: Tensor | None = None,
    places: list[Any] | None = None,
) -> Any:
    """Return the model's output at x with these parameters; all others are constants.

    The model gets a copy of the input, which a forward may change in place. A mapping is the single
    argument, unless the forward names its keys. If the output has ``logits``, these are returned.
    With ``labels`` the model gets them, too, and its whole output is returned. ``parameters`` None
    replaces nothing. Calls in `uncompiled` may share ``places``, a list that the first call fills.

    Raises:
        TypeError: an output that is no tensor of real numbers; inputs in an unsupported dtype.
    """
    args, kwargs = ((x.clone(),), {}) if isinstance(x, Tensor) else arguments(model, copied(x))
    if labels is not None and args and isinstance(args[0], Mapping):
        args = ({**args[0], "labels": labels.clone()},)
    elif labels is not None:
        kwargs["labels"] = labels.clone()
    whole, is_prepared, given = whole_parameters(model), bool(places), parameters or {}
    places, firsts = [] if places is None else places, dict[int, tuple[str, Tensor]]()
    # Replace all parameters, under each of their names, so that nothing is written into the model.
    for prefix, module in () if parameters is None or is_prepared else model.named_modules():
        start, tensors = f"{prefix}." if prefix else "", module._parameters
        for local, p in tensors.items():
            if p is not None:
                p = whole.get(start + local, p)
                first, value = firsts.setdefault(id(p), (start + local, p.detach()))
                places.append((start + local, tensors, local, p, first, value))
        # Copy buffers that may change, such as running statistics.
        for local, b in module._buffers.items() if module.training else ():
            if b is not None:
                places.append((start + local, module._buffers, local, b, "", b.clone()))
    is_plain = all(isinstance(place[1], dict) for place in places)  # not TorchScript's
    try:
        with nullcontext() if is_prepared else uncompiled():
            if is_plain and not whole and not isinstance(model, nn.DataParallel):
                try:
                    for _, tensors, local, _, first, value in places:
                        tensors[local] = given.get(first, value)
                    output = model(*args, **kwargs)
                finally:
                    for _, tensors, local, former, *_ in places:
                        tensors[local] = former
            else:  # slower; its own tie_weights drops parameters (pytorch issue 164759)
                state: Any = {name: given.get(first, value) for name, *_, first, value in places}
                call = partial(torch.func.functional_call, model, state, tie_weights=False)
                with substituted(model, state) if whole else nullcontext():
                    output = model(*args, **kwargs) if whole else call(args, kwargs)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if not isinstance(error, UnexpectedRun):
            explain(model, (*args, kwargs), error)
        raise
    if labels is None and (not isinstance(output, Tensor) or output.is_complex()):
        output = logits_of(output)
        check_output(output)
    return output


def call_with_each(
    model: nn.Module, parameters: Mapping[str, Float[Tensor, "S *shape"]], x: Any
) -> Float[Tensor, "S N *rest"]:
    """Return the model's outputs at x for each of S values of some parameters, as `call_with`.

    Small inputs run for many values at once if the model consists of `VECTORISED` classes.
    """
    (S,) = {len(values) for values in parameters.values()}
    tensors = [t for t in (x.values() if isinstance(x, Mapping) else [x]) if isinstance(t, Tensor)]
    # The activations of one value: each token, and each example, becomes a vector of this width.
    width = max((size for p in model.parameters() for size in p.shape), default=1)
    entries = sum(t.numel() * (1 if t.is_floating_point() else width) for t in tensors)
    entries = max(1, entries, *(width * t.shape[:1].numel() for t in tensors))
    at_once = min(S, MOST_ENTRIES // entries) if tensors else 1
    if at_once > 1 and has_known_code(model):
        run = partial(call_with, model, x=x)
        return torch.vmap(run, chunk_size=at_once)(dict(parameters)).contiguous()
    samples = zip(*(values.unbind() for values in parameters.values()), strict=True)
    # In train mode buffers are copied for each call, so search their places again.
    in_training = any(module.training for module in model.modules())
    places: list[Any] | None = None if in_training else []
    outputs = []
    with uncompiled():
        for sample in samples:
            by_name = dict(zip(parameters, sample, strict=True))
            outputs.append(call_with(model, by_name, x, places=places))
    return torch.stack(outputs)


def has_known_code(model: nn.Module) -> bool:
    """Return whether all modules are of `VECTORISED` classes, in eval mode and without hooks.

    Then no code can change a gradient, neither by a hook on a tensor nor on a node of the graph.
    """
    if any(GLOBAL_HOOKS):
        return False
    for module in model.modules():
        own = vars(module)
        if type(module) not in VECTORISED or own["training"] or "forward" in own:
            return False
        for name in ALL_HOOKS:
            if own[name]:
                return False
    return True


def check_output(output: object) -> None:
    """Raise a TypeError unless a model's output is a tensor of real numbers."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"The model returned {type(output).__name__}, but must return a tensor of outputs (N, "
            "..., C). Wrap it in a module that returns only its logits."
        )
    if output.is_complex():
        raise TypeError(
            f"The model's output is complex ({output.dtype}), but likelihoods support only real "
            "outputs. Return real and imaginary parts: torch.view_as_real(f).flatten(-2)."
        )


def explain(model: nn.Module, arguments: Sequence[Any], error: Exception) -> None:
    """Raise a TypeError if a model's error means that it does not support such inputs.

    Such inputs are a mapping as a single argument, and inputs in another dtype than the parameters.
    Only the call shows whether the model converts the dtype.
    """
    x = arguments[0]
    if isinstance(x, Mapping) and len(arguments) > 1 and type(x).__name__ in str(error):
        raise TypeError(
            f"{type(model).__name__} got a whole batch as its input (a {type(x).__name__} with "
            f"the keys {', '.join(map(str, x))}), which it does not support. Pass the key of its "
            "input, for example dict_key_x='x'."
        ) from error
    words = "dtype", "scalar type", "Input type", "must have the type", "not implemented for"
    parameters = {p.dtype for p in model.parameters() if p.is_floating_point()}
    tensors = [t for x in arguments for t in (x.values() if isinstance(x, Mapping) else [x])]
    dtypes = {t.dtype for t in tensors if isinstance(t, Tensor)}
    # Floating-point inputs may come with tokens or masks. If there are none, an integer input has
    # the wrong dtype.
    wrong = {dtype for dtype in dtypes if dtype.is_floating_point} - parameters
    wrong = wrong or (dtypes if not dtypes & parameters else set())
    if len(parameters) != 1 or not wrong or not any(word in str(error) for word in words):
        return
    (of_network,) = parameters
    names = " and ".join(sorted(map(str, wrong)))
    raise TypeError(
        f"The inputs have dtype {names}, but the network's parameters have {of_network} "
        f"({str(error).splitlines()[0]}). Convert the data with x.to({of_network}), or images in "
        "uint8 with x.float() / 255. Or convert the network (model.double(), model.half())."
    ) from error


def in_channels_last(model: nn.Module) -> dict[str, Tensor]:
    """Return convolution weights by name in channels-last format, which their outputs inherit."""
    weights: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.dim() == 4 and not is_part(p):
            weight = p.detach().contiguous(memory_format=torch.channels_last)
            # With one channel, as of greyscale images, both formats have the same order of entries.
            # Torch then takes the first format unless the strides are these.
            _, C, k1, k2 = p.shape
            weights[name] = weight.as_strided(p.shape, (C * k1 * k2, 1, k2 * C, C))
    return weights


def takes_labels(model: nn.Module, x: Any) -> bool:
    """Return whether a model's forward takes labels, from which it may compute a loss."""
    names, takes_any = argument_names(model)
    if "labels" in names or takes_any or not isinstance(x, Mapping):
        return "labels" in names or takes_any
    args, _ = arguments(model, x)
    return bool(args) and isinstance(args[0], Mapping) and "labels" in args[0]


def own_loss(model: nn.Module, x: Any, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the logits and the loss that the model computes from labels, or None.

    The model must take labels (`takes_labels`), like models of Hugging Face.

    Raises:
        ValueError: the model fails to compute the loss.
    """
    output = try_twice(lambda: call_with(model, {}, x, y))
    if isinstance(output, Exception):
        if argument_names(model)[1]:
            return None  # a wrapper around a model that takes no labels
        raise ValueError(
            f"{type(model).__name__} takes labels, but computing its loss from them failed "
            f"({type(output).__name__}: {output}). Pass shift_labels=True if its outputs predict "
            "the next position's label, otherwise shift_labels=False."
        ) from output
    f = logits_of(output)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(f, Tensor) or not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return f, loss


def logits_of(output: Any) -> Any:
    """Return a model's output, or the ``logits`` if it is an object or a mapping with them."""
    if isinstance(output, Mapping):
        logits = output.get("logits")
    else:
        logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) and not isinstance(output, Tensor) else output


def forked_random_numbers(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context that restores the caller's random state on exit.

    Active dropout draws the same numbers in each such context, if nothing is drawn in between.
    """
    device = next(model.parameters()).device
    return torch.random.fork_rng([] if device.type == "cpu" else [device])


def explicit_forwards(assignment: RuleAssignment) -> ExitStack:
    """Return a context in which divided layers run by their parts."""
    with ExitStack() as replaced:  # the context ends here if a layer is refused
        for divided in assignment.divided:
            present = divided.layer.__dict__.get("forward")
            # One of our own forwards may remain if an interrupted backward pass has not ended, or
            # if the layer was copied meanwhile.
            is_ours = isinstance(present, partial) and isinstance(
                getattr(present.func, "__self__", None), LayerByParts
            )
            if present is not None and not is_ours:
                raise NotImplementedError(
                    f"Layer '{divided.name}' ({type(divided.layer).__name__}) has a forward that "
                    "was assigned to this object. The curvature would replace it. Derive a class "
                    "instead, or freeze it (requires_grad_(False))."
                )
            by_parts = partial(divided.by_parts.forward, divided.layer, divided.parts)
            divided.layer.forward = by_parts
            replaced.callback(divided.layer.__dict__.pop, "forward", None)
        return replaced.pop_all()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Context in which models run as Python, so that hooks run.

    Otherwise torch would recompile compiled code for each pass's hooks, up to a limit, and then
    warn. PyTorch's fused inference path would run a transformer's layers without hooks.
    """
    mha = torch.backends.mha
    is_fused = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        # Nothing is compiled unless this module is loaded, and loading it takes seconds.
        is_loaded = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if is_loaded else nullcontext():
            yield
    finally:
        mha.set_fastpath_enabled(is_fused)


def plain_attention() -> AbstractContextManager[object]:
    """Return a context with attention by its plain formula, which can be differentiated twice.

    It can also be mapped with vmap, unlike the fused kernels.
    """
    return sdpa_kernel(SDPBackend.MATH)


TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Relative tolerance for equal results by dtype, see `close`."""
OTHER_TOLERANCE = 0.1
"""Relative tolerance for all other dtypes, which have half precision or less."""


@dataclass(eq=False)
class DtypesInUse(TorchFunctionMode):
    """Context that records the coarsest dtype of all results, because a layer may cast inside."""

    tolerance: float = 0.0
    """Tolerance of the coarsest dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.is_floating_point():
            of_output = TOLERANCES.get(output.dtype, OTHER_TOLERANCE)
            self.tolerance = max(self.tolerance, of_output)
        return output


def close(expected: Tensor, actual: Tensor, tolerance: float = 0.0) -> bool:
    """Return whether ‖expected − actual‖ ≤ tolerance · ‖expected‖; True for NaN or infinity.

    The tolerance is the larger one of ``tolerance``, which belongs to a coarser dtype in the
    computation (`DtypesInUse`), and of the tolerance of ``actual``.
    """
    if expected.shape != actual.shape:
        return False
    if expected.dtype == actual.dtype and torch.equal(expected, actual):
        return True
    if not torch.isfinite(expected).all():
        return True  # reported with the model's output
    # Compare norms, not entries: a small entry of a gradient may be the difference of large terms,
    # with a rounding error as large as the entry.
    tolerance = max(tolerance, TOLERANCES.get(actual.dtype, OTHER_TOLERANCE))
    return bool((expected - actual).norm() <= tolerance * expected.norm())


def noise_like(x: Tensor) -> Tensor:
    """Return normal numbers in the shape of x, always the same, without the user's generators."""
    # Draw on the CPU, so that a proof is the same on all devices.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)


@dataclass(frozen=True)
class BatchTrial:
    """Properties of a model's batches."""

    can_split: bool = False
    """Whether examples alone have the same outputs as in the batch, so that a few may run alone."""
    channels_last: bool = False
    """Whether convolutions run in the faster channels-last format, which changes only rounding."""


def try_batch(model: nn.Module, x: Any, N: int | None) -> BatchTrial:
    """Try the model on the first and the last of N examples, alone and together.

    A model whose output depends on the memory format keeps its own format.
    """
    if not N:
        return BatchTrial()
    on_cpu = next(model.parameters()).device.type == "cpu"

    def trial() -> BatchTrial:
        # In a sorted batch these two differ most. User-defined objects may support only slices.
        is_known = isinstance(x, Tensor | Mapping)
        ends = examples(x, slice(None, None, max(N - 1, 1)) if is_known else slice(2))
        # Active dropout must not advance the user's random numbers.
        with torch.no_grad(), forked_random_numbers(model):
            # Run each alone, and both together. If the outputs are equal, a few examples may run
            # instead of a batch.
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
    # A model that needs a whole batch gets one. If it fails on that, too, the pass reports the
    # error.
    return BatchTrial() if isinstance(tried, Exception) else tried
