"""Store of the scores of `influence` in a folder, from which another call continues.

``influence.json`` identifies the computation by checksums of the network, the posterior, the data
and the options. The queries come in chunks. A chunk has the solutions S_q of its queries
(``solved-CHUNK.safetensors``, until its scores are complete), and then its scores
(``scores-CHUNK.safetensors``). All files are written atomically, with checksums.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
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
        identity = identity | {"the training data": data_identity(train, options)[0]}
        before = read_record(self.folder / RECORD).get("identity", identity)
        if other := [name for name in identity if before.get(name) != identity[name]]:
            raise ValueError(
                f"{self.folder} has the scores of another computation. It differs in "
                f"{', '.join(other)}. Pass the same as before, or another folder."
            )
        remove_leftovers(self.folder)
        write_record(self.folder / RECORD, {"identity": identity})

    def scores(self, chunk: int) -> tuple[Tensor | None, int]:
        """Return a chunk's scores (Q, n), None if there are none; and its queries' batches."""
        path = self._path("scores", chunk)
        if not path.exists():
            return None, 0
        tensors, record = read_tensors(path, kind="scores")
        return tensors["scores"], int(record["batches"])

    def save_scores(self, chunk: int, scores: Tensor, batches: int) -> None:
        """Write a chunk's scores, in place of its solutions S_q."""
        write_tensors(self._path("scores", chunk), {"scores": scores}, {"batches": str(batches)})
        self._path("solved", chunk).unlink(missing_ok=True)

    def solved(self, chunk: int, device: torch.device) -> dict[str, Tensor] | None:
        """Return a chunk's solutions S_q; None if there are none."""
        path = self._path("solved", chunk)
        return read_tensors(path, device, kind="gradients")[0] if path.exists() else None

    def save_solved(self, chunk: int, solved: dict[str, Tensor]) -> None:
        """Write a chunk's solutions S_q."""
        # Copy them, because the solutions of a block with several tensors are parts of one tensor.
        whole = torch.contiguous_format
        copies = {name: S.clone(memory_format=whole) for name, S in solved.items()}
        write_tensors(self._path("solved", chunk), copies)

    def _path(self, kind: str, chunk: int) -> Path:
        return self.folder / f"{kind}-{chunk:05}.safetensors"


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
