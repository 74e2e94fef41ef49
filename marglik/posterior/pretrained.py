"""Networks that were trained elsewhere: their parameters, from the usual checkpoint files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.files import read_tensors
from marglik.storage.model_state import check_state

__all__ = ["load_pretrained"]

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
NESTED = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.")


def load_pretrained(model: nn.Module, path: str | Path) -> str | None:
    """Load a checkpoint's parameters into a network.

    Reads safetensors files, and files of torch.save with the restricted loader (``weights_only``),
    which runs no code from them. The state dict may be at the top or under "state_dict",
    "model_state_dict" or "model". If no name fits, prefixes that wrappers add to all names are
    removed ("module.", "_orig_mod.", "model.", "net.").

    Returns:
        A note on names and dtypes that were changed, or None.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is damaged, holds more than tensors, or fits another network; a
            tensor of another kind of number than the network's, or a sparse one.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No checkpoint at {path}.")
    own = model.state_dict()
    state, taken = _read(path), ""
    while not own.keys() & state.keys():
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in state)), None)
        if prefix is None:
            break
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        taken += prefix
    check_state(model, state, str(path))
    notes = [f"the prefix {taken!r} was removed from all names"] if taken else []
    cast = [name for name, tensor in state.items() if tensor.dtype != own[name].dtype]
    if cast:
        was, now = state[cast[0]].dtype, own[cast[0]].dtype
        notes.append(f"{len(cast)} tensors were cast from {was} to {now}")
    model.load_state_dict(state)
    return "; ".join(notes) or None


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{path} has suffix {path.suffix!r}; supported are {', '.join(SUFFIXES)}. Save the "
            "network's state_dict() as one of them."
        )
    if path.suffix == ".safetensors":
        return read_tensors(path, what="weights", of_others=True)[0]
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the broken file leads to
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} could not be read as a file of tensors: {reason} Save the network's "
            "state_dict(), preferably as safetensors."
        ) from error
    for key in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    is_state = isinstance(content, Mapping) and len(content) > 0
    if not is_state or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(
            f"{path} holds no state dict, neither at the top nor under {', '.join(NESTED)}. Save "
            "the network's state_dict()."
        )
    return dict(content)
