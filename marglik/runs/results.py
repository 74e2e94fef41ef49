"""The results of `marglik train`, as ``results.json`` has them, and what identifies a run."""

import json
from typing import Any

from torch import nn

from kfac_backend.files import parse_json, sha256_of_tensors
from kfac_backend.ranks import RankError, Ranks
from marglik.data import ImageSplits, Splits
from marglik.data.images.out_of_distribution import OutOfDistributionImages
from marglik.data.record import tensors_in
from marglik.posterior.posterior import Posterior
from marglik.posterior.prior import precision_to_weight_decay
from marglik.runs.config import PriorConfig
from marglik.storage.checkpoint import check_same_run, differences
from marglik.storage.provenance import Provenance
from marglik.storage.record_file import read_posterior
from marglik.storage.run_folder import RESULTS, RunFolder
from marglik.training.loop import OnlineResult

__all__ = ["check_same_on_ranks", "metrics_of", "results_of", "run_identity", "saved_results"]

NOT_OF_THE_RESULT = (
    "output", "overwrite", "resume", "accelerator", "devices", "rank_timeout", "progress",
)  # fmt: skip
"""Options of the run that do not affect its results, and may differ when it is resumed."""


def run_identity(
    model: nn.Module,
    splits: Splits,
    ood_images: OutOfDistributionImages | None,
    options: dict[str, Any],
    provenance: Provenance,
) -> dict[str, Any]:
    """What identifies a run, as plain data: data, network, options.

    SHA-256 sums stand for all inputs, labels and initial parameters. A checkpoint is only resumed
    if its run has the same identity.
    """
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    of_run = {k: v for k, v in options["run"].items() if k not in NOT_OF_THE_RESULT}
    kind = "images" if isinstance(splits, ImageSplits) else "examples"
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    there = {name: part for name, part in parts.items() if part is not None}
    tensors = [tensor for part in there.values() for tensor in tensors_in(part)]
    identity: dict[str, Any] = {
        "data": splits.name,
        kind: {name: len(tensors_in(part)[-1]) for name, part in there.items()},
    }
    if isinstance(splits, ImageSplits):
        identity["normalisation"] = {"mean": list(splits.mean), "std": list(splits.std)}
    return identity | {
        "ood": None if ood_images is None else ood_images.name,
        "model": type(model).__name__,
        "model_options": (provenance.model or {}).get("init_args"),
        "config": options | {"run": of_run},
        "parameters": shapes,
        "sums": {
            kind: sha256_of_tensors(tensors),
            "ood": None if ood_images is None else sha256_of_tensors([ood_images.images]),
            "initial_parameters": sha256_of_tensors(model.state_dict().values()),
        },
    }


def check_same_on_ranks(identity: dict[str, Any], ranks: Ranks) -> None:
    """Raise a RankError that names what differs, on all ranks, unless all run the same run."""
    first, *others = ranks.gather(identity, "the start")
    for rank, other in enumerate(others, 1):
        for name, here, there in differences(first, json.loads(json.dumps(other))):
            raise RankError(
                f"The processes were started differently: {name} is {here} on rank 0, {there} on "
                f"rank {rank}. Start all with the same command, data and versions."
            )


def saved_results(folder: RunFolder, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The content of ``results.json`` in a folder, verified with all other files; None without it.

    Raises:
        FileNotFoundError: a file of the run is missing.
        ValueError: the results are of another run, or a file of the run was altered.
    """
    content = folder.read(RESULTS)
    if content is None:
        return None
    results = parse_json(content)
    there = {key: results.get(key) for key in identity}
    check_same_run(identity, there, folder.path)
    folder.check()
    read_posterior(folder.path)
    return results


def results_of(learned: OnlineResult, prior: PriorConfig) -> dict[str, Any]:
    """The part of the results that training found: evidence, noise and weight decays."""
    updates = [record for record in learned.records if record["kind"] == "update"]
    return {
        "num_data": learned.laplace.n_data,
        "evidence": {
            "first": updates[0]["evidence_before"] if updates else learned.evidence,
            "kept": learned.evidence,
            "epoch": learned.epoch,
        },
        "sigma_noise": (
            float(learned.laplace.sigma_noise)
            if learned.laplace.likelihood == "regression"
            else None
        ),
        "weight_decay": _weight_decay_table(learned.laplace, prior.weight_decay, prior.temperature),
    }


def metrics_of(label: str, evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics and intervals of each predictive, under names such as "learned, MAP"."""
    predictives = evaluation["predictives"].items()
    return {
        kind: {f"{label}, {name}": predictive[kind] for name, predictive in predictives}
        for kind in ("metrics", "intervals")
    }


def _weight_decay_table(
    laplace: Posterior, initial: float, temperature: float
) -> dict[str, dict[str, float]]:
    """Parameter name -> initial and learned weight decay, numbers of effective and all entries."""
    gamma = laplace.effective_parameters()
    trainable = {n: p for n, p in laplace.model.named_parameters() if p.requires_grad}
    delta = laplace.prior_precision.expand(len(trainable))
    weight_decay = precision_to_weight_decay(delta, laplace.n_data, temperature)
    return {
        name: {
            "initial": initial,
            "learned": weight_decay[i].item(),
            "effective_parameters": gamma[i].item(),
            "parameters": p.numel(),
        }
        for i, (name, p) in enumerate(trainable.items())
    }
