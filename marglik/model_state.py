"""A network's parameters and buffers: read, checked against the network, and put into it."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["check_state", "load_state", "read_safetensors", "tensors_of"]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a network's parameters and buffers, as safetensors takes them.

    Raises:
        ValueError: a state dict that holds something else than tensors.
    """
    state = model.state_dict()
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


def load_state(model: nn.Module, path: str | Path) -> None:
    """Put the tensors of a safetensors file into a network.

    Raises:
        ValueError: a file that is broken, or of a network with other names, shapes or dtypes.
    """
    state = read_safetensors(path)
    check_state(model, state, str(path))
    for name, own in model.state_dict().items():
        if own.dtype != state[name].dtype:  # they would be rounded
            raise ValueError(
                f"{path} holds '{name}' in {state[name].dtype}, {type(model).__name__} has it in "
                f"{own.dtype}; pass the network as model.to({state[name].dtype})."
            )
    model.load_state_dict(state)


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
