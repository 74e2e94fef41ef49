"""Compute the output covariance for an uncertain last layer, with a forward pass alone.

If a linear layer or a convolution computes the outputs, f_r = W a_r + b, the gradient of f_rc with
respect to W is e_c ⊗ a_r, and with respect to b it is e_c. In the eigenbasis of W's block, the
covariance of outputs c and c' at position r is Σ_i (Q_B)_ci (Q_B)_c'i w_i with w_i = Σ_j ã_j² /
s_ij. Nothing is propagated back, and positions do not depend on each other. The variances alone, c
= c', need no C×C array.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kfac_backend.covariance.contraction import bases, rotated
from kfac_backend.covariance.gradients import PosteriorPrecision
from kfac_backend.covariance.output_covariance import (
    OutputCovariance,
    check_classes,
    check_not_empty,
    check_positions,
    default_memory,
)
from kfac_backend.engine.batches import detached
from kfac_backend.engine.model_calls import call_with, close, preserve_state
from kfac_backend.layers import WeightSharingRule, registered
from kfac_backend.precision import full_float32
from kfac_backend.sharding import all_modules, detached_parameters, is_sharded

FORWARDS = {kind: kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)}
"""Layers that need no comparison with W a_r + b, with their forward."""


class LastLayerInput:
    """A function from a batch to outputs and the last layer's input, if the outputs are W a_r + b.

    This holds for a linear layer or a convolution without groups if only a change of the order of
    axes follows it. Each batch shows whether it holds, in value and derivative.

    Args:
        model: the network, in the mode (train or eval) it is in.
        layer: the name of the layer that runs last.
        parameters: local name -> name of its parameters that are uncertain.
        alone: see `LastLayerCovariance`.
    """

    def __init__(
        self, model: nn.Module, layer: str, parameters: Mapping[str, str], alone: bool
    ) -> None:
        self._model, self._layer = model, model.get_submodule(layer)
        self._parameters, self._alone = parameters, alone
        self.rule = self._rule_of_layer()
        """The layer's rule; None if no layer of this kind has the formula."""
        self._returns_output = True

    def outputs_at(
        self, x: Any, parameters: Mapping[str, Float[Tensor, "S *shape"]]
    ) -> Float[Tensor, "S N *R C"] | None:
        """Return the outputs at S values of the layer's parameters (local names), in one product.

        Return None if the outputs are not W a_r + b.
        """
        found = self(x)
        if found is None:
            return None
        f, a, rule = found
        # A weight that is not a parameter is computed from constants.
        own = {name: getattr(self._layer, name, None) for name in ("weight", "bias")}
        constants = {name: p.detach()[None] for name, p in own.items() if p is not None}
        values = {**constants, **parameters}
        W = values["weight"]
        W = W if rule.transposed else W.flatten(2).mT  # (S, d_in, C)
        outputs = rule.inputs(a)[0].flatten(0, 1).to(W.dtype) @ W
        if "bias" in values:
            outputs = outputs + values["bias"][:, None]
        return outputs.view(len(outputs), *f.shape)

    def _rule_of_layer(self) -> WeightSharingRule | None:
        registered_rule = registered(self._layer)
        if registered_rule is None or not issubclass(registered_rule.rule, WeightSharingRule):
            return None
        if not self._parameters or not registered_rule.rule.parameter_names.issuperset(
            self._parameters
        ):
            return None
        rule = registered_rule.rule(self._layer, "expand", self._parameters)
        if rule.groups > 1 or not rule.same_gradients or rule.takes_integers:
            return None
        return rule

    def __call__(self, x: Any) -> tuple[Tensor, Tensor, WeightSharingRule] | None:
        """Return the outputs, the last layer's input and its rule, or None if the formula fails.

        The formula holds if the layer computes W a_r + b and the model's outputs equal the layer's,
        in value and in derivative. If the model returns the layer's own output tensor, this is
        certain. Otherwise random noise is propagated back.
        """
        rule, own = self.rule, self._layer._parameters
        if rule is None:
            return None
        is_in_training = any(module.training for module in all_modules(self._model))
        is_special = own.get("weight") is None or is_in_training or is_sharded(self._model)
        if is_special or not self._returns_output:
            return self._run_with_noise(x, rule)
        runs: list[tuple[Tensor, Any, tuple[int, ...]]] = []

        def hook(layer: nn.Module, args: tuple, kwargs: dict, z: Any) -> None:
            a = rule.input_of(args, kwargs)
            runs.append((a, z, _versions(a, z)))

        handle = self._layer.register_forward_hook(hook, with_kwargs=True)
        try:
            # If only the layer learns, the graph shows whether its input depends on it as well.
            with torch.set_grad_enabled(self._alone):
                f = call_with(self._model, None, x)
        finally:
            handle.remove()
        if len(runs) != 1:
            return None
        ((a, z, versions),) = runs
        is_output = f is z and versions == _versions(a, z)
        if not is_output or f.dim() < 2 or rule.features % f.dim() < f.dim() - 1:
            self._returns_output = False  # later calls skip this attempt
            return self._run_with_noise(x, rule)
        if self._alone and a.requires_grad:
            return None
        f, a = f.detach(), a.detach()
        # A layer of torch computes W a_r + b unless a user changed its forward or its output.
        kind, layer = type(self._layer), self._layer
        is_known = kind in FORWARDS and kind.forward is FORWARDS[kind]
        if is_known and "forward" not in vars(layer) and not layer._forward_hooks:
            return f, a, rule
        return (f, a, rule) if _computes(own, rule, a[:1], f[:1]) else None

    def _run_with_noise(
        self, x: Any, rule: WeightSharingRule
    ) -> tuple[Tensor, Tensor, WeightSharingRule] | None:
        """Return the same by random noise that must arrive unchanged at the layer's output."""
        runs: list[tuple[Tensor, Tensor]] = []

        def hook(layer: Any, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            output = output.detach().requires_grad_()
            runs.append((rule.input_of(args, kwargs), output))
            if "weight" not in own and not copies:  # computed from other parameters
                own["weight"] = cast("Tensor", layer.weight).detach()
            return output.clone()  # which activations may change in place

        copies = is_sharded(self._model)  # FSDP drops whole weights when the layer has run
        own: dict[str, Tensor | None] = {}

        def before(layer: nn.Module, args: tuple) -> None:
            for local, p in layer._parameters.items():
                own[local] = p if p is None else p.detach().clone() if copies else p.detach()

        learned: dict[str, Tensor] = {}  # others are constants for `call_with`
        if self._alone:
            values = detached_parameters(self._model)
            learned = {name: values[name].requires_grad_() for name in self._parameters.values()}
        with preserve_state(self._model), torch.enable_grad():  # removes the hooks
            self._layer.register_forward_pre_hook(before)
            self._layer.register_forward_hook(hook, with_kwargs=True)
            f = call_with(self._model, learned, x)
        if len(runs) != 1 or f.dim() < 2 or not f.requires_grad:
            return None
        ((a, z),) = runs
        # Equal values are not enough, because later operations may change only derivatives. Use a
        # separate generator: checks must not use the user's random numbers.
        generator = torch.Generator(f.device).manual_seed(0)
        noise = torch.randn(f.shape, dtype=f.dtype, device=f.device, generator=generator)
        back, *others = torch.autograd.grad(f, [z, *learned.values()], noise, allow_unused=True)
        # If only the layer learns, its parameters may have another use, before or after it.
        if self._alone and (a.requires_grad or any(other is not None for other in others)):
            return None
        f, z, a = f.detach(), z.detach(), a.detach()
        if not (_equal_outputs(z, f, rule.features) and _equal_outputs(back, noise, rule.features)):
            return None
        return (f, a, rule) if _computes(own, rule, a[:1], f[:1]) else None


class LastLayerCovariance:
    """Function from inputs to outputs and covariances if only the last layer is uncertain.

    It is exact. If the last layer shares its weight with an earlier one, as a language model's
    output layer does with its token embedding, the weight is uncertain only in the last layer: its
    earlier use counts as known, unless ``alone``.

    The layer's own formula applies if the batch shows that the model's outputs equal the layer's,
    in value and derivative. This holds for a linear layer or a convolution without groups, if only
    a change of the order of axes follows. Otherwise `OutputCovariance` is used, with C backward
    passes per position.

    Args:
        model: the network at the posterior's mean, in its present mode (train or eval).
        layer: name of the layer that runs last.
        precision: posterior precision of its parameters.
        memory: as in `OutputCovariance`, without the result, K×K for each position.
        alone: whether no other layer has trainable parameters. If the model's own code then uses
            these parameters elsewhere, that use counts as well, and the formula does not apply.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: str,
        precision: PosteriorPrecision,
        *,
        memory: int | None = None,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._model, self.name = model, layer
        self._device, last = next(model.parameters()).device, model.get_submodule(layer)
        self._memory = memory
        names = {id(p): name for name, p in model.named_parameters()}
        self._parameters = {
            local: names[id(p)]
            for local, p in last.named_parameters(recurse=False)
            if names[id(p)] in precision
        }
        self._input = LastLayerInput(model, layer, self._parameters, alone)
        self._is_tied = any(
            p is other
            for p in last.parameters()
            if names[id(p)] in precision
            for module in model.modules()
            for other in module._parameters.values()
            if module is not last
        )
        self._general: OutputCovariance | None = None
        self.precision = precision

    @property
    def precision(self) -> PosteriorPrecision:
        """The precision; it can be set to another precision of the same parameters."""
        return self._precision

    @precision.setter
    def precision(self, precision: PosteriorPrecision) -> None:
        self._precision = precision
        if self._general is not None:
            self._general.precision = precision
        # The formula's parts: Q, Q_A and the precision's eigenvalues.
        self._bases: dict[str, tuple[Tensor | None, Tensor | None, Tensor]] = {}
        rule = self._input.rule
        for local, name in () if rule is None else self._parameters.items():
            block, spectrum = precision[name]
            if local == "weight":
                Q_B, Q_A, spectrum = bases(block, spectrum, rule.transposed)  # pyright: ignore
                self._bases[local] = None if Q_B is None else Q_B[0], Q_A, spectrum[0]
            else:
                Q = block.Q_B if block.Q_B.dim() == 2 else None  # of a diagonal
                self._bases[local] = Q, None, spectrum.reshape(1, -1)
        self._inverses = [spectrum.reciprocal() for *_, spectrum in self._bases.values()]

    def __call__(
        self,
        x: Any,
        positions: Bool[Tensor, "N *R"] | None = None,
        classes: Int[Tensor, "*chosen K"] | None = None,
        *,
        variance_only: bool = False,
        shifts: Float[Tensor, "D"] | None = None,
    ) -> tuple[Float[Tensor, "*chosen C"], Float[Tensor, "..."]]:
        """Return outputs and covariances for a batch; see `OutputCovariance`.

        Raises:
            NotImplementedError: a weight that is shared with another layer, in a layer whose
                outputs differ from the model's.
        """
        with full_float32(), torch.inference_mode(False):
            x = detached(x, self._device)
            check_not_empty(x)
            outputs = self._input(x)
            if outputs is not None:
                return self._of_linear(*outputs, positions, classes, variance_only, shifts)
        if self._is_tied:
            raise NotImplementedError(
                f"The outputs of {type(self._model).__name__} depend on its last layer "
                f"'{self.name}' and on another layer with the same weight. The covariance of the "
                "last layer alone is therefore not supported. Use all layers."
            )
        if self._general is None:
            self._general = OutputCovariance(self._model, self._precision, memory=self._memory)
        return self._general(x, positions, classes, variance_only=variance_only, shifts=shifts)

    def _of_linear(
        self,
        f: Tensor,
        a: Tensor,
        rule: WeightSharingRule,
        positions: Tensor | None,
        classes: Tensor | None,
        variance_only: bool,
        shifts: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and covariances by the layer's formula, some positions at a time."""
        mask = None if positions is None else check_positions(positions, f.shape).to(f.device)
        shape = tuple(f.shape[:-1]) if mask is None else (int(mask.sum()),)
        C, R = f.shape[-1], f.shape[1:-1].numel()
        columns = check_classes(classes, shape, C)
        f = f.reshape(-1, C) if mask is None else f[mask]  # (M, C)
        if columns is not None:
            columns = columns.to(f.device)
            f = f.gather(1, columns)
        (M, K), dtype = f.shape, torch.promote_types(f.dtype, torch.float32)
        memory, itemsize = self._memory or default_memory(f.device), dtype.itemsize
        weight = self._bases.get("weight")
        d_in = 1 if weight is None else weight[-1].shape[-1]
        # For each position: K rows of the basis, these weighted, and its input twice.
        of_one = itemsize * ((0 if variance_only else 3 * K * C) + 2 * (d_in + C))
        size = max(1, memory // of_one)
        by_example = None if mask is None else mask.reshape(len(a), R)
        examples = max(1, memory // (itemsize * R * (d_in + 1)))

        def inputs(some: slice) -> Tensor:
            rows = rule.inputs(a[some])[0]  # (n, R, d_in)
            rows = rows.flatten(0, 1) if by_example is None else rows[by_example[some]]
            return rows.to(dtype)

        def covariances(rows: Tensor, columns: Tensor | None) -> Tensor:
            squares = rows if weight is None else rotated(rows[None], weight[1])[0].square()
            if shifts is None:
                return self._some(squares, columns, C, variance_only, self._inverses)
            spectra = [spectrum for *_, spectrum in self._bases.values()]
            inverses = ([(s + shift).reciprocal() for s in spectra] for shift in shifts)
            some = [self._some(squares, columns, C, variance_only, own) for own in inverses]
            return torch.stack(some, 1)

        if len(a) <= examples and M <= size:
            result = covariances(inputs(slice(None)), columns)
            result = result.expand(M, *result.shape[1:]).contiguous()  # for a bias alone
        else:
            D = () if shifts is None else (len(shifts),)
            result = f.new_empty((M, *D, K) if variance_only else (M, *D, K, K), dtype=dtype)
            num_done = 0
            for start in range(0, len(a), examples):
                for now in inputs(slice(start, start + examples)).split(size):
                    of_now = slice(num_done, num_done + len(now))
                    result[of_now] = covariances(now, None if columns is None else columns[of_now])
                    num_done += len(now)
        return f.unflatten(0, shape), result.unflatten(0, shape)

    def _some(
        self,
        squares: Tensor,
        columns: Tensor | None,
        C: int,
        variance_only: bool,
        inverses: list[Tensor],
    ) -> Tensor:
        """Return covariances (m, K, K) or variances (m, K) of the outputs at m positions.

        They are (1, ...) if they are the same at all positions.

        Args:
            squares: squares of the inputs in the basis of A, (m, d_in).
            columns: indices of the selected outputs (m, K); None selects all.
            C: number of outputs.
            variance_only: whether to return variances.
            inverses: inverse eigenvalues of the precision, for each parameter.
        """
        # Weight and bias are independent in the posterior, so their covariances add. For both the
        # covariance is Q diag(w) Qᵀ, with one w for each position, or for all of them (a bias).
        total: Tensor | float = 0.0
        for (local, (Q, *_)), inverse in zip(self._bases.items(), inverses, strict=True):
            w = squares @ inverse.mT if local == "weight" else inverse  # (m, k); (1, k) of a bias
            if variance_only:
                of_all = w if Q is None else w @ Q.square().mT  # (m or 1, C)
                if columns is not None:
                    of_all = of_all.expand(len(squares), C).gather(1, columns)
                total = total + of_all
            elif Q is not None:
                rows = Q[None] if columns is None else Q[columns]  # (m or 1, K, k)
                total = total + (rows * w[:, None]) @ rows.mT
            elif columns is None:  # Q is the identity: outputs are uncorrelated
                total = total + w.diag_embed()
            else:
                equal = columns[:, :, None] == columns[:, None]
                total = total + equal * w.expand(len(squares), C).gather(1, columns)[:, None]
        assert isinstance(total, Tensor)  # there is a parameter
        return total


def _versions(*tensors: Any) -> tuple[int, ...]:
    """Return torch's counters of changes in place."""
    return tuple(t._version for t in tensors if isinstance(t, Tensor))


def _computes(
    parameters: Mapping[str, Tensor | None], rule: WeightSharingRule, a: Tensor, f: Tensor
) -> bool:
    """Return whether an example's outputs are W a_r + b."""
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None:  # of a sharded model, computed from other parameters
        return False
    weight = weight if rule.transposed else weight.flatten(1).mT
    inputs = rule.inputs(a)[0]  # (1, R, d_in)
    if inputs.shape[-1] != len(weight) or inputs.shape[1] != _positions(f).shape[1]:
        return False
    return close(_positions(f), inputs.to(weight.dtype) @ weight + (0.0 if bias is None else bias))


def _positions(f: Tensor) -> Tensor:
    """Return (N, ..., C) as (N, R, C)."""
    return f.flatten(1, -2) if f.dim() > 2 else f[:, None]


def _equal_outputs(z: Tensor, f: Tensor, features: int) -> bool:
    """Return whether the layer's output equals the model's, up to the axis of features."""
    z, f = _positions(z.movedim(features, -1)), _positions(f)
    return z.shape == f.shape and torch.equal(z, f)
