"""A network's calibrated Laplace predictive as a post-processing of torch-uncertainty.

```python
routine = ClassificationRoutine(
    model=network, num_classes=10, loss=None, post_processing=CalibratedLaplace(posterior)
)
TUTrainer().test(routine, datamodule)  # metrics of the network, and of the Laplace predictive
```

torch-uncertainty fits post-processings to held-out data, which is where s and τ are found; the
curvature is of the training data, and so fitted before. Needs `pip install torch-uncertainty`.

There is none for lightning-uq-box: its `LaplaceBase` makes a new object from the arguments of
laplace-torch's constructors, and writes its own test steps, prior search and files, all of which an
adapter would have to replace.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from marglik.posterior.posterior import Posterior
from marglik.prediction.calibration import calibrate
from marglik.prediction.predictive import PredictiveConfig

try:
    from torch_uncertainty.post_processing import (  # pyright: ignore[reportMissingImports]
        PostProcessing,
    )
except ImportError as error:
    raise ImportError(
        "marglik.adapters.torch_uncertainty needs torch-uncertainty: pip install torch-uncertainty."
    ) from error

__all__ = ["CalibratedLaplace"]


class CalibratedLaplace(PostProcessing):
    """`marglik.calibrate` as torch-uncertainty's `fit`, and log p(y|x) as what it returns.

    Args:
        posterior: fitted to the training data, of a classifier.
        config: how it predicts.

    Raises:
        ValueError: another likelihood.
        AttributeError: a posterior that is not fitted.
    """

    def __init__(
        self,
        posterior: Posterior,
        config: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    ) -> None:
        if posterior.likelihood != "classification":
            raise ValueError(
                f"The posterior's likelihood is {posterior.likelihood!r}; torch-uncertainty "
                "post-processes classifiers: take 'classification'."
            )
        if posterior.factors is None:
            raise AttributeError("The Laplace approximation is not fitted; call fit() first.")
        super().__init__(posterior.model)
        self.posterior = posterior
        self._config = config
        self._predict: Any = None

    def set_model(self, model: nn.Module) -> None:
        """Check that a routine's model is the posterior's.

        Raises:
            ValueError: it is another object.
        """
        if model is not self.posterior.model:
            raise ValueError(
                f"The routine's model is another {type(model).__name__} than the posterior's; "
                "pass posterior.model to the routine."
            )
        super().set_model(model)

    def fit(self, dataloader: Iterable[Any]) -> None:
        """Find s and τ by held-out data, batches (x, y), see `marglik.calibrate`."""
        assert self.model is not None
        self.posterior.to(next(self.model.parameters()).device)
        self._predict = calibrate(self.posterior, dataloader, self._config)
        self.trained = True

    def forward(self, inputs: Tensor) -> Tensor:
        """Log probabilities (N, C), which are logits, too: their softmax are the probabilities.

        Raises:
            RuntimeError: before `fit`.
        """
        if not self.trained:
            raise RuntimeError("CalibratedLaplace has found no s and τ yet; call fit() first.")
        tiny = 1e-30  # of a class that is ruled out; ahead of float32's smallest number
        return self._predict(inputs).mean.clamp(min=tiny).log()
