"""What another process predicts from posteriors' folders: called in one, see `tests.worlds`."""

import pickle
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from marglik.posterior.posterior_file import load_posterior
from marglik.prediction.links import Prediction
from marglik.runs.build import build_from_spec
from marglik.storage.record_file import read_posterior
from tests.marglik.posteriors import predictions


def as_tensors(found: dict[str, Prediction]) -> dict[str, Tensor]:
    """Predictions under names such as "mc/mean"."""
    return {
        f"{method}/{part}": getattr(prediction, part).contiguous()
        for method, prediction in found.items()
        for part in ("mean", "aleatoric", "epistemic")
    }


def save_predictions(*folders: str) -> tuple[int, int]:
    """Save what each folder's posterior predicts for its inputs, ``x.safetensors``, beside them.

    Returns: the number of objects that were unpickled meanwhile, and after a control.
    """
    unpickled = []
    sys.addaudithook(lambda event, _: event == "pickle.find_class" and unpickled.append(event))
    for folder in map(Path, folders):
        model = build_from_spec(nn.Module, read_posterior(folder)["model"])
        laplace = load_posterior(folder, model)
        # A copy, as rounding depends on where in memory a file's tensors come to lie.
        x = load_file(folder / "x.safetensors")["x"].clone()
        save_file(as_tensors(predictions(laplace, x)), folder / "predictions.safetensors")
    before = len(unpickled)
    pickle.loads(pickle.dumps(Path("control")))
    return before, len(unpickled)
