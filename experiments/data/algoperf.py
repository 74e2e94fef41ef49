"""ogbg-molpcba and ImageNet as MLCommons AlgoPerf trains on them, for training by step numbers.

A data set here has ``batch(indices, seed)`` for training and ``validation(indices)``, both
(inputs, targets), and the numbers of examples. What is random in a batch depends on its seed alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Beta
from torch.nn.functional import one_hot
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from experiments.models.algoperf import Molecules
from kfac_backend.atomic_files import read_tensors, write_tensors
from marglik.graphs import Graphs


@dataclass(frozen=True)
class MoleculeData:
    """Molecules with 128 properties, each 0, 1 or unknown."""

    train: tuple[Molecules, Tensor]
    """The molecules and targets (N, C); 0 if unknown."""
    held_out: tuple[Molecules, Tensor]

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of training and of validation examples."""
        return len(self.train[1]), len(self.held_out[1])

    def batch(self, indices: Tensor, seed: int) -> tuple[Molecules, Tensor]:
        """Some training examples."""
        return self.train[0][indices], self.train[1][indices]

    def validation(self, indices: Tensor) -> tuple[Molecules, Tensor]:
        """Some validation examples."""
        return self.held_out[0][indices], self.held_out[1][indices]


def molpcba(folder: str | Path) -> MoleculeData:
    """Return ogbg-molpcba with OGB's split by scaffolds; the first call downloads it.

    The graphs are kept in a file beside those of ogb, which unpickles its own.

    Raises:
        ModuleNotFoundError: the package ogb is not installed.
    """
    own = Path(folder, "ogbg_molpcba")
    cached = own / "graphs.safetensors"
    if not cached.is_file():
        try:
            from ogb.graphproppred import (  # pyright: ignore[reportMissingImports]
                GraphPropPredDataset,
            )
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "ogbg-molpcba needs the package ogb. Install it: pip install 'marglik[algoperf]'."
            ) from error
        # torch refuses this file of an earlier call, and ogb makes it anew from the raw data.
        (own / "processed/data_processed").unlink(missing_ok=True)
        data = molecules_of(GraphPropPredDataset("ogbg-molpcba", str(folder)))
        parts = {"train": data.train, "held_out": data.held_out}
        tensors = {
            f"{part}.{name}": tensor.clone(memory_format=torch.contiguous_format)
            for part, (x, y) in parts.items()
            for name, tensor in {**vars(x.graphs), "known": x.known, "y": y}.items()
        }
        write_tensors(cached, tensors, {})
    tensors, _ = read_tensors(cached, kind="molecules")

    def part(name: str) -> tuple[Molecules, Tensor]:
        own = {k.partition(".")[2]: t for k, t in tensors.items() if k.startswith(f"{name}.")}
        known, y = own.pop("known"), own.pop("y")
        return Molecules(Graphs(**own), known), y

    return MoleculeData(part("train"), part("held_out"))


def molecules_of(dataset: Any) -> MoleculeData:
    """The training and validation molecules of a ``GraphPropPredDataset`` of ogb."""
    split = dataset.get_idx_split()

    def part(indices: Any) -> tuple[Molecules, Tensor]:
        chosen = [dataset.graphs[int(i)] for i in indices]
        labels = torch.from_numpy(np.asarray(dataset.labels)[np.asarray(indices)]).float()
        node_counts = torch.tensor([graph["num_nodes"] for graph in chosen])
        edge_counts = torch.tensor([graph["edge_index"].shape[1] for graph in chosen])
        first = (node_counts.cumsum(0) - node_counts).repeat_interleave(edge_counts)
        ends = torch.from_numpy(np.concatenate([graph["edge_index"] for graph in chosen], 1))
        nodes, edges = (
            torch.from_numpy(np.concatenate([graph[key] for graph in chosen])).float()
            for key in ("node_feat", "edge_feat")
        )
        senders, receivers = (ends.long() + first).unbind()
        graphs = Graphs(nodes, edges, senders, receivers, node_counts, edge_counts).check()
        known = ~labels.isnan()
        return Molecules(graphs, known), labels.nan_to_num()

    return MoleculeData(part(split["train"]), part(split["valid"]))


class ImageData:
    """Images of a folder ``train/CLASS/IMAGE`` and ``val/CLASS/IMAGE``.

    Training images have random crops and flips, RandAugment (two operations, magnitude 15) and
    mixup (α = 0.2), as AlgoPerf's vision transformer; targets are then shares of the classes.

    Args:
        folder: the folder.
        image_size: height and width of a crop.
        augment: whether to use RandAugment and mixup.
    """

    def __init__(self, folder: str | Path, image_size: int = 224, augment: bool = True) -> None:
        scale = [v2.ToImage(), v2.ToDtype(torch.float32, True)]
        scale.append(v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
        more = [v2.RandAugment(2, 15)] if augment else []
        crop = [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip(), *more]
        # The shorter side is 8/7 of the crop: 256 pixels for 224.
        centre = [v2.Resize(round(image_size * 8 / 7)), v2.CenterCrop(image_size)]
        self.train = ImageFolder(str(Path(folder, "train")), v2.Compose([*crop, *scale]))
        self.held_out = ImageFolder(str(Path(folder, "val")), v2.Compose([*centre, *scale]))
        if self.train.classes != self.held_out.classes:
            raise ValueError(
                f"'{folder}' has {len(self.train.classes)} classes in train/ and "
                f"{len(self.held_out.classes)} in val/. Both need folders of the same names."
            )
        self._augment = augment

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of training and of validation examples."""
        return len(self.train), len(self.held_out)

    def image(self, index: int, seed: int) -> tuple[Tensor, int]:
        """One augmented training image and its class."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 2**24 + index)
            return self.train[index]

    def batch(self, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Some training examples, with the shares (N, C) of the classes."""
        return self.mixed([self.image(int(i), seed) for i in indices], seed)

    def mixed(self, images: list[tuple[Tensor, int]], seed: int) -> tuple[Tensor, Tensor]:
        """A batch of single images, each mixed with the one before it."""
        x = torch.stack([image for image, _ in images])
        y = one_hot(torch.tensor([label for _, label in images]), len(self.train.classes)).float()
        if not self._augment:
            return x, y
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            weight = Beta(0.2, 0.2).sample()
        return tuple(weight * z + (1 - weight) * z.roll(1, 0) for z in (x, y))  # pyright: ignore

    def validation(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Some validation examples, with their classes as shares."""
        images = [self.held_out[int(i)] for i in indices]
        classes = torch.tensor([label for _, label in images])
        shares = one_hot(classes, len(self.held_out.classes)).float()
        return torch.stack([image for image, _ in images]), shares
