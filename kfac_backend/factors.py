"""The curvature pass over the data: sums of Gram matrices, and all scaling of them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kfac_backend.block import KroneckerBlock
from kfac_backend.capture import Capture
from kfac_backend.coverage import TrackedLayer, find_coverage
from kfac_backend.diagonal import ggn_diagonal
from kfac_backend.kronecker import KroneckerFactors
from kfac_backend.loss_hessian import backward_vectors, check_targets, loss_sum
from kfac_backend.options import Fisher, KfacApprox, Likelihood, Unsupported, check_option
from kfac_backend.precision import full_float32
from kfac_backend.rules import GramSums
from kfac_backend.verification import verify_independence, verify_uses
from kfac_backend.weight_sharing import PositionSums

__all__ = ["CurvaturePass", "kronecker_factors"]


def kronecker_factors(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    *,
    kfac_approx: KfacApprox = "expand",
    fisher: Fisher = "exact",
    mc_samples: int = 1,
    unsupported: Unsupported = "error",
    generator: torch.Generator | None = None,
    progress: bool = False,
    dict_key_y: str = "labels",
) -> KroneckerFactors:
    """Kronecker-factored GGN (K-FAC) of a model on data, B ⊗ A per parameter tensor.

    Expand is exact for deep linear networks, Gaussian likelihood and one loss term per position;
    reduce where positions are summed or averaged into one output per example. Source: Eschenhagen
    et al. 2023 (arXiv:2311.00636), sections 3.2 and 3.3.

    The model runs in the mode (train or eval) it is in; dropout that is on stays on. The first
    batch runs three times: twice to prove that the hooks see all, once for the curvature. (After a
    first batch of one example, the first that has several runs twice.)

    Args:
        model: any model of the supported layers; parameters with ``requires_grad=False`` have no
            block and cost nothing. Its parameters, their flags and its mode are not changed.
        data: batches (x, y), or mappings that the model takes whole, with targets under
            ``dict_key_y``; they are moved to the model's device. Examples come first; batches may
            differ in size.
        likelihood: "classification": logits (N, ..., C), labels (N, ...) in 0..C-1. "regression":
            outputs and targets (N, ..., C), noise 1. "bernoulli": C independent logits, targets in
            [0, 1].
        kfac_approx: "expand" or "reduce".
        fisher: "exact", the GGN (C - 1 or C backward passes a batch for each loss term of an
            example); "mc", an unbiased estimate with ``mc_samples`` backward passes; "empirical",
            the labels' own gradients (one backward pass for each loss term).
        mc_samples: labels drawn per example for fisher="mc".
        unsupported: parameters without a rule raise ("error"), are constants ("freeze"), or get the
            exact diagonal of their block ("diagonal", slow: each backward pass once per example).
        generator: source of fisher="mc"'s labels, on the model's device.
        progress: whether to show a progress bar over the batches.
        dict_key_y: the targets' key in batches that are mappings.

    Raises:
        ValueError: no data, no trainable parameter, targets that do not fit, NaN or infinity in
            outputs (naming the parameter or the inputs that have it, too), BatchNorm in train
            mode, an option that is not supported.
        TypeError: inputs that are not of floating point, outputs that are not a tensor, labels
            that are not integers, batches that are neither (x, y) nor a mapping.
        KeyError: a mapping without ``dict_key_y``.
        NotImplementedError: a layer without a rule, or used in a way that hooks cannot see.
    """
    curvature = CurvaturePass(
        model,
        likelihood,
        kfac_approx=kfac_approx,
        fisher=fisher,
        mc_samples=mc_samples,
        unsupported=unsupported,
        generator=generator,
    )
    hidden = None if progress else True  # None: shown on a terminal only
    for batch in tqdm(data, desc="Curvature", unit="batch", leave=False, disable=hidden):
        curvature.add(*split_batch(batch, dict_key_y))
    return curvature.factors()


class CurvaturePass:
    """Sums over batches, scaled at the end; `kronecker_factors` has the arguments' meanings."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        kfac_approx: KfacApprox = "expand",
        fisher: Fisher = "exact",
        mc_samples: int = 1,
        unsupported: Unsupported = "error",
        generator: torch.Generator | None = None,
    ) -> None:
        check_option("likelihood", likelihood, Likelihood)
        check_option("kfac_approx", kfac_approx, KfacApprox)
        check_option("fisher", fisher, Fisher)
        check_option("unsupported", unsupported, Unsupported)
        if mc_samples < 1:
            raise ValueError(f"mc_samples must be at least 1, not {mc_samples}.")
        self._model = model
        self._likelihood: Likelihood = likelihood
        self._kfac_approx: KfacApprox = kfac_approx
        self._fisher: Fisher = fisher
        self._mc_samples = mc_samples
        self._generator = generator
        self._coverage = find_coverage(model, unsupported)
        self._uses_verified = self._independence_verified = False
        self.reset()

    def reset(self) -> None:
        """Forget the batches seen so far."""
        self._rules = {
            tracked: tracked.rule(tracked.layer, self._kfac_approx, tracked.parameters)
            for tracked in self._coverage.layers
        }
        self._diagonal: dict[str, Tensor] = {}
        self._num_data = self._num_outputs = self._num_loss_terms = 0
        # A sum over examples, in float64 since it has many terms; moved to the host at the end.
        self._loss: Tensor = torch.zeros((), dtype=torch.float64)

    @full_float32()
    def add(self, x: Any, y: Any) -> None:
        """Add one batch: a forward pass, and one backward pass per vector."""
        device = next(self._model.parameters()).device
        x, y = to_device(x, device), to_device(y, device)
        if isinstance(y, Tensor) and y.dim() and not len(y):
            raise ValueError("A batch has no examples; drop it, or check the loader's sampler.")
        if isinstance(x, Tensor):
            x = x.detach()
        self._verify(x, several=isinstance(y, Tensor) and y.dim() > 0 and len(y) > 1)
        self._rows: dict[str, int] = {}
        self._position_sums = PositionSums()
        with Capture(self._model, self._coverage, self._add_input, self._add_gradient) as capture:
            f = capture.forward(x)
            check_targets(f, y, self._likelihood)
            self._check_finite(f, x)
            self._check_rows(len(f))
            capture.backward(f, self._vectors(f, y))
        if self._coverage.diagonal:
            self._add_diagonal(x, y)
        self._num_data += len(f)
        self._num_outputs = f.shape[-1]
        self._num_loss_terms += f.shape[:-1].numel()
        self._loss = self._loss.to(device) + loss_sum(f.detach(), y, self._likelihood).double()

    def factors(self) -> KroneckerFactors:
        """The factors of all batches so far: A a mean over its terms, B a sum over the data."""
        if not self._num_data:
            raise ValueError("The data is empty: the loader yielded no batch.")
        sums = self._sums()
        blocks = {name: self._block(name, sums[name]) for name in self._coverage.names}
        return KroneckerFactors(
            blocks,
            num_data=self._num_data,
            num_outputs=self._num_outputs,
            num_loss_terms=self._num_loss_terms,
            loss=self._loss.item(),
            likelihood=self._likelihood,
            kfac_approx=self._kfac_approx,
            fisher=self._fisher,
        )

    def _sums(self) -> dict[str, GramSums]:
        """All parameters' sums, of layers and of diagonals."""
        sums = {name: GramSums(d.reshape(-1, 1, 1)) for name, d in self._diagonal.items()}
        for tracked, rule in self._rules.items():
            for local, gram_sums in rule.gram_sums().items():
                sums[tracked.parameters[local]] = gram_sums
        return sums

    def _block(self, name: str, sums: GramSums) -> KroneckerBlock:
        if sums.B is None:  # its layer took no part in the forward pass
            p = self._model.get_parameter(name).detach()
            return KroneckerBlock(name, B=p.new_zeros(p.numel(), 1, 1))
        B = _without_single_group(sums.B.clone())
        if sums.A is None:
            return KroneckerBlock(name, B)
        return KroneckerBlock(
            name, B, _without_single_group(sums.A / sums.num_terms), sums.num_terms
        )

    def _vectors(self, f: Tensor, y: Tensor) -> Iterable[Tensor]:
        return backward_vectors(
            f, y, self._likelihood, self._fisher, self._mc_samples, self._generator
        )

    def _verify(self, x: Any, several: bool) -> None:
        """Once per pass; independence on the first batch that has several examples."""
        first = not self._uses_verified
        if not self._independence_verified and (first or several):
            self._independence_verified = verify_independence(self._model, self._coverage, x)
        if first:
            verify_uses(self._model, self._coverage, x)
            self._uses_verified = True

    def _check_rows(self, examples: int) -> None:
        """Each example's rows must be known, where positions are summed or a layer needs it."""
        for tracked in self._coverage.layers:
            rows = self._rows.get(tracked.name, examples)
            by_example = self._kfac_approx == "reduce" or tracked.rule.needs_examples
            if rows != examples and by_example:
                raise NotImplementedError(
                    f"Layer {tracked} got {rows} rows in a batch of {examples} examples; "
                    f"kfac_approx={self._kfac_approx!r} must know each example's rows. Keep the "
                    "batch axis first and the shared axes apart: (N, ..., d)."
                )

    def _add_input(self, tracked: TrackedLayer, a: Tensor) -> None:
        self._rows[tracked.name] = len(a) if a.dim() else 0
        self._rules[tracked].add_input(a)

    def _add_gradient(self, tracked: TrackedLayer, a: Tensor | None, b: Tensor) -> None:
        self._rules[tracked].add_gradient(a, b, self._position_sums)

    def _add_diagonal(self, x: Any, y: Tensor) -> None:
        diagonals = ggn_diagonal(
            self._model,
            self._coverage.diagonal,
            x,
            y,
            self._likelihood,
            self._fisher,
            self._mc_samples,
            self._generator,
        )
        for name, diagonal in diagonals.items():
            self._diagonal[name] = self._diagonal.get(name, 0) + diagonal

    def _check_finite(self, f: Tensor, x: Any) -> None:
        if torch.isfinite(f).all():
            return
        for name, p in self._model.named_parameters():
            if not torch.isfinite(p).all():
                raise ValueError(
                    f"Parameter '{name}' contains NaN or infinity; training has diverged. "
                    "Go back to an earlier state, with a smaller learning rate."
                )
        tensors = x.values() if isinstance(x, Mapping) else [x]
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not torch.isfinite(tensor).all():
                raise ValueError("The inputs contain NaN or infinity; clean the data.")
        raise ValueError(
            "The model's output contains NaN or infinity though its parameters and inputs are "
            "finite; activations overflow. Normalise the inputs, or use float32 or float64."
        )


def split_batch(batch: Any, dict_key_y: str) -> tuple[Any, Any]:
    """A batch's input and targets; a mapping is the input itself, with targets under the key."""
    if isinstance(batch, Mapping):
        if dict_key_y not in batch:
            raise KeyError(
                f"A batch has keys {', '.join(map(str, batch))}, but no '{dict_key_y}'; pass the "
                "targets' key as dict_key_y."
            )
        return batch, batch[dict_key_y]
    try:
        x, y = batch
    except (TypeError, ValueError):
        raise TypeError(
            f"A batch is {type(batch).__name__}; expected (x, y) or a mapping with '{dict_key_y}'."
        ) from None
    return x, y


def to_device(value: Any, device: torch.device) -> Any:
    """The value, or the tensors of a mapping, on the device."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(entry, device) for key, entry in value.items()}
    return value


def _without_single_group(factor: Tensor) -> Tensor:
    """(G, d, d), or (d, d) for one group."""
    return factor[0] if len(factor) == 1 else factor
