"""A network's parameters and buffers: read, checked against the network, and put into it."""

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = [
    "check_state",
    "names_replaced",
    "read_safetensors",
    "read_state",
    "tensors_of",
    "tensors_of_others",
]


def tensors_of_others(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """A network's parameters but for those of these names, themselves, as its state dict has them.

    With the names of the trainable ones: the frozen base, of LoRA say.
    """
    named = dict(model.named_parameters())
    left_out = {id(named[name]) for name in names if name in named}
    everything = model.state_dict(keep_vars=True).items()  # tied ones under each of their names
    return {
        name: p for name, p in everything if isinstance(p, nn.Parameter) and id(p) not in left_out
    }


def names_replaced(model: nn.Module) -> set[str]:
    """Names in the state dict of what peft keeps beside a trained copy that runs in its place.

    Such as the first head of a classifier (``modules_to_save``), which starts from random numbers:
    two networks with the same adapters on the same base differ in it, and predict the same.
    """
    replaced: set[str] = set()
    for prefix, module in model.named_modules():
        children = dict(module.named_children())
        if {"original_module", "modules_to_save"} <= children.keys():
            if not getattr(module, "disable_adapters", False):
                state = children["original_module"].state_dict()
                replaced |= {f"{prefix}.original_module.{name}" for name in state}
    return replaced


def tensors_of(model: nn.Module, without: Iterable[str] = ()) -> dict[str, Tensor]:
    """Copies of a network's parameters and buffers, as safetensors takes them.

    Args:
        model: the network.
        without: names in its state dict that are left out.

    Raises:
        ValueError: a state dict that holds something else than tensors.
    """
    left_out = set(without)
    state = {name: value for name, value in model.state_dict().items() if name not in left_out}
    other = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if other:
        raise ValueError(
            f"'{other[0]}' in the state dict of {type(model).__name__} is no tensor but "
            f"{type(state[other[0]]).__name__}, which a posterior cannot be saved with. Take it "
            "out of the state dict (get_extra_state)."
        )
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file.

    Raises:
        ValueError: a broken file.
    """
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def read_state(
    model: nn.Module, path: str | Path, without: Iterable[str] = ()
) -> dict[str, Tensor]:
    """The tensors of a safetensors file, found to be those that a network needs.

    Args:
        model: the network.
        path: the file.
        without: names in the network's state dict that the file need not have.

    Raises:
        ValueError: a file that is broken, or of a network with other names, shapes or dtypes.
    """
    state, own = read_safetensors(path), model.state_dict()
    check_state(model, state | {name: own[name] for name in without}, str(path))
    for name, tensor in state.items():
        if own[name].dtype != tensor.dtype:  # they would be rounded
            raise ValueError(
                f"{path} holds '{name}' in {tensor.dtype}, {type(model).__name__} has it in "
                f"{own[name].dtype}; pass the network as model.to({tensor.dtype})."
            )
    return state


def check_state(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Raise a ValueError unless a state fits a network, naming the first tensor that does not."""
    own, kind = model.state_dict(), type(model).__name__
    for name in own:
        if name not in state:
            raise ValueError(
                f"{source} is of another network: it lacks '{name}', which {kind} has. Pass the "
                "network's class and options as they were (--model)."
            )
        if state[name].shape != own[name].shape:
            raise ValueError(
                f"{source} is of another network: '{name}' has shape {tuple(state[name].shape)}, "
                f"{kind} has {tuple(own[name].shape)}. Pass the options as they were (--model)."
            )
    extra = [name for name in state if name not in own]
    if extra:
        raise ValueError(
            f"{source} is of another network: {kind} has no '{extra[0]}'. Pass the network's class "
            "and options as they were (--model)."
        )
