"""Ensemble: networks that are trained separately and predict together.

    p(y|x) = 1/K Σ_k p(y | f_k(x) / τ)

One network learns the weight decays. The others replay the same weight decays over time
(`PriorLearner.replay`). Each member costs one run, without a grid search. τ is fitted to the
mixture, because a mixture of separately calibrated members is underconfident. The epistemic part of
the prediction is the disagreement of the members: the mutual information between the label and the
member, or the variance of the means. Sources: Lakshminarayanan et al. 2017 (arXiv:1612.01474), and
for τ of the mixture Rahaman & Thiery 2021 (arXiv:2007.08792).
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfac_backend.atomic_files import read_tensors, write_tensors
from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.options import TargetOptions, check_positive
from kfac_backend.ranks import Ranks
from marglik.eval_mode import eval_mode
from marglik.prediction.calibration import HeldOut, collected, fit_sharpness
from marglik.prediction.links import Calibration, Prediction, predict_from_outputs
from marglik.prediction.predictive import Labels, PredictiveConfig, outputs_of
from marglik.storage.model_state import check_state, tensors_of
from marglik.storage.record_files import ENSEMBLE, MEMBERS, read_record, write_record


class Ensemble:
    """A predictive that averages the predictions of several networks, with equal weights.

    For regression it is the Gaussian with the mean and the variance of the mixture of N(f_k, σ²).

    Args:
        models: the networks, with the same architecture.
        likelihood: likelihood of the targets given the outputs.
        sigma_noise: σ of regression, in the unit of the targets.
        calibration: numbers that `calibrate` fits: τ, by which all outputs are divided; ε; and σ,
            which replaces ``sigma_noise``.
        seconds: training time of all members; 0 if it is unknown.
        labels: kind of the predicted label, see `PredictiveConfig`.

    Raises:
        ValueError: there is no network, or σ is not positive.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        likelihood: Likelihood | str = "classification",
        sigma_noise: float | Tensor = 1.0,
        calibration: Calibration | None = None,
        seconds: float = 0.0,
        labels: Labels = "true",
    ) -> None:
        models = list(models)
        if not models:
            raise ValueError("An ensemble needs at least one network.")
        for model in models:
            check_module(model)
        check_positive("sigma_noise", sigma_noise)
        self.models = models
        self.likelihood = likelihood_of(likelihood)
        self.sigma_noise = float(sigma_noise)
        self.calibration = calibration
        self.seconds = seconds
        self.labels: Labels = labels

    @property
    def model(self) -> nn.Module:
        """The first network."""
        return self.models[0]

    @property
    def label(self) -> str:
        """Name in tables and files."""
        return f"ensemble of {len(self.models)}"

    def __call__(self, x: Any) -> Prediction:
        """Return the prediction for inputs x. Its epistemic part is the members' disagreement."""
        calibration = self.calibration or Calibration()
        outputs = self._outputs(x) / calibration.output_temperature
        noise = PredictiveConfig(labels=self.labels).label_noise(self.likelihood, self.calibration)
        sigma = calibration.sigma_noise or self.sigma_noise
        return predict_from_outputs(outputs, self.likelihood, sigma, label_noise=noise)

    def predicting(self, labels: Labels) -> "Ensemble":
        """Return an ensemble of the same networks that predicts these labels."""
        parts = self.likelihood, self.sigma_noise, self.calibration, self.seconds
        return Ensemble(self.models, *parts, labels)

    @torch.no_grad()
    def _outputs(self, x: Any) -> Tensor:
        """Return the members' outputs (K, N, ..., C), in eval mode."""
        return torch.stack([eval_mode(m)(outputs_of)(m, x) for m in self.models])

    def calibrate(
        self,
        batches: Iterable[Any],
        *,
        targets: TargetOptions = TargetOptions(),  # noqa: B008
        progress: bool = False,
        ranks: Ranks = Ranks(None),  # noqa: B008
    ) -> Calibration:
        """Fit τ and ε of classes, or σ, to the lowest held-out NLL; later predictions use them.

        With few examples, a weak prior around τ = 1, or around ``sigma_noise``, has an effect, see
        `marglik.prediction.calibration`.

        Args:
            batches: validation data (x, y), or mappings.
            targets: form of the targets in batches.
            progress: whether to show a progress bar over the batches.
            ranks: the ranks that each have a part of every batch. All get exactly the same result.

        Raises:
            ValueError: no held-out target counts, or targets do not fit the outputs.
        """

        def outputs_and_spread(x: Any, counted: Tensor | None) -> tuple[Tensor, Tensor]:
            f = self._outputs(x)
            return f[0], (f - f[0]).flatten(1, -2).movedim(0, 1)  # (M, K, C)

        f, spread, y = collected(
            outputs_and_spread, batches, self.model, self.likelihood, targets, len(self.models),
            ranks, progress=progress,
        )  # fmt: skip
        held_out = HeldOut(self.likelihood, f, spread, y, self.sigma_noise, is_sampled=True)
        self.calibration = ranks.gather(fit_sharpness(held_out, 1.0))[0]
        return self.calibration

    def save(self, folder: str | Path) -> str:
        """Write all members and τ to a folder, and return the SHA-256 sum of ``ensemble.json``."""
        folder = Path(folder)
        state = {
            f"{k}/{name}": tensor
            for k, model in enumerate(self.models)
            for name, tensor in tensors_of(model).items()
        }
        record = {
            "members": len(self.models),
            "likelihood": str(self.likelihood),
            "sigma_noise": self.sigma_noise,
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "seconds": self.seconds,
        }
        folder.mkdir(parents=True, exist_ok=True)
        # Remove the old record first, because it has the sum of the file that is replaced now.
        (folder / ENSEMBLE).unlink(missing_ok=True)
        sums = {MEMBERS: write_tensors(folder / MEMBERS, state)}
        return write_record(folder / ENSEMBLE, record, sums)

    @staticmethod
    def load(
        folder: str | Path, model: nn.Module, device: torch.device | str | None = None
    ) -> "Ensemble":
        """Return an ensemble written by `save`.

        Args:
            folder: folder written by `save`, for example by ``marglik train --members 5``.
            model: a network with the architecture of the members, which are copies of it.
            device: device of the members; None keeps the model's device.

        Raises:
            FileNotFoundError: there is no ensemble in the folder.
            ValueError: a file was altered, or the network has another architecture or dtype.
        """
        record = read_record(Path(folder) / ENSEMBLE)
        if not record:
            raise FileNotFoundError(
                f"No ensemble in {folder} ({ENSEMBLE} is missing). marglik train --members 5 "
                "creates one."
            )
        tensors, _ = read_tensors(Path(folder) / MEMBERS, kind="ensembles")
        models = []
        for k in range(record["members"]):
            prefix = f"{k}/"
            state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            member = deepcopy(model).to(device)
            check_state(member, state, str(Path(folder) / MEMBERS))
            member.load_state_dict(state)
            models.append(member)
        numbers = record["calibration"]
        calibration = None if numbers is None else Calibration(**numbers)
        sigma_noise, seconds = record["sigma_noise"], record["seconds"]
        return Ensemble(models, record["likelihood"], sigma_noise, calibration, seconds)
