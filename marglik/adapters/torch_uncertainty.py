"""A network's calibrated Laplace predictive as a post-processing method of torch-uncertainty.

```python
routine = ClassificationRoutine(
    model=network, num_classes=10, loss=None, post_processing=CalibratedLaplace(posterior)
)
TUTrainer().test(routine, datamodule)  # metrics of the network, and of the Laplace predictive
```

torch-uncertainty fits post-processing methods to held-out data; this one finds s and τ there. The
curvature belongs to the training data, so the posterior must be fitted before. Needs
`pip install 'marglik[adapters]'`.

There is no adapter for lightning-uq-box: its `LaplaceBase` creates its own object from the
arguments of laplace-torch's constructors, and has its own test steps, prior search and files, all
of which an adapter would have to replace.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from kfac_backend.extras import extra
from marglik.posterior.posterior import Posterior
from marglik.prediction.calibration import calibrate
from marglik.prediction.predictive import PredictiveConfig

with extra("adapters"):
    from torch_uncertainty.post_processing import (  # pyright: ignore[reportMissingImports]
        PostProcessing,
    )

__all__ = ["CalibratedLaplace"]


class CalibratedLaplace(PostProcessing):
    """A post-processing method whose `fit` is `marglik.calibrate`; its outputs are log p(y|x).

    Args:
        posterior: a classifier's posterior, fitted to the training data.
        config: how the posterior predicts.

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
                "post-processes classifiers only: use likelihood 'classification'."
            )
        posterior.fitted_factors()
        super().__init__(posterior.model)
        self.posterior = posterior
        self._config = config
        self._predict: Any = None

    def set_model(self, model: nn.Module) -> None:
        """Check that a routine's model is the posterior's.

        Raises:
            ValueError: the routine's model is another object.
        """
        if model is not self.posterior.model:
            raise ValueError(
                f"The routine's model is another {type(model).__name__} than the posterior's; "
                "pass posterior.model to the routine."
            )
        super().set_model(model)

    def fit(self, dataloader: Iterable[Any]) -> None:
        """Find s and τ from held-out batches (x, y), see `marglik.calibrate`."""
        assert self.model is not None
        self.posterior.to(next(self.model.parameters()).device)
        self._predict = calibrate(self.posterior, dataloader, self._config)
        self.trained = True

    def forward(self, inputs: Tensor) -> Tensor:
        """Log probabilities (N, C); these are logits, since their softmax gives the probabilities.

        Raises:
            RuntimeError: `fit` was not called.
        """
        if not self.trained:
            raise RuntimeError("CalibratedLaplace has no s and τ yet; call fit() first.")
        tiny = 1e-30  # keeps the logarithm finite; above float32's smallest normal number
        return self._predict(inputs).mean.clamp(min=tiny).log()
