"""Copy, read and check a network's parameters and buffers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.atomic_files import read_tensors

NESTED = ("state_dict", "model_state_dict", "model")
"""Keys under which a checkpoint may have its state dict."""
PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
"""Prefixes that wrappers add to all names."""


def tensors_of_others(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters in the state dict of a network without ``names``, not copied.

    For the names of the trainable parameters, the result is the frozen base, for example of LoRA.
    """
    named = dict(model.named_parameters())
    left_out = {id(named[name]) for name in names if name in named}
    everything = model.state_dict(keep_vars=True).items()  # tied parameters have several names
    return {
        name: p for name, p in everything if isinstance(p, nn.Parameter) and id(p) not in left_out
    }


def names_replaced(model: nn.Module) -> set[str]:
    """Return names of parameters that never run, because peft runs a trained copy instead.

    An example is the original head of a classifier (``modules_to_save``), which has random initial
    values. Networks with the same base and adapters differ in these values, but predict the same.
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
    """Return copies of a network's parameters and buffers that safetensors can store.

    Args:
        model: the network.
        without: names in its state dict to omit.

    Raises:
        ValueError: the state dict contains something other than tensors.
    """
    left_out = set(without)
    state = {name: value for name, value in model.state_dict().items() if name not in left_out}
    other = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if other:
        raise ValueError(
            f"'{other[0]}' in the state dict of {type(model).__name__} is a "
            f"{type(state[other[0]]).__name__}. Only tensors can be saved. Remove it from the "
            "state dict (get_extra_state)."
        )
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def check_state(
    model: nn.Module, state: dict[str, Tensor], source: str, *, casts: bool = False
) -> None:
    """Raise a ValueError that names the first tensor of a state that does not fit a network.

    With ``casts``, tensors of another precision fit, too, because ``load_state_dict`` casts them.
    """
    own, kind = model.state_dict(), type(model).__name__
    for name in own | state:
        there, here = (_described(of.get(name), casts) for of in (state, own))
        if there != here:
            raise ValueError(
                f"{source} belongs to another network: '{name}' {there} there, but {here} in "
                f"{kind}. Pass the class, options and dtype of the training (--model)."
            )


def _described(tensor: Tensor | None, casts: bool) -> str:
    if tensor is None:
        return "does not exist"
    if tensor.layout != torch.strided:
        return f"is {tensor.layout}"
    shape = f"has shape {tuple(tensor.shape)}"
    if not casts:
        return f"{shape} in {tensor.dtype}"
    floating, is_complex = tensor.is_floating_point(), tensor.is_complex()
    dtype = "" if floating else " of complex numbers" if is_complex else " of whole numbers"
    return f"{shape}{dtype}"


# Networks that were trained elsewhere


def load_pretrained(model: nn.Module, path: str | Path) -> str | None:
    """Load the parameters of a checkpoint into a network.

    It reads .safetensors files, and files of torch.save with the restricted loader
    (``weights_only``), which runs no code. The state dict may be at the top or under "state_dict",
    "model_state_dict" or "model". If no name fits, it removes prefixes that wrappers add to all
    names ("module.", "_orig_mod.", "model.", "net.").

    Returns:
        A note on changed names and dtypes, or None.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, contains other objects than tensors, or belongs to another
            network; or a tensor is sparse or has another kind of number than in the network.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"No checkpoint at {path}. Pass a safetensors file, or a state dict from torch.save."
        )
    own = model.state_dict()
    state, prefixes = _read_checkpoint(path), ""
    while not own.keys() & state.keys():
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in state)), None)
        if prefix is None:
            break
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        prefixes += prefix
    if {"mean", "std"} <= state.keys() - own.keys():
        raise ValueError(
            f"{path} belongs to a network within a marglik.models.Standardised, which marglik "
            "train adds to the network of a table. Pass Standardised as --model, with the network "
            "as its model, and mean and std of the model in posterior.json of the run. Or evaluate "
            "the posterior of the run (marglik evaluate)."
        )
    check_state(model, state, str(path), casts=True)
    notes = [f"the prefix {prefixes!r} was removed from all names"] if prefixes else []
    cast = [name for name, tensor in state.items() if tensor.dtype != own[name].dtype]
    if cast:
        was, now = state[cast[0]].dtype, own[cast[0]].dtype
        notes.append(f"{len(cast)} tensors were cast from {was} to {now}")
    model.load_state_dict(state)
    return "; ".join(notes) or None


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_tensors(path, kind="weights", of_others=True)[0]
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load may raise any error for a broken file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} cannot be read as a file of tensors: {reason} Save the network's "
            "state_dict(), preferably as safetensors."
        ) from error
    for key in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    is_state = isinstance(content, Mapping) and len(content) > 0
    if not is_state or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(
            f"{path} contains no state dict, neither at the top nor under {', '.join(NESTED)}. "
            "Save the network's state_dict()."
        )
    return dict(content)
