"""Support models under `torch.distributed.fsdp.fully_shard`, with parameters spread over ranks.

FSDP gathers the parameters of a module before it runs, and drops them afterwards. At all other
times each rank has only its part of them, a DTensor. This has three consequences for a curvature
pass:

- Replacements of parameters are set while the module runs (`substituted`). For whole models
  `torch.func.functional_call` does this; here FSDP would undo it at each gathering.
- Differentiation with respect to a parameter needs a whole one. `whole_parameters` are tensors of
  its shape in FSDP's own memory. They have values as long as FSDP keeps them.
- Gathering is collective: all ranks must run the model equally often (`Driver`).

The code adds few gatherings to FSDP's own: it gathers each module once for its `whole_parameters`,
and in a K-FAC step with vectors once more (`gathered_again`).
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils import _pytree

from kfac_backend.atomic_files import sha256_of_tensors

_WHOLE: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
_RUNNING: set[int] = set()
"""Ids of the modules that run within `substituted`."""


def is_part(parameter: Tensor) -> bool:
    """Return whether this is a DTensor, of which each rank has a part."""
    return hasattr(parameter, "to_local")


def whole_shape(parameter: Tensor) -> Tensor:
    """Return the parameter, or for a sharded one a tensor of its shape and dtype without values.

    Reading a row of a DTensor would gather it.
    """
    if not is_part(parameter):
        return parameter
    one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return one.expand(parameter.shape)


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter or gradient, in the same memory."""
    value = parameter.detach()
    return value.to_local() if hasattr(value, "to_local") else value  # pyright: ignore


def local_parts(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return `local_part` of each. Within ``no_grad`` whole parameters are returned unchanged.

    A call for each would slow small steps.
    """
    is_detached = torch.is_grad_enabled()
    values = [p.detach() for p in parameters] if is_detached else parameters
    return [v.to_local() if hasattr(v, "to_local") else v for v in values]  # pyright: ignore


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules for which `fully_shard` was called."""
    # Importing it takes long, and without an import nothing can be sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    # `fully_shard` derives a class for each class of modules that it changes.
    if kind is None or not kind.__subclasses__():
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model, or a part of it, is under `fully_shard`."""
    return bool(sharded_modules(model))


def class_and_hooks(module: nn.Module) -> tuple[type[nn.Module], list[Any]]:
    """Return a module's class and forward hooks, without those that `fully_shard` adds."""
    kind: Any = type(module)
    if kind.__bases__[0].__name__ == "FSDPModule":
        kind = kind.__bases__[1]  # of FSDPLinear(FSDPModule, Linear)
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    ours = [h for h in hooks if not (h.__module__ or "").startswith("torch.distributed.fsdp.")]
    return kind, ours


def ranks_of_model(model: nn.Module) -> int:
    """Return the number of ranks over which a sharded model is spread or replicated."""
    reshard(model)  # as in `check_sharding`
    return max(p.device_mesh.size() for p in model.parameters() if is_part(p))  # pyright: ignore


def check_sharding(model: nn.Module) -> None:
    """Raise an error if parameters are spread over ranks without `fully_shard`.

    Raises:
        NotImplementedError: FSDP1, tensor parallelism, or offloaded parameters.
    """
    way_out = (
        "Shard it only by torch.distributed.fsdp.fully_shard, keep it whole on each rank "
        "(DistributedDataParallel), or gather the parameters into another model "
        "(torch.distributed.checkpoint.state_dict.get_model_state_dict with "
        "full_state_dict=True)."
    )
    # A forward pass without a backward pass leaves the root's parameters gathered, but the caller
    # needs the parts.
    sharded = sharded_modules(model)
    for module in sharded:
        module.reshard()
    managed = {id(p) for module in sharded for p in module.parameters()}
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            subject = f"Layer '{name}'" if name else "The model"
            raise NotImplementedError(
                f"{subject} uses FSDP1 (FullyShardedDataParallel), which is not supported. "
                f"{way_out}"
            )
    for name, p in model.named_parameters():
        if type(p).__name__ == "FlatParameter":
            raise NotImplementedError(
                f"Parameter '{name}' is a FlatParameter of FSDP1, which is not supported. {way_out}"
            )
        placements = getattr(p, "placements", None)
        if placements is None:  # no DTensor
            continue
        if id(p) not in managed or sum(not one.is_replicate() for one in placements) != 1:
            raise NotImplementedError(
                f"Parameter '{name}' is sharded by tensor parallelism (a DTensor with placements "
                f"{placements}), so hooks would capture only a part of it. {way_out}"
            )
        if p.device.type != p.device_mesh.device_type:  # pyright: ignore[reportAttributeAccessIssue]
            raise NotImplementedError(
                f"Parameter '{name}' is offloaded to {p.device}, which is not supported. Shard "
                "without CPUOffloadPolicy."
            )


def check_whole(model: nn.Module, operation: str) -> None:
    """Raise a NotImplementedError for an operation that needs whole parameters on each rank."""
    if is_sharded(model):
        raise NotImplementedError(
            f"{operation} needs whole parameters on each rank, but {type(model).__name__} is under "
            "fully_shard. Gather them into another model "
            "(torch.distributed.checkpoint.state_dict.get_model_state_dict with "
            "full_state_dict=True), and pass the same factors to its posterior "
            "(posterior.restore(factors))."
        )


def reshard(model: nn.Module) -> None:
    """Drop all parameters that FSDP has gathered and still keeps, such as the root's."""
    for module in sharded_modules(model):
        module.reshard()


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Context after which nothing is gathered, also after an error."""
    try:
        yield
    finally:
        reshard(model)


@contextmanager
def gathered_again(model: nn.Module) -> Iterator[None]:
    """Context after which FSDP gathers again the parameters that were gathered before.

    It is for backward passes within a hook of another pass, which would find the parameters
    dropped. It also restores the replacements of `substituted`.
    """
    modules = sharded_modules(model)

    def is_gathered(module: nn.Module) -> bool:
        own = [p for p in module._parameters.values() if p is not None]
        children = (child for child in module.children() if child not in modules)
        return any(not is_part(p) for p in own) or any(map(is_gathered, children))

    before = [module for module in modules if is_gathered(module)]
    entries = [(m._parameters, m._parameters.copy()) for one in before for m in one.modules()]
    yield
    for module in before:
        module.unshard()
    for present, former in entries:
        # Parameters that were not gathered are unchanged, or the surrounding pass gathers them.
        present.update(
            {local: p for local, p in former.items() if p is not None and not is_part(p)}
        )


def detached_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters without a graph by first name; sharded ones as `whole_parameters`."""
    whole, first = whole_parameters(model), dict[int, tuple[str, Tensor]]()
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            p = whole.get(name, p)
            first.setdefault(id(p), (name, p.detach()))
    return dict(first.values())


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return each sharded parameter, under each of its names, as a whole tensor in FSDP's memory.

    It has values while FSDP keeps the module's parameters gathered. Otherwise it has no memory, and
    only its shape and dtype may be read. Collective at the first call for a model.
    """
    modules = sharded_modules(model)
    if not modules:
        return {}
    if model not in _WHOLE:
        reshard(model)
        parameters = {
            module: dict(module.named_parameters(name, recurse=False, remove_duplicate=False))
            for name, module in model.named_modules()
        }
        whole: dict[str, Tensor] = {}
        for sharded in modules:
            sharded.unshard()
            for module in sharded.modules():
                present = module.named_parameters(recurse=False, remove_duplicate=False)
                for (name, part), (_, p) in zip(parameters[module].items(), present, strict=True):
                    if is_part(part) and not is_part(p):
                        # The tensor itself, because a parameter with two names is one tensor.
                        whole[name] = p
            sharded.reshard()
        _WHOLE[model] = whole
    return _WHOLE[model]


def is_substituted(model: nn.Module) -> bool:
    """Return whether the model, or one that contains it, runs within `substituted`."""
    return id(model) in _RUNNING


@contextmanager
def substituted(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which tensors replace parameters and buffers of a sharded model.

    Each replaces a sharded parameter from FSDP's gathering until FSDP drops it.

    Args:
        model: the model.
        state: replacement of every parameter under each of its names.
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
                name = paths[module] + local
                if p is not None and not is_part(p) and name in whole and p is not state[name]:
                    put(module._parameters, local, state[name])

    handles = []
    try:
        for module, path in paths.items():
            for entries in (module._parameters, module._buffers):
                for local in list(entries):
                    if path + local in state and path + local not in whole:
                        put(entries, local, state[path + local])
        # Registered after FSDP's own hook, which gathers.
        handles = [m.register_forward_pre_hook(gathered) for m in sharded_modules(model)]
        for sharded in sharded_modules(model):
            gathered(sharded)  # FSDP may still keep parameters of an earlier run
        _RUNNING.update(map(id, paths))
        yield
    finally:
        _RUNNING.difference_update(map(id, paths))
        for handle in handles:
            handle.remove()
        for entries, local, before, value in reversed(replaced):
            if entries[local] is value:  # FSDP has not dropped it
                entries[local] = before
        if not torch.is_grad_enabled():  # otherwise a backward pass is to come
            reshard(model)


def shard_axis(parameter: Any) -> int:
    """Return the mesh axis over which a sharded parameter is spread; HSDP has another one."""
    (axis,) = (i for i, one in enumerate(parameter.placements) if not one.is_replicate())
    return axis


def local_row(parameter: Any, row: int) -> Tensor:
    """Return this rank's part of a parameter's row, in the same memory; it may be empty."""
    part = local_part(parameter)
    if is_part(parameter) and parameter.placements[axis := shard_axis(parameter)].dim == 0:
        # As in torch.chunk, all ranks except the last ones have equally many rows.
        mesh = parameter.device_mesh
        row -= mesh.get_local_rank(axis) * -(-len(parameter) // mesh.size(axis))
    return part[row] if 0 <= row < len(part) else part[:0]


def without_row(parameter: Tensor, row: int) -> Tensor:
    """Return this rank's part of a parameter as a copy with zeros in one row of the parameter."""
    copy = parameter.detach().clone()
    local_row(copy, row).zero_()
    return local_part(copy)


def part_of_whole(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's part of a whole tensor, spread like another one."""
    from torch.distributed.tensor import distribute_tensor

    spread = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return spread.to_local()


def with_local_parts(parameters: Iterable[Any], parts: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors spread like the parameters, from this rank's parts."""
    return [
        type(p).from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        if hasattr(p, "to_local")
        else part
        for p, part in zip(parameters, parts, strict=True)
    ]


PART = {"rank", "world_size", "step"}
"""Keys of `part_of_ranks`."""


def part_of_ranks(
    tensors: Iterable[Any], rank: int, world_size: int, step: int
) -> dict[str, int] | None:
    """Return the rank and step to which this part of a state belongs; None if none is sharded.

    Sharded tensors from a file do not show the rank to which they belonged.
    """
    is_sharded = any(isinstance(t, Tensor) and is_part(t) for t in tensors)
    return {"rank": rank, "world_size": world_size, "step": step} if is_sharded else None


def check_part(state: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Raise a ValueError unless a state is whole, or this rank's part."""
    part = state.get("part")
    if part is None:
        part = part_of_ranks(_pytree.tree_leaves(state), -1, 0, 0)
    if part is not None and (part["rank"], part["world_size"]) != (rank, world_size):
        of_rank = "an unknown rank" if part["rank"] < 0 else "rank {rank} of {world_size}"
        raise ValueError(
            f"The state belongs to {of_rank.format(**part)}, but this is rank {rank} of "
            f"{world_size}. Give each rank its own state. Or save a whole state, which any number "
            "of ranks can load: kfac_backend.sharding.gathered_state(state)."
        )


def digest(state: Any) -> str:
    """Return a hash of all whole tensors and plain data of a state. Ranks compare it on loading."""
    leaves, tree = _pytree.tree_flatten(state)
    tensors = [t for t in leaves if isinstance(t, Tensor) and not is_part(t)]
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    text = f"{tree} {others} {sha256_of_tensors(tensors)}"
    return blake2b(text.encode(), digest_size=8).hexdigest()


def gathered_state(state: Any) -> Any:
    """Return a state with each sharded tensor whole, on all ranks; collective.

    Whole states do not depend on the number of ranks. Save one, for example of
    `PriorLearner.state_dict`, and load it with another number of ranks.
    """
    if isinstance(state, Mapping) and state.keys() == PART:
        return None
    if isinstance(state, Mapping):
        return {key: gathered_state(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(gathered_state, state))
    return state.full_tensor() if isinstance(state, Tensor) and is_part(state) else state  # pyright: ignore


def sum_over_parts(sums: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Sum over all ranks' parts of each parameter, from this rank's sums.

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


def norms_over_parts(norms: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return each parameter's norm from this rank's norms; collective if any is sharded."""
    if not any(hasattr(p, "to_local") for p in parameters):
        return list(norms)
    return [s.sqrt() for s in sum_over_parts([norm.square() for norm in norms], parameters)]


def squared_norms(
    parameters: Sequence[Tensor],
    rows: Mapping[int, int] = {},  # noqa: B006
    mean: float = 0.0,
) -> Tensor:
    """Return ‖θ − mean‖² of each parameter in float64; collective if any is sharded.

    ``rows`` maps a parameter's number to a row that is left out.
    """
    sums = []
    for i, p in enumerate(parameters):
        difference = local_part(p).double() - mean
        if i in rows:
            difference *= without_row(torch.ones_like(p), rows[i])
        sums.append(difference.square().sum())
    return torch.stack(sum_over_parts(sums, parameters))
