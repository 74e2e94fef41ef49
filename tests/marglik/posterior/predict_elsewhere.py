"""A process of its own that loads posteriors and saves what they predict: run by a test.

``python -m tests.marglik.posterior.predict_elsewhere THREADS FOLDER...``; each folder has
``x.safetensors``, and gets ``predictions.safetensors``. The last line printed is the number of
objects that were unpickled meanwhile, and after a control.
"""

import pickle
import sys
from pathlib import Path

import torch
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


def main(threads: str, *folders: str) -> None:
    """Load, predict, save."""
    unpickled = []
    sys.addaudithook(lambda event, _: event == "pickle.find_class" and unpickled.append(event))
    torch.set_num_threads(int(threads))
    for folder in map(Path, folders):
        model = build_from_spec(nn.Module, read_posterior(folder)["model"])
        laplace = load_posterior(folder, model)
        # A copy, as rounding depends on where in memory a file's tensors come to lie.
        x = load_file(folder / "x.safetensors")["x"].clone()
        save_file(as_tensors(predictions(laplace, x)), folder / "predictions.safetensors")
    before = len(unpickled)
    pickle.loads(pickle.dumps(Path("control")))
    print(before, len(unpickled))


if __name__ == "__main__":
    main(*sys.argv[1:])
