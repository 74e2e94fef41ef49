"""Read tensors from safetensors or npz files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from marglik.application.data.splits import (
    DataSource,
    Splits,
    pixel_statistics,
)

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("x_validation", "y_validation")


class TensorFile(DataSource):
    """Inputs and targets from a safetensors or npz file: images, or tensors of any kind.

    The file contains ``x_train``, ``y_train``, ``x_test`` and ``y_test``, and optionally
    ``x_validation`` with ``y_validation``. The first axis of each tensor has the examples. Other
    axes and dtypes are free. Floating-point numbers of an npz file become float32. Inputs in uint8
    with axes (N, C, H, W) are images. They are normalised by the training pixels, and may be
    augmented. Other values are used unchanged, so standardise them before saving. Write the file
    with ``safetensors.torch.save_file({"x_train": x, ...}, path)`` or ``numpy.savez(path,
    x_train=x, ...)``. Nothing is unpickled, so a file of unknown origin cannot run code.

    Args:
        path: the file.
        name: name of the data in tables and figures; the name of the file if not given.
    """

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path).expanduser()
        self.name = name or self.path.stem

    def load(self) -> Splits:
        """Return the data.

        Raises:
            ValueError: the file is damaged, or not a safetensors or npz file; a tensor is missing,
                unknown, empty or not finite; inputs and targets do not fit together; or the splits
                do not fit together.
        """
        try:
            tensors = _read(self.path)
        except Exception as error:  # safetensors, zipfile, zlib and numpy raise various ones
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"'{self.path}' is damaged, or not a safetensors or npz file ({reason}). Write it "
                "with safetensors.torch.save_file or numpy.savez. If you transferred it, transfer "
                "it again."
            ) from error
        # Reject unknown names. Otherwise a misspelt x_validation would be silently omitted.
        expected = {*REQUIRED, *(OPTIONAL if {*OPTIONAL} & tensors.keys() else ())}
        if tensors.keys() != expected:
            raise ValueError(
                f"'{self.path}' contains {', '.join(sorted(tensors)) or 'nothing'}. Required are "
                f"{', '.join(REQUIRED)}; optional are {' and '.join(OPTIONAL)}. Save, rename or "
                "remove the other tensors."
            )
        if self.path.suffix == ".npz":  # numpy's default dtype is float64
            for name, tensor in tensors.items():
                if tensor.is_floating_point():
                    subject = f"'{self.path}': {name}"
                    tensors[name] = torch.from_numpy(in_float32(subject, tensor.double().numpy()))
        train, validation, test = (
            (tensors[f"x_{split}"], tensors[f"y_{split}"]) if f"x_{split}" in expected else None
            for split in ("train", "validation", "test")
        )
        assert train is not None and test is not None
        splits, x = Splits(train, validation, test, self.name), train[0]
        if x.dtype != torch.uint8 or x.dim() != 4:
            return splits
        _, C, _, W = x.shape
        if C not in (1, 3) and W in (1, 3):
            raise ValueError(
                f"'{self.path}': x_train has shape {tuple(x.shape)}. It seems to contain images "
                "with the channels last, but images are (N, C, H, W). Save x.transpose(0, 3, 1, "
                "2)."
            )
        mean, std = pixel_statistics(x)
        return replace(splits, mean=mean, std=std)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".npz":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def in_float32(subject: str, values: np.ndarray) -> np.ndarray:
    """Return float64 values in float32, the dtype of networks. NaN and infinity stay as they are.

    Raises:
        ValueError: float32 cannot represent the values or their differences. Its range is 1e-38 to
            3e38, and it has seven digits; 1e9 + 0.5 needs more.
    """
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if not values.size or not np.isfinite(values).all():
        return rounded
    largest, is_constant = np.abs(values).max(), values.min() == values.max()
    std = 0.0 if is_constant else (values / largest).std() * largest  # squares might overflow
    lost = np.abs(rounded - values).max()
    if not np.isfinite(lost) or (not is_constant and (lost > 0.01 * std or std < TINY)):
        raise ValueError(
            f"{subject} has values from {values.min():.6g} to {values.max():.6g}, with a standard "
            f"deviation of {std:.3g}. Networks compute in float32, which has seven digits and a "
            "range from 1e-38 to 3e38. It cannot represent the differences. Subtract the mean, or "
            "divide the values by a number."
        )
    return rounded


TINY = float(np.finfo(np.float32).tiny)
"""Smallest positive float32 number with full precision."""
