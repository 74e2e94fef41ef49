"""Assign a rule to each trainable parameter, and list the layers to track.

`assign_rules` sorts a model's parameters before any data is read: parameters of layers with a rule,
parameters that a module registered, and unknown ones. The proof on the first batch completes the
returned `RuleAssignment`. It exchanges the rules of derived layers, adds the kinds of runs, and
determines the uses of unknown parameters, or gives them up. Each step makes a new assignment, so a
failed proof can start again from the first one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from kfac_backend.layers import (
    LayerByParts,
    LinearPart,
    Rule,
    declared_parameters,
    registered,
    supported_layers,
)
from kfac_backend.layers.elementwise import OwnParameter, OwnParameterRule
from kfac_backend.layers.rows import Run
from kfac_backend.options import Unsupported
from kfac_backend.sharding import check_sharding, is_sharded, whole_shape


@dataclass(frozen=True, eq=False)
class TrackedLayer:
    """Layer with a rule and at least one trainable parameter; hashed by identity."""

    name: str
    layer: nn.Module
    rule: type[Rule]
    parameters: dict[str, str]
    """Maps local names ("weight") to names in the model ("stage1.0.conv1.weight")."""
    layer_type: type[nn.Module]
    """Class that the rule is for."""
    built_in: bool = True
    """Whether the rule is built in, and not registered by a user."""
    slots: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Maps a local name to (index, count), the parameter's row block in a packed tensor.

    Empty for tensors with a single map.
    """

    def __str__(self) -> str:
        return f"'{self.name}' ({type(self.layer).__name__})"


@dataclass(frozen=True, eq=False)
class LayerRun:
    """Layer's run on an input that all examples share. Its output starts an expression."""

    tracked: TrackedLayer
    number: int


@dataclass(frozen=True, eq=False)
class DividedLayer:
    """Layer whose forward is replaced by one that runs its parts."""

    name: str
    layer: nn.Module
    by_parts: LayerByParts
    parts: Mapping[str, LinearPart]


OperationKind = int | tuple[TrackedLayer, ...] | Literal["computed"]
"""Kind of an operation on parameters.

- an integer: the operation runs row by row, with a copy of the parameters for each row. The integer
  is the output's axis of rows, counted from the end;
- layers: the operation is a run of that layer. Several layers are the matrices of a stack, by
  number;
- "computed": the operation uses parameters alone.
"""


@dataclass(frozen=True, eq=False)
class Operations:
    """Parameters that no hook captures, and the kinds of operations on them; see `operations`."""

    names: tuple[str, ...] = ()
    """Names of the parameters."""
    own: Mapping[str, TrackedLayer] = field(default_factory=dict)
    """Parameters that are used by broadcasting, each as a layer `OwnParameter`, by name."""
    keys: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """Maps a description of a tensor's computation to its key, see `key`."""
    kinds: dict[int, OperationKind] = field(default_factory=dict)
    """Maps the key of an operation to its kind."""

    def key(self, made_by: str | int | Callable[..., Any], *operands: int) -> int:
        """Return a number for the result of this operation on these keys, or for a parameter.

        The same expression has the same key in every forward pass. The order and number of
        operations do not matter, so a loop may run longer in another batch.
        """
        return self.keys.setdefault((made_by, *operands), len(self.keys))


@dataclass(frozen=True)
class RuleAssignment:
    """Layers with rules, and parameters with a diagonal, of a curvature pass."""

    layers: list[TrackedLayer]
    """Layers that run in a forward pass."""
    own_parameters: list[TrackedLayer]
    """Registered parameters of modules, each as a layer `OwnParameter`, which does not run."""
    divided: list[DividedLayer]
    """Layers that run by their parts. The parts are among ``layers``."""
    diagonal: list[str]
    """Parameters with the exact diagonal of their block."""
    names: list[str]
    """All parameters with a block, in the order of ``model.named_parameters()``."""
    runs: Mapping[nn.Module, tuple[Run, ...]] = field(default_factory=dict)
    """Maps a layer to the kinds of its runs in a forward pass, in order. Layers that are missing
    have only runs on rows of examples. See `candidates`."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Maps parameters without a rule to the message for a failed follow."""
    operations: Operations = field(default_factory=Operations)
    """Parameters with operations to follow; set by the proof."""
    unsupported: Unsupported = "error"
    """Treatment of parameters whose uses cannot be followed."""
    padding: Mapping[str, int] = field(default_factory=dict)
    """Maps parameters to their constant row, see `padding`; set by the proof."""
    idle: tuple[str, ...] = ()
    """Parameters of layers that did not run in the proof; set by the proof. Hooks do not capture
    other uses of them, so `Capture` checks that no gradient reaches them in later batches."""

    @property
    def all(self) -> list[TrackedLayer]:
        """Layers and registered parameters that have a rule."""
        return self.layers + self.own_parameters + list(self.operations.own.values())

    def without(self, names: Mapping[str, Any]) -> "RuleAssignment":
        """Return the assignment without the uses of some parameters, which still get a block."""

        def left(layers: list[TrackedLayer]) -> list[TrackedLayer]:
            remaining = [
                (t, {local: name for local, name in t.parameters.items() if name not in names})
                for t in layers
            ]
            return [t if p == t.parameters else replace(t, parameters=p) for t, p in remaining if p]

        followed = [name for name in self.operations.names if name not in names]
        broadcast = {name: t for name, t in self.operations.own.items() if name not in names}
        return replace(
            self,
            layers=left(self.layers),
            own_parameters=left(self.own_parameters),
            unknown={name: error for name, error in self.unknown.items() if name not in names},
            operations=replace(self.operations, names=tuple(followed), own=broadcast),
            idle=tuple(name for name in self.idle if name not in names),
        )

    def with_constants(self, names: Mapping[str, Any]) -> "RuleAssignment":
        """Return the assignment with some parameters as constants, without uses or blocks."""
        remaining = [name for name in self.names if name not in names]
        if not remaining:
            raise ValueError(
                "No trainable parameter of the model has a K-FAC rule. Register one "
                "(register_rule)."
            )
        return replace(self.without(names), names=remaining)

    def with_runs(self, runs: Mapping[TrackedLayer, list[Run]]) -> "RuleAssignment":
        """Return the assignment with the runs of layers that have kinds other than "examples"."""
        others = {t.layer: tuple(kinds) for t, kinds in runs.items() if set(kinds) != {"examples"}}
        return replace(self, runs=others)


class Refusal(NotImplementedError):
    """Error for parameters whose uses cannot be followed, with a message for each name.

    The messages are no exceptions, because these would keep the frames in which they were raised,
    and so the network. ``divided`` are layers that compute something other than their parts.
    """

    def __init__(self, errors: Mapping[str, str], divided: Collection[DividedLayer] = ()) -> None:
        self.errors, self.divided = dict(errors), divided
        super().__init__(next(iter(self.errors.values()), ""))


class UnexpectedRun(TypeError):
    """Error for a layer whose input or output does not fit its class."""

    def __init__(self, tracked: TrackedLayer, message: str) -> None:
        super().__init__(message)
        self.tracked = tracked


def check_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise an error for parameters without a shape, complex ones and 0-dimensional ones."""
    for name, p in parameters.items():
        if is_lazy(p):
            raise ValueError(
                f"Parameter '{name}' has no shape yet. Run a batch through the model first."
            )
        if p.is_complex():
            raise NotImplementedError(
                f"Parameter '{name}' is complex ({p.dtype}), but rules support only real "
                "parameters. Store its real and imaginary parts as a real parameter "
                "(torch.view_as_real), or freeze it (requires_grad_(False))."
            )
        if p.dim() == 0:
            raise ValueError(
                f"Parameter '{name}' is 0-dimensional, but a block needs rows. Give it shape "
                "(1,), for example nn.Parameter(torch.zeros(1))."
            )


def assign_rules(
    model: nn.Module, unsupported: Unsupported = "error", only: Collection[str] | None = None
) -> RuleAssignment:
    """Sort the trainable parameters of a model into those with a rule and those without.

    The proof on the first batch determines the uses of parameters without a rule. If it cannot,
    ``unsupported`` says what happens: "error" raises, "freeze" treats parameters without a rule as
    constants, with a warning that names them, and "diagonal" computes the exact diagonal of their
    block. ``only`` has the names of the parameters to consider; None means all.
    """
    check_module(model)
    trainable = {
        n: p for n, p in model.named_parameters() if p.requires_grad and (only is None or n in only)
    }
    if not trainable:
        raise ValueError(
            "The model has no trainable parameter. Call requires_grad_(True) on the parameters "
            "whose curvature you need."
        )
    check_parameters(trainable)
    check_batch_norm(model)
    names = {id(p): name for name, p in trainable.items()}  # a shared tensor has its first name

    layers: list[TrackedLayer] = []
    own_parameters: list[TrackedLayer] = []
    divided: list[DividedLayer] = []
    without_rule: list[tuple[str, nn.Module, str]] = []
    # Go through the modules, so that a parameter's owner decides and not the model around it.
    for prefix, module in model.named_modules():
        parameters = {
            local: names[id(p)]
            for local, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in names
        }
        # Step 1: the rule of the module's class. A layer by parts has one rule for each of its
        # maps.
        registration, covered_here = registered(module), set()
        if registration and issubclass(registration.rule, LayerByParts):
            if any(id(p) in names for p in module.parameters()):
                by_parts = registration.rule()
                parts = by_parts.parts(module)
                divided.append(DividedLayer(prefix, module, by_parts, parts))
                layers += _parts(prefix, parts, parameters)
                covered_here = {
                    theirs for p in parts.values() for theirs in p.parameter_of.values()
                }
        elif registration and issubclass(registration.rule, Rule):
            covered_here = set(parameters) & registration.rule.parameter_names
            if covered_here:
                registration.rule.check(module)
                mine = {local: name for local, name in parameters.items() if local in covered_here}
                kind = registration.layer_type, registration.built_in
                layers.append(TrackedLayer(prefix, module, registration.rule, mine, *kind))
        # Step 2: registered parameters, unless a rule has them already. Under `fully_shard` they
        # are followed like others: FSDP would undo their copies when it gathers.
        declared = declared_parameters(module) if parameters else {}
        for local, view in declared.items():
            if local in parameters and local not in covered_here and not is_sharded(model):
                own_parameters.append(
                    _own_parameter(prefix, module, local, view, parameters[local])
                )
                covered_here.add(local)
        # Step 3: the rest. The proof follows their uses.
        without_rule += [
            (prefix, module, parameters[local]) for local in parameters if local not in covered_here
        ]

    covered = {full for t in layers + own_parameters for full in t.parameters.values()}
    # If a layer with a rule has a tensor, too, the rule covers it. A second name for it is no
    # further use, as in masked language models, whose heads hold their output layer's bias. If the
    # tensor is used under the second name, the check detects it.
    without_rule = [missed for missed in without_rule if missed[2] not in covered]
    unknown = {name: _no_rule(prefix, module, name) for prefix, module, name in without_rule}
    return RuleAssignment(
        layers,
        own_parameters,
        divided,
        [],
        list(trainable),
        unknown=unknown,
        unsupported=unsupported,
    )


def _parts(
    prefix: str, parts: Mapping[str, LinearPart], parameters: Mapping[str, str]
) -> Iterator[TrackedLayer]:
    """Return the parts of a divided layer that have trainable parameters."""
    for part_name, part in parts.items():
        registration = registered(part)
        assert registration is not None and issubclass(registration.rule, Rule)
        mine = {
            local: parameters[theirs]
            for local, theirs in part.parameter_of.items()
            if theirs in parameters
        }
        slots = {local: (part.slot, part.slots[local]) for local in mine if local in part.slots}
        if mine:
            name = f"{prefix}.{part_name}" if prefix else part_name
            yield TrackedLayer(
                name, part, registration.rule, mine, registration.layer_type, slots=slots
            )


def followed(model: nn.Module, name: str) -> TrackedLayer:
    """Return a parameter as a layer that never runs. Followed operations give its gradients."""
    prefix, _, local = name.rpartition(".")
    view = (1, *model.get_parameter(name).shape)
    return _own_parameter(prefix, model.get_submodule(prefix), local, view, name)


def _own_parameter(
    prefix: str, module: nn.Module, local: str, view: tuple[int, ...] | None, full: str
) -> TrackedLayer:
    p = getattr(module, local)
    if view is None and p.dim() > 1 and p.shape[0] == 1:
        view = tuple(p.shape)
    if view is None:
        raise NotImplementedError(
            f"Parameter '{full}' of {type(module).__name__} has shape {tuple(p.shape)}, but its "
            "first axis must have size 1. Pass register_parameters the broadcast shape: "
            f"{local}=(1, ...)."
        )
    try:
        whole_shape(p.detach()).reshape(view)
    except RuntimeError as error:
        raise ValueError(
            f"Parameter '{full}' of {type(module).__name__} has shape {tuple(p.shape)}, which "
            f"does not fit the shape {tuple(view)} of register_parameters. Pass the broadcast "
            "shape; one entry may be -1."
        ) from error
    name = f"{prefix}.{local}" if prefix else local
    layer = OwnParameter(module, local, view)
    return TrackedLayer(name, layer, OwnParameterRule, {local: full}, OwnParameter)


def assignment_of_blocks(model: nn.Module, sizes: Mapping[str, int]) -> RuleAssignment:
    """Return the assignment for a given set of blocks; other parameters are constants.

    ``sizes`` maps a parameter's name to the number of entries of its block. Each must be a
    trainable parameter of this size.
    """
    # "diagonal", because a posterior may have blocks of parameters without a rule.
    assignment = assign_rules(model, "diagonal")
    own_sizes = {
        name: p.numel() for name, p in model.named_parameters() if name in assignment.names
    }
    wrong = [name for name in sizes if own_sizes.get(name) != sizes[name]]
    if wrong or not sizes:
        mistake = "no block"
        if wrong:
            mistake = f"a block of '{wrong[0]}' with {sizes[wrong[0]]} entries, but the model has "
            mistake += str(own_sizes.get(wrong[0], "no such trainable parameter"))
        raise ValueError(
            f"The posterior has {mistake}. It belongs to another model, or the parameter was "
            "frozen after the fit (unfreeze it: requires_grad_(True))."
        )
    others = {name: None for name in assignment.names if name not in sizes}
    return replace(assignment.without(others), names=list(sizes))


def _no_rule(module_name: str, module: nn.Module, parameter: str) -> str:
    return (
        f"Parameter '{parameter}' of layer '{module_name}' ({type(module).__name__}) has no K-FAC "
        f"rule. Supported: {', '.join(supported_layers())}. Freeze it (requires_grad_(False)), "
        'pass unsupported="freeze" or unsupported="diagonal", or declare its use with '
        "register_rule or register_parameters."
    )


def check_module(model: object) -> None:
    """Raise an error unless this is a module that runs as Python, whole or under fully_shard."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"The model is {model!r:.80}, of type {type(model).__name__}, but must be a "
            "torch.nn.Module."
        )
    for name, module in model.named_modules():
        subject = f"Layer '{name}'" if name else "The model"
        inner = f"{f'model.{name}' if name else 'model'}.module"
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"{subject} is wrapped in {type(module).__name__}, whose copies or gradients a "
                f"curvature pass cannot use. Pass the wrapped module: {inner}. The curvature is "
                "still summed over the ranks."
            )
        if isinstance(module, torch.jit.ScriptModule) and any(
            p.requires_grad for p in module.parameters()
        ):
            raise NotImplementedError(
                f"{subject} was compiled by torch.jit, which does not support hooks. Pass the "
                "original module, or freeze it (requires_grad_(False))."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"Parameter '{name}' is on the meta device and has no values. Move the model to a "
                "device (model.to_empty), and load its weights."
            )
    if dist.is_available() and dist.is_initialized():  # otherwise nothing can be spread over ranks
        check_sharding(model)


def check_batch_norm(model: nn.Module, way_out: str = "") -> None:
    """Raise a ValueError if a BatchNorm of the model mixes the examples of a batch.

    The message names ``way_out`` in addition to eval mode.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if module.training:
            raise ValueError(
                f"Layer '{name}' ({type(module).__name__}) is in train mode. There it mixes the "
                "examples of a batch, and the exact GGN is not defined. Call model.eval() "
                f"first{f', or {way_out}' if way_out else ''}."
            )
        if module.running_mean is None:
            raise ValueError(
                f"Layer '{name}' ({type(module).__name__}) keeps no running statistics, so it "
                "mixes the examples of a batch even in eval mode. Use track_running_stats=True."
            )
