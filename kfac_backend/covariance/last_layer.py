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
from kfac_backend.precision import at_least_float32, full_float32
from kfac_backend.sharding import detached_parameters, is_sharded


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
        self._model, self._name, self._precision = model, layer, precision
        self._layer = model.get_submodule(layer)
        self._memory = memory
        names = {id(p): name for name, p in model.named_parameters()}
        self._parameters = {
            local: names[id(p)]
            for local, p in self._layer.named_parameters(recurse=False)
            if names[id(p)] in precision
        }
        self._is_tied = any(
            p is other
            for p in self._layer.parameters()
            if names[id(p)] in precision
            for module in model.modules()
            for other in module._parameters.values()
            if module is not self._layer
        )
        self._general: OutputCovariance | None = None
        self._rule: WeightSharingRule | None = None
        self._inverse: list[tuple[Tensor | None, Tensor | None, Tensor]] | None = None

    def __call__(
        self,
        x: Any,
        positions: Bool[Tensor, "N *R"] | None = None,
        classes: Int[Tensor, "*chosen K"] | None = None,
        *,
        variance_only: bool = False,
    ) -> tuple[Float[Tensor, "*chosen C"], Float[Tensor, "..."]]:
        """Return outputs and covariances for a batch; see `OutputCovariance`.

        Raises:
            NotImplementedError: a weight that is shared with another layer, in a layer whose
                outputs differ from the model's.
        """
        with full_float32(), torch.inference_mode(False):
            x = detached(x, next(self._model.parameters()).device)
            check_not_empty(x)
            # FSDP keeps the root's parameters gathered, so restore the whole model.
            with preserve_state(self._model if is_sharded(self._model) else self._layer):
                outputs = self._run(x)
            if outputs is not None:
                with torch.no_grad(), torch.autocast(outputs[0].device.type, enabled=False):
                    return self._of_linear(*outputs, positions, classes, variance_only)
        if self._is_tied:
            raise NotImplementedError(
                f"The outputs of {type(self._model).__name__} depend on its last layer "
                f"'{self._name}' and on another layer with the same weight. The covariance of the "
                "last layer alone is therefore not supported. Use all layers."
            )
        if self._general is None:
            self._general = OutputCovariance(self._model, self._precision, memory=self._memory)
        return self._general(x, positions, classes, variance_only=variance_only)

    def _run(self, x: Any) -> tuple[Tensor, Tensor, WeightSharingRule] | None:
        """Return the outputs, the last layer's input and its rule, or None if the formula fails.

        The formula holds if the layer computes W a_r + b and the model's outputs equal the layer's,
        in value and in derivative. The derivative is the same if the model returns the layer's
        tensor, without hooks and in-place operations. Otherwise random noise that is propagated
        back must arrive unchanged.
        """
        registered_rule = registered(self._layer)
        if registered_rule is None or not issubclass(registered_rule.rule, WeightSharingRule):
            return None
        if not self._parameters or not registered_rule.rule.parameter_names.issuperset(
            self._parameters
        ):
            return None
        rule = self._rule
        if rule is None or type(rule) is not registered_rule.rule:
            self._rule = rule = registered_rule.rule(self._layer, "expand", self._parameters)
        if rule.groups > 1 or not rule.same_gradients or rule.takes_integers:
            return None
        runs: list[tuple[Tensor, Tensor, Tensor, Any]] = []

        def hook(layer: Any, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            z = output.detach().requires_grad_()
            output = z.clone()  # which activations may change in place
            runs.append((rule.input_of(args, kwargs), z, output, output.grad_fn))
            if "weight" not in own and not copies:  # computed from other parameters
                own["weight"] = cast("Tensor", layer.weight).detach()
            return output

        copies = is_sharded(self._model)  # FSDP drops whole weights after the layer
        own: dict[str, Tensor | None] = {}

        def before(layer: nn.Module, args: tuple) -> None:
            for local, p in layer._parameters.items():
                own[local] = p if p is None else p.detach().clone() if copies else p.detach()

        # `preserve_state` removes them.
        self._layer.register_forward_pre_hook(before)
        self._layer.register_forward_hook(hook, with_kwargs=True)
        learned: dict[str, Tensor] = {}  # others are constants for `call_with`
        if self._alone:
            whole = detached_parameters(self._model) if copies else {}
            present = dict(self._layer.named_parameters(recurse=False))
            for local, name in self._parameters.items():
                learned[name] = whole.get(name, present[local]).detach().requires_grad_()
        with torch.enable_grad():
            f = call_with(self._model, learned, x)
        # If only the layer learns, its parameters may have another use, before or after it.
        is_used_before = self._alone and any(a.requires_grad for a, *_ in runs)
        if len(runs) != 1 or f.dim() < 2 or not f.requires_grad or is_used_before:
            return None
        ((a, z, output, node),) = runs
        is_same = f is output and f.grad_fn is node and not f._backward_hooks
        if not (is_same and rule.features == -1 and torch.equal(z, f)) and not _is_unchanged(
            f, z, [*learned.values()], rule.features
        ):
            return None
        f, a = f.detach(), a.detach()
        return (f, a, rule) if _computes(own, rule, a[:1], f[:1]) else None

    def _of_linear(
        self,
        f: Tensor,
        a: Tensor,
        rule: WeightSharingRule,
        positions: Tensor | None,
        classes: Tensor | None,
        variance_only: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and covariances by the layer's formula, some positions at a time."""
        C, M, wide = f.shape[-1], f[..., 0].numel(), at_least_float32(f)
        memory, itemsize = self._memory or default_memory(f.device), wide.element_size()
        weight = self._parameters.get("weight")
        d_in = 1 if weight is None else self._precision[weight][0].numel // C

        def most(K: int) -> int:
            # For each position: K rows of the basis, these weighted, and its input twice.
            of_one = itemsize * ((0 if variance_only else 3 * K * C) + 2 * (d_in + C))
            return max(1, memory // of_one)

        if positions is None and classes is None and M <= most(C):  # the usual case
            inputs = rule.inputs(a)[0].flatten(0, 1).to(wide.dtype)  # (M, d_in)
            result = wide.new_empty((M, C) if variance_only else (M, C, C))
            result[:] = self._some(inputs, None, C, rule.transposed, variance_only)
            return f.clone(), result.view(*f.shape[:-1], *result.shape[1:])
        mask = check_positions(positions, f.shape).to(f.device)
        shape = tuple(mask.shape) if positions is None else (int(mask.sum()),)
        columns = check_classes(classes, shape, C)
        f = f[mask]  # (M, C)
        if columns is not None:
            columns = columns.to(f.device)
            f = f.gather(1, columns)
        K = f.shape[1]
        result = wide.new_empty((len(f), K) if variance_only else (len(f), K, K))
        size = most(K)
        by_example = mask.flatten(1) if mask.dim() > 1 else mask[:, None]
        examples = max(1, memory // (itemsize * by_example.shape[1] * (d_in + 1)))
        num_done = 0
        for start in range(0, len(a), examples):
            some = by_example[start : start + examples]
            if not some.any():
                continue
            inputs = rule.inputs(a[start : start + examples])[0][some]  # (m, d_in)
            for now in inputs.to(wide.dtype).split(size):
                of_now = slice(num_done, num_done + len(now))
                of_rows = None if columns is None else columns[of_now]
                result[of_now] = self._some(now, of_rows, C, rule.transposed, variance_only)
                num_done += len(now)
        return f.unflatten(0, shape), result.unflatten(0, shape)

    def _some(
        self, a: Tensor, columns: Tensor | None, C: int, transposed: bool, variance_only: bool
    ) -> Tensor:
        """Return covariances (m, K, K) or variances (m, K) for the inputs a at m positions."""
        # Weight and bias are independent in the posterior, so their covariances add. For both the
        # covariance is Q diag(w) Qᵀ, with one w for each position, or for all of them (a bias).
        total: Tensor | None = None
        for Q, Q_A, inverse in self._bases(transposed):
            w = inverse  # (1, k) of a bias
            if inverse.dim() == 3:
                w = rotated(a[None], Q_A)[0].square() @ inverse[0].mT  # (m, k)
            if variance_only:
                part = w if Q is None else w @ Q.square().mT  # (m or 1, C)
                if columns is not None:
                    part = part.expand(len(a), C).gather(1, columns)
            elif Q is not None:
                rows = Q[None] if columns is None else Q[columns]  # (m or 1, K, k)
                part = (rows * w[:, None]) @ rows.mT
            elif columns is None:  # Q is the identity: outputs are uncorrelated
                part = w.diag_embed()
            else:
                equal = columns[:, :, None] == columns[:, None]
                part = equal * w.expand(len(a), C).gather(1, columns)[:, None]
            total = part if total is None else total + part
        assert total is not None  # a parameter is uncertain
        return total

    def _bases(self, transposed: bool) -> list[tuple[Tensor | None, Tensor | None, Tensor]]:
        """Return Q_B, Q_A and the inverse spectrum of each parameter; computed once.

        The inverse is (1, d_out, d_in) of a weight and (1, d_out) of a bias.
        """
        if self._inverse is None:
            bases_and_inverses = []
            for local, name in self._parameters.items():
                block, spectrum = self._precision[name]
                if local == "weight":
                    Q_B, Q_A, spectrum = bases(block, spectrum, transposed)
                    Q = None if Q_B is None else Q_B[0]
                    bases_and_inverses.append((Q, Q_A, spectrum.reciprocal()))
                else:
                    Q = block.Q_B if block.Q_B.dim() == 2 else None  # of a diagonal
                    bases_and_inverses.append((Q, None, spectrum.reciprocal().reshape(1, -1)))
            self._inverse = bases_and_inverses
        return self._inverse


def _is_unchanged(f: Tensor, z: Tensor, parameters: list[Tensor], features: int) -> bool:
    """Return whether outputs f equal the layer's z in value and derivative, up to axes.

    The parameters must not have another use after the layer.
    """
    # Equal values are not enough, because later operations may change only derivatives. Use a
    # separate generator: checks must not use the user's random numbers.
    generator = torch.Generator(f.device).manual_seed(0)
    noise = torch.randn(f.shape, dtype=f.dtype, device=f.device, generator=generator)
    back, *others = torch.autograd.grad(f, [z, *parameters], noise, allow_unused=True)
    if any(other is not None for other in others):
        return False
    return _equal_outputs(z, f, features) and _equal_outputs(back, noise, features)


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
    rows = inputs[0].to(weight.dtype)
    # Not F.linear, which a tensor of another class or the user's code may replace.
    z = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return close(_positions(f), z[None])


def _positions(f: Tensor) -> Tensor:
    """Return (N, ..., C) as (N, R, C)."""
    return f.flatten(1, -2) if f.dim() > 2 else f[:, None]


def _equal_outputs(z: Tensor, f: Tensor, features: int) -> bool:
    """Return whether the layer's output equals the model's, up to the axis of features."""
    z, f = _positions(z.movedim(features, -1)), _positions(f)
    return z.shape == f.shape and torch.equal(z, f)
