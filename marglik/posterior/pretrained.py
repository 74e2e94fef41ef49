"""Parameters of networks that were trained elsewhere, from the usual checkpoint files."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from marglik.storage.model_state import check_state, read_safetensors

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
        ValueError: a file that is damaged, holds more than tensors, or fits another network.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No checkpoint at {path}.")
    own = model.state_dict()
    state, note = _without_prefix(_read(path), set(own))
    check_state(model, state, str(path))
    model.load_state_dict(state)
    cast = [n for n, t in state.items() if t.is_floating_point() and t.dtype != own[n].dtype]
    if cast:
        was, now = state[cast[0]].dtype, own[cast[0]].dtype
        casting = f"{len(cast)} tensors were cast from {was} to {now}"
        return f"{note}; {casting}" if note else casting
    return note


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{path} has suffix {path.suffix!r}; supported are {', '.join(SUFFIXES)}. Save the "
            "network's state_dict() as one of them."
        )
    if path.suffix == ".safetensors":
        return _checked(read_safetensors(path), path)
    if zipfile.is_zipfile(path):
        _check_stored(path)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the broken file leads to
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"it holds {unknown[1]}, and loading objects can run code"
            if unknown
            else f"it is damaged, or another program wrote it ({type(error).__name__})"
        )
        raise ValueError(
            f"{path} could not be read as a file of tensors: {reason}. Save the network's "
            "state_dict(), preferably as safetensors."
        ) from error
    for key in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    return _checked(content, path)


def _check_stored(path: Path) -> None:
    """Raise a ValueError if tensors are compressed, which torch.save never does.

    A few kilobytes could then take all memory before any shape is seen.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [i for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError, ValueError):
        return  # torch.load says what is wrong
    if packed:
        raise ValueError(
            f"{path} was not written by torch.save, as '{packed[0].filename}' in it is compressed. "
            "Save the network's state_dict(), preferably as safetensors."
        )


def _checked(content: Any, path: Path) -> dict[str, Tensor]:
    tensors = isinstance(content, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    )
    if not tensors or not content:
        raise ValueError(
            f"{path} holds no state dict, neither at the top nor under {', '.join(NESTED)}. Save "
            "the network's state_dict()."
        )
    return dict(content)


def _without_prefix(
    state: dict[str, Tensor], names: set[str]
) -> tuple[dict[str, Tensor], str | None]:
    """The state without the prefixes of wrappers, and a note on them; unchanged if a name fits."""
    taken = ""
    while not names & set(state):
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in state)), None)
        if prefix is None:
            break
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        taken += prefix
    return state, f"the prefix {taken!r} was removed from all names" if taken else None
