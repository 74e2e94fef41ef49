"""Peers of `marglik.influence`: kronfluence, dattri and TRAK, each with a grid of its damping.

Each function yields a label, the scores (queries × training examples, positive for helpful ones)
and the processor seconds of one setting. The seconds of work that settings share count in each.
A package that is not installed, or does not support a network, yields nothing.
"""

import importlib.util
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kfac_backend.likelihoods import IGNORED

Pair = tuple[Tensor, Tensor]
Setting = tuple[str, Tensor, float]
"""Label, scores (Q, N), and processor seconds."""

KRONFLUENCE_GRID = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)
"""Dampings of a mean over examples, as kronfluence has it."""
DATTRI_GRID = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
TRAK_GRID = (1e-2, 1.0, 100.0, 1e4)
TRAK_BATCH = 500


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def losses(f: Tensor, y: Tensor, likelihood: str, sigma: float = 1.0) -> Tensor:
    """Loss of each example (N,), a sum over its terms."""
    if likelihood == "regression":
        return 0.5 * (f - y).square().flatten(1).sum(1) / sigma**2
    each = F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="none", ignore_index=IGNORED)
    return each.view(len(y), -1).sum(1)


def sampled_targets(f: Tensor, y: Tensor, likelihood: str, sigma: float) -> Tensor:
    """Targets that are drawn from the network's predictions."""
    if likelihood == "regression":
        return f + sigma * torch.randn_like(f)
    drawn = torch.multinomial(f.flatten(0, -2).softmax(-1), 1).view(y.shape)
    return torch.where(y == IGNORED, y, drawn)


def kronfluence(
    model: nn.Module, train: Pair, queries: Pair, likelihood: str, sigma: float
) -> Iterator[Setting]:
    """EKFAC of kronfluence: its default damping, its heuristic, and a grid.

    It covers Linear and Conv2d layers. Weight and bias of a layer have one block.
    """
    if not installed("kronfluence"):
        return
    from kronfluence.analyzer import Analyzer, prepare_model  # pyright: ignore
    from kronfluence.arguments import FactorArguments, ScoreArguments  # pyright: ignore
    from kronfluence.task import Task  # pyright: ignore

    class Loss(Task):
        def compute_train_loss(
            self, batch: Any, model: nn.Module, sample: bool = False
        ) -> torch.Tensor:
            x, y = batch
            f = model(x)
            if sample:
                with torch.no_grad():
                    y = sampled_targets(f.detach(), y, likelihood, sigma)
            return losses(f, y, likelihood, sigma).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> torch.Tensor:
            return self.compute_train_loss(batch, model)

    logging.getLogger("kronfluence").setLevel(logging.ERROR)
    started = time.process_time()
    task = Loss()
    data, asked = TensorDataset(*train), TensorDataset(*queries)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare_model(model, task)
        analyzer = Analyzer(
            "attribution", model, task, cpu=True, disable_tqdm=True, output_dir=folder
        )
        analyzer.fit_all_factors(
            "factors", data, per_device_batch_size=100, factor_args=FactorArguments()
        )
        shared = time.process_time() - started
        for label, damping in [("default", 1e-8), ("0.1 · mean", None)] + [
            (f"{value:g}", value) for value in KRONFLUENCE_GRID
        ]:
            started = time.process_time()
            analyzer.compute_pairwise_scores(
                label, "factors", asked, data, per_device_query_batch_size=len(queries[1]),
                per_device_train_batch_size=100, score_args=ScoreArguments(damping_factor=damping),
            )  # fmt: skip
            scores = analyzer.load_pairwise_scores(label)
            assert scores is not None
            yield label, scores["all_modules"], shared + time.process_time() - started


def dattri(
    model: nn.Module, train: Pair, queries: Pair, likelihood: str, sigma: float
) -> Iterator[Setting]:
    """EKFAC of dattri, for networks whose layers are all linear: its default, and a grid."""
    modules = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    if not installed("dattri") or not all(type(m) is nn.Linear for m in modules):
        return
    from dattri.algorithm.influence_function import IFAttributorEKFAC  # pyright: ignore
    from dattri.task import AttributionTask  # pyright: ignore

    def mean_loss(parameters: Any, batch: Any) -> Tensor:
        x, y = batch
        f = torch.func.functional_call(model, parameters, (x,))
        return losses(f, y, likelihood, sigma).mean()

    def one_loss(parameters: Any, batch: Any) -> Tensor:
        x, y = batch
        f = torch.func.functional_call(model, parameters, (x[None],))
        return losses(f, y[None], likelihood, sigma)[0]

    started = time.process_time()
    task = AttributionTask(mean_loss, model, model.state_dict(), target_func=mean_loss)
    data = DataLoader(TensorDataset(*train), 100)
    asked = DataLoader(TensorDataset(*queries), len(queries[1]))
    attributor = IFAttributorEKFAC(task)
    attributor.cache(data)
    shared = time.process_time() - started
    for label, damping in [("default", 0.0)] + [(f"{value:g}", value) for value in DATTRI_GRID]:
        started = time.process_time()
        attributor.damping = damping
        scores = attributor.attribute(data, asked).T
        yield label, scores.detach(), shared + time.process_time() - started


def trak(
    model: nn.Module, train: Pair, queries: Pair, likelihood: str, sigma: float
) -> Iterator[Setting]:
    """TRAK with one checkpoint and 2,048 projected dimensions, for images and their classes."""
    if not installed("trak") or likelihood != "classification" or queries[1].dim() > 1:
        return
    from trak import TRAKer  # pyright: ignore

    state: Any = model.state_dict()  # its annotation is Iterable[Tensor]
    for label, damping in [("default", 0.0)] + [(f"{value:g}", value) for value in TRAK_GRID]:
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traker = TRAKer(
                model, "image_classification", len(train[1]), save_dir=folder, device="cpu",
                lambda_reg=damping, use_half_precision=False, logging_level=logging.ERROR,
            )  # fmt: skip
            traker.load_checkpoint(state, model_id=0)
            for x, y in zip(train[0].split(TRAK_BATCH), train[1].split(TRAK_BATCH), strict=True):
                traker.featurize((x, y), num_samples=len(y))
            traker.finalize_features()
            traker.start_scoring_checkpoint("queries", state, 0, len(queries[1]))
            traker.score(queries, num_samples=len(queries[1]))
            scores = torch.as_tensor(traker.finalize_scores("queries")).T.float()
        yield label, scores.clone(), time.process_time() - started
