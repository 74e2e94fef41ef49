"""Send the records of a run to TensorBoard or to Weights & Biases, with Lightning's loggers."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from kfac_backend.extras import extra
from marglik.application.records import Scores
from marglik.application.run_folder import TENSORBOARD

LoggerName = Literal["tensorboard", "wandb"]


def check_logger(name: LoggerName) -> None:
    """Raise a ModuleNotFoundError unless the packages of a logger are installed."""
    with extra("loggers"):
        import_module(name)
        import_module("lightning")


class MetricsLogger:
    """Logger of numbers as curves over the epochs, and of options as hyperparameters.

    "tensorboard" writes to a folder in the folder of the run. "wandb" starts a run of the project
    "marglik", with the name of the folder of the run.
    """

    def __init__(self, name: LoggerName, folder: Path, identity: dict[str, Any]) -> None:
        if name == "tensorboard":
            from lightning.fabric.loggers.tensorboard import TensorBoardLogger

            self._logger: Any = TensorBoardLogger(folder, name="", version=TENSORBOARD)
        else:
            from lightning.pytorch.loggers import WandbLogger

            self._logger = WandbLogger(folder.resolve().name, folder, project="marglik")
        self._logger.log_hyperparams({k: v for k, v in identity.items() if k != "sums"})
        self._epoch = 0

    def write(self, record: dict[str, Any]) -> None:
        """Log the numbers of an epoch or an update, such as ``update/weight_decay/fc1.weight``."""
        self._epoch = record["epoch"]
        numbers = {k: v for k, v in record.items() if k not in ("kind", "epoch")}
        self._logger.log_metrics(_flat(numbers, record["kind"]), step=self._epoch)

    def close(self, predictives: Mapping[str, Scores]) -> None:
        """Log the test metrics of each predictive, such as ``test/MAP/nll``, and finish."""
        for name, scores in predictives.items():
            metrics = dict(scores.metrics.items())
            self._logger.log_metrics(_flat(metrics, f"test/{name}"), step=self._epoch)
        self._logger.finalize("success")
        if hasattr(self._logger.experiment, "finish"):  # wandb has only one run per process
            self._logger.experiment.finish()


def _flat(numbers: dict[str, Any], prefix: str) -> dict[str, float]:
    """Return path -> number for the numbers in nested dicts; other values are omitted."""
    flat: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}/{name}")
        elif isinstance(value, int | float):
            flat[f"{prefix}/{name}"] = float(value)
    return flat
