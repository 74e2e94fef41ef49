"""Data of any kind from one safetensors file."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from marglik.data.source import DataSource
from marglik.data.tensor_splits import TensorSplits

__all__ = ["TensorFile"]

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("x_validation", "y_validation")


class TensorFile(DataSource):
    """Inputs and targets from a safetensors file, for regression or several labels at once.

    The file holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``, and ``x_validation`` with
    ``y_validation`` if there is a validation set; examples come first, and shapes and dtypes are
    otherwise free. Values are used as they are: standardise them before they are saved. Write
    it by ``safetensors.torch.save_file({"x_train": x, ...}, path)``. Nothing is unpickled, so that
    a file of unknown origin runs no code.

    Args:
        path: the file.
        name: what tables and figures call the data; the file's name if not given.
    """

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path).expanduser()
        self.name = name or self.path.stem

    def load(self) -> TensorSplits:
        """Return the data.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is no safetensors file or damaged, if a tensor is missing, unknown,
                empty or not finite, or if inputs and targets, or the splits, do not fit together.
        """
        tensors = self._read()
        train, test = (
            (tensors[f"x_{split}"], tensors[f"y_{split}"]) for split in ("train", "test")
        )
        validation = None
        if OPTIONAL[0] in tensors:
            validation = tensors[OPTIONAL[0]], tensors[OPTIONAL[1]]
        return TensorSplits(train, validation, test, self.name)

    def _read(self) -> dict[str, Tensor]:
        if not self.path.is_file():
            raise FileNotFoundError(
                f"'{self.path}' is not a file. Give the path of a safetensors file with "
                f"{', '.join(REQUIRED)}."
            )
        try:
            with safe_open(self.path, framework="pt") as file:
                self._check_names(set(file.keys()))
                return {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"'{self.path}' is not a safetensors file, or damaged ({reason}). Write it by "
                "safetensors.torch.save_file; if it was transferred, fetch it again."
            ) from error

    def _check_names(self, names: set[str]) -> None:
        there = ", ".join(sorted(names)) or "nothing"
        wanted = REQUIRED + (OPTIONAL if names & set(OPTIONAL) else ())
        missing = [name for name in wanted if name not in names]
        if missing:
            raise ValueError(
                f"'{self.path}' lacks {', '.join(missing)} (it holds {there}). Save inputs and "
                "targets of each split under these names; a validation set is optional."
            )
        unknown = sorted(names.difference(wanted))
        if unknown:
            raise ValueError(
                f"'{self.path}' holds {', '.join(unknown)}, which nothing would read; supported "
                f"are {', '.join(REQUIRED + OPTIONAL)}. Rename or remove what is unknown."
            )
