"""Store of the scores of `influence` in a folder, from which another call continues.

``influence.json`` identifies the computation by checksums of the network, the posterior, the data
and the options. The queries come in chunks. A chunk has the solutions S_q of its queries
(``solved-CHUNK.safetensors``, until its scores are complete). Its scores come in several files
(``scores-CHUNK-PART.safetensors``), in the order of the training examples. All files are written
atomically, with checksums.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfac_backend.atomic_files import (
    read_tensors,
    remove_leftovers,
    sha256_of_tensors,
    write_tensors,
)
from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.engine.batches import num_examples, split_batch
from kfac_backend.options import TargetOptions
from kfac_backend.ranks import Ranks
from marglik.posterior.posterior import Posterior
from marglik.storage.record_files import read_record, write_record

RECORD = "influence.json"
SECONDS = 60.0
"""Minimum time between two parts of the scores."""


class ScoreStore:
    """Scores and solutions S_q in a folder; each of several ranks has its own subfolder.

    Args:
        folder: the folder; created if it does not exist.
        identity: maps each part of the computation, except the training data, to a text that
            identifies it. A stored identity must be equal.
        train: the training data of this rank.
        options: options for splitting its batches.
        ranks: the ranks that compute together.

    Raises:
        ValueError: the folder has the scores of another computation, or a damaged file.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: dict[str, str],
        train: Iterable[Any],
        options: TargetOptions,
        ranks: Ranks,
    ) -> None:
        self.folder = Path(folder)
        if ranks.size > 1:
            self.folder /= f"rank-{ranks.rank}-of-{ranks.size}"
        of_train, sizes = data_identity(train, options)
        identity = identity | {"the training data": of_train}
        self.num_train = sum(sizes)
        """Number of training examples."""
        self._last = time.monotonic()
        before = read_record(self.folder / RECORD).get("identity", identity)
        if other := [name for name in identity if before.get(name) != identity[name]]:
            raise ValueError(
                f"{self.folder} has the scores of another computation. It differs in "
                f"{', '.join(other)}. Pass the same as before, or another folder."
            )
        remove_leftovers(self.folder)
        write_record(self.folder / RECORD, {"identity": identity})

    def scores(self, chunk: int) -> tuple[list[Tensor], int]:
        """Return the parts of a chunk's scores (Q, n), and the number of its queries' batches."""
        paths = sorted(self.folder.glob(f"scores-{chunk:05}-*.safetensors"))
        files = [read_tensors(path, kind="scores") for path in paths]
        return [one["scores"] for one, _ in files], int(files[0][1]["batches"]) if files else 0

    def solved(self, chunk: int, device: torch.device) -> dict[str, Tensor] | None:
        """Return a chunk's solutions S_q; None if there are none."""
        path = self._solved(chunk)
        return read_tensors(path, device, kind="gradients")[0] if path.exists() else None

    def save_solved(self, chunk: int, solved: dict[str, Tensor]) -> None:
        """Write a chunk's solutions S_q."""
        # Copy them, because the solutions of a block with several tensors are parts of one tensor.
        whole = torch.contiguous_format
        copies = {name: S.clone(memory_format=whole) for name, S in solved.items()}
        write_tensors(self._solved(chunk), copies)

    def saver(self, chunk: int, start: int, batches: int) -> Callable[[list[Tensor]], None]:
        """Return a function that moves a chunk's new scores, a list of (Q, n), to the store.

        It writes them at most once in `SECONDS`, and at the end. ``start`` is the number of
        training examples with stored scores, ``batches`` is the number of the queries' batches.
        """
        done = start

        def save(new: list[Tensor]) -> None:
            nonlocal done
            end = done + sum(part.shape[1] for part in new)
            if end < self.num_train and time.monotonic() - self._last < SECONDS:
                return
            # The number of the first example has ten digits, so that sorted names are in order.
            path = self.folder / f"scores-{chunk:05}-{done:010}.safetensors"
            write_tensors(path, {"scores": torch.cat(new, 1)}, {"batches": str(batches)})
            done, self._last = end, time.monotonic()
            new.clear()
            if end == self.num_train:
                self._solved(chunk).unlink(missing_ok=True)

        return save

    def _solved(self, chunk: int) -> Path:
        return self.folder / f"solved-{chunk:05}.safetensors"


def posterior_identity(posterior: Posterior, factors: KroneckerFactors) -> dict[str, str]:
    """Return checksums of the network and of its posterior, by the names that errors use."""
    numbers = posterior.prior_precision, posterior.sigma_noise
    others = f"{posterior.likelihood} {posterior.temperature} {posterior.options.to_json()}"
    of_posterior = sha256_of_tensors([*factors.state_dict()["tensors"].values(), *numbers])
    return {
        "the network": sha256_of_tensors(posterior.model.state_dict().values()),
        "the posterior": f"{of_posterior} {others}",
    }


def data_identity(data: Iterable[Any], options: TargetOptions) -> tuple[str, list[int]]:
    """Return the sum of a data set's values, and the number of examples of each batch.

    The sum does not depend on how the data is divided into batches, unless they are padded.
    """
    sums, sizes = dict[str, Any](), list[int]()
    for batch in data:
        sizes.append(num_examples(split_batch(batch, options)[1]) or 0)
        for name, value in _values(batch, ""):
            if isinstance(value, Tensor):
                name += f" {value.dtype} {tuple(value.shape[1:])}"
                value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            content = value if isinstance(value, np.ndarray) else repr(value).encode()
            sums.setdefault(name, hashlib.sha256()).update(content)
    return " ".join(f"{name} {one.hexdigest()}" for name, one in sums.items()), sizes


def _values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values in a batch, with their names.

    Raises:
        TypeError: it contains an object whose values are unknown.
    """
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key in value:
            yield from _values(value[key], f"{name}.{key}")
    elif value is None or isinstance(value, Tensor | str | int | float):
        yield name, value
    else:
        raise TypeError(
            f"A batch contains a {type(value).__name__}, whose values a store cannot compare. Pass "
            "batches of tensors, or no store."
        )
