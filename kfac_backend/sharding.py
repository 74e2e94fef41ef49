"""Models under `torch.distributed.fsdp.fully_shard`, whose parameters are spread over ranks.

FSDP gathers the parameters of a module before it runs, and drops them afterwards: at any time but
these each rank has only its part of them, a DTensor. Three things follow for a curvature pass:

- Whatever takes a parameter's place takes it while the module runs (`substituted`). That is what
  `torch.func.functional_call` does for whole models; here FSDP would undo it at each gathering.
- What is differentiated with respect to a parameter needs a whole one. `whole_parameters` are
  tensors of its shape whose memory is FSDP's own: it has values as long as FSDP keeps them.
- Gathering is collective: all ranks must run the model equally often (`Driver`).

Nothing is gathered that FSDP does not gather by itself, except that each of its modules is gathered
once for its `whole_parameters`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist

_WHOLE: WeakKeyDictionary[nn.Module, dict[tuple[str, str], Tensor]] = WeakKeyDictionary()
_RUNNING: set[int] = set()
"""The id of each model that runs within `substituted`."""


def is_part(parameter: Tensor) -> bool:
    """Whether this is a DTensor, of which each rank has a part."""
    return hasattr(parameter, "to_local")


def whole_shape(parameter: Tensor) -> Tensor:
    """The parameter; if it is spread, a tensor of its shape and dtype whose values mean nothing.

    A DTensor would be gathered where a row of it is read.
    """
    if not is_part(parameter):
        return parameter
    one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return one.expand(parameter.shape)


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, in the same memory; all of it unless it is spread."""
    return parameter.detach().to_local() if is_part(parameter) else parameter.detach()  # pyright: ignore


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called for."""
    # Loading it takes long, and nothing can be sharded unless somebody has.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [module for module in model.modules() if isinstance(module, kind)] if kind else []


def is_sharded(model: nn.Module) -> bool:
    """Whether the model, or a part of it, is under `fully_shard`."""
    return bool(sharded_modules(model))


def ranks_of_model(model: nn.Module) -> int:
    """The number of ranks over which a sharded model is spread or replicated."""
    return max(p.device_mesh.size() for p in model.parameters() if is_part(p))  # pyright: ignore


def check_sharding(model: nn.Module) -> None:
    """Raise an error if parameters are spread over ranks otherwise than by `fully_shard`.

    Raises:
        NotImplementedError: FSDP1, tensor parallelism, parameters that are offloaded.
    """
    way_out = (
        "Shard it by torch.distributed.fsdp.fully_shard alone, keep it whole on each rank "
        "(DistributedDataParallel), or gather the parameters into a model of its own (torch."
        "distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True)."
    )
    managed = {id(p) for module in sharded_modules(model) for p in module.parameters()}
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            which = f"Layer '{name}'" if name else "The model"
            raise NotImplementedError(f"{which} is in FSDP1, FullyShardedDataParallel. {way_out}")
    for name, p in model.named_parameters():
        if type(p).__name__ == "FlatParameter":
            raise NotImplementedError(f"Parameter '{name}' is FSDP1's FlatParameter. {way_out}")
        if not is_part(p):
            continue
        placements, mesh = p.placements, p.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        if id(p) not in managed or sum(not one.is_replicate() for one in placements) != 1:
            raise NotImplementedError(
                f"Parameter '{name}' is spread over ranks by tensor parallelism (a DTensor with "
                f"placements {placements}), and hooks would see a part of it. {way_out}"
            )
        if p.device.type != mesh.device_type:
            raise NotImplementedError(
                f"Parameter '{name}' is offloaded to {p.device}. Shard without CPUOffloadPolicy."
            )


def check_whole(model: nn.Module, what: str) -> None:
    """Raise a NotImplementedError of what needs whole parameters on each rank, if it has parts."""
    if is_sharded(model):
        raise NotImplementedError(
            f"{what} needs whole parameters on each rank, and {type(model).__name__} is under "
            "fully_shard. Gather them into a model of its own (torch.distributed.checkpoint."
            "state_dict.get_model_state_dict with full_state_dict=True), and give a posterior of "
            "it the same factors (posterior.restore(factors))."
        )


def reshard(model: nn.Module) -> None:
    """Drop all parameters that FSDP has gathered and still keeps, such as those of the root."""
    for module in sharded_modules(model):
        module.reshard()


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Each name -> parameter; of a sharded one a whole tensor, see `whole_parameters`."""
    whole = whole_parameters(model)
    return {
        f"{prefix}.{local}" if prefix else local: whole.get((prefix, local), p)
        for prefix, module in model.named_modules()
        for local, p in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def detached_parameters(model: nn.Module) -> dict[str, Tensor]:
    """First name -> parameter without a graph; a sharded one as of `named_tensors`."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, p in named_tensors(model).items():
        first.setdefault(id(p), (name, p.detach()))
    return dict(first.values())


def whole_parameters(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """(Module, local name) -> each sharded parameter as a whole tensor in FSDP's memory.

    It has values while FSDP keeps the module's parameters gathered, and no memory else: only its
    shape and dtype may be read then. Collective at the first call for a model.
    """
    modules = sharded_modules(model)
    if not modules:
        return {}
    if model not in _WHOLE:
        reshard(model)
        names = {module: name for name, module in model.named_modules()}
        parts = {
            (name, local)
            for name, module in model.named_modules()
            for local, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if is_part(p)
        }
        whole: dict[tuple[str, str], Tensor] = {}
        for sharded in modules:
            sharded.unshard()
            for module in sharded.modules():
                for local, p in module.named_parameters(recurse=False, remove_duplicate=False):
                    if (names[module], local) in parts and not is_part(p):
                        # The tensor itself: a parameter of two names is one tensor.
                        whole[names[module], local] = p
            sharded.reshard()
        _WHOLE[model] = whole
    return _WHOLE[model]


def is_substituted(model: nn.Module) -> bool:
    """Whether the model runs within `substituted`: for a curvature pass, and not by its user."""
    return id(model) in _RUNNING


@contextmanager
def substituted(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which tensors take the place of parameters and buffers, of a sharded model.

    Each takes the place of a sharded parameter from when FSDP has gathered it until it is dropped.

    Args:
        model: the model.
        state: name, of every parameter under each of its names -> what takes its place.
    """
    whole = whole_parameters(model)
    paths = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    replaced: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []

    def put(entries: dict[str, Any], local: str, value: Tensor) -> None:
        replaced.append((entries, local, entries[local], value))
        entries[local] = value

    def gathered(sharded: nn.Module, *_: Any) -> None:
        for module in sharded.modules():
            for local, p in module._parameters.items():
                if p is None or is_part(p) or (paths[module][:-1], local) not in whole:
                    continue
                value = state[paths[module] + local]
                if p is not value:
                    put(module._parameters, local, value)

    handles = []
    try:
        for module, path in paths.items():
            for entries in (module._parameters, module._buffers):
                for local in list(entries):
                    if path + local in state and (path[:-1], local) not in whole:
                        put(entries, local, state[path + local])
        # Registered after FSDP's own hook, which gathers.
        handles = [m.register_forward_pre_hook(gathered) for m in sharded_modules(model)]
        for sharded in sharded_modules(model):
            gathered(sharded)  # what FSDP has kept since it gathered it for an earlier run
        _RUNNING.add(id(model))
        yield
    finally:
        _RUNNING.discard(id(model))
        for handle in handles:
            handle.remove()
        for entries, local, before, value in reversed(replaced):
            if entries[local] is value:  # FSDP has not dropped it
                entries[local] = before
        if not torch.is_grad_enabled():  # otherwise a backward pass is to come
            reshard(model)


def shard_axis(parameter: Any) -> int:
    """The axis of the mesh over which a sharded parameter is spread; HSDP has another one."""
    (axis,) = (i for i, one in enumerate(parameter.placements) if not one.is_replicate())
    return axis


def without_row(parameter: Tensor, row: int) -> Tensor:
    """This rank's part of a parameter as a copy in which a row of the parameter is zero."""
    part = local_part(parameter).clone()
    if not is_part(parameter):
        part[row] = 0
        return part
    any_parameter: Any = parameter
    axis = shard_axis(any_parameter)
    if any_parameter.placements[axis].dim == 0:
        # As torch.chunk: all ranks but the last ones have equally many rows.
        mesh = any_parameter.device_mesh
        row -= mesh.get_local_rank(axis) * -(-len(parameter) // mesh.size(axis))
    if 0 <= row < len(part):
        part[row] = 0
    return part


def sum_over_parts(sums: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Each parameter's sum over its parts on all ranks, from that over this rank's part.

    Collective if any parameter is sharded.
    """
    sums = list(sums)
    by_group: dict[Any, list[int]] = {}
    for i, p in enumerate(parameters):
        if is_part(p):
            group = p.device_mesh.get_group(shard_axis(p))  # pyright: ignore[reportAttributeAccessIssue]
            by_group.setdefault(group, []).append(i)
    for group, indices in by_group.items():
        of_all = torch.stack([sums[i] for i in indices])
        dist.all_reduce(of_all, group=group)
        for i, total in zip(indices, of_all, strict=True):
            sums[i] = total
    return sums


def squared_norms(
    parameters: Sequence[Tensor],
    rows: Mapping[int, int] = {},  # noqa: B006
    mean: float = 0.0,
) -> Tensor:
    """‖θ − mean‖² of each parameter in float64; collective if any is sharded.

    ``rows`` has, by a parameter's number, the row of it that is left out.
    """
    sums = []
    for i, p in enumerate(parameters):
        difference = local_part(p).double() - mean
        if i in rows:
            difference *= without_row(torch.ones_like(p), rows[i])
        sums.append(difference.square().sum())
    return torch.stack(sum_over_parts(sums, parameters))
