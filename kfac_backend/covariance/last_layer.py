"""Compute the output covariance for an uncertain last layer, with a forward pass alone.

If a linear layer or a convolution computes the outputs, f_r = W a_r + b, the gradient of f_rc with
respect to W is e_c ⊗ a_r, and with respect to b it is e_c. In the eigenbasis of W's block, the
covariance of outputs c and c' at position r is Σ_i (Q_B)_ci (Q_B)_c'i w_i with w_i = Σ_j ã_j² /
s_ij. Nothing is propagated back, and positions do not depend on each other. The variances alone, c
= c', need no C×C array.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kfac_backend.covariance.contraction import bases
from kfac_backend.covariance.gradients import PosteriorPrecision
from kfac_backend.covariance.output_covariance import (
    OutputCovariance,
    check_classes,
    check_not_empty,
    check_positions,
    default_memory,
)
from kfac_backend.engine.batches import detached
from kfac_backend.engine.model_calls import (
    call_with,
    close,
    has_known_code,
    noise_like,
    preserve_state,
)
from kfac_backend.layers import WeightSharingRule, registered
from kfac_backend.precision import at_least_float32, full_float32
from kfac_backend.sharding import detached_parameters, is_sharded

MOST_KEPT = 2**20
"""Maximum number of entries of a basis whose squares are kept."""


class _Basis(NamedTuple):
    """Eigenvectors of a parameter's posterior precision, and D inverse spectra."""

    Q_B: Tensor | None
    """(C, d_out); None is the identity."""
    squares_B: Tensor | None
    """Squares of Q_B's entries, (d_out, C); None if these are too many to keep."""
    Q_A: Tensor | None
    """(1, d_in, d_in), of a weight; None is the identity."""
    inverse: Tensor
    """(D, d_out, d_in) of a weight, (D, 1, d_out) of a bias."""
    is_weight: bool


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
        self._noise: Tensor | None = None  # in the shape of the outputs
        self._rule: WeightSharingRule | None = None
        self._bases: list[_Basis] | None = None
        self._device = next(model.parameters()).device

    def __call__(
        self,
        x: Any,
        positions: Bool[Tensor, "N *R"] | None = None,
        classes: Int[Tensor, "*chosen K"] | None = None,
        *,
        variance_only: bool = False,
        added: Float[Tensor, "D"] | None = None,
    ) -> tuple[Float[Tensor, "*chosen C"], Float[Tensor, "..."]]:
        """Return outputs and covariances for a batch; see `OutputCovariance`.

        Raises:
            NotImplementedError: a weight that is shared with another layer, in a layer whose
                outputs differ from the model's.
        """
        with full_float32(), torch.inference_mode(False):
            x = detached(x, self._device)
            check_not_empty(x)
            # FSDP keeps the root's parameters gathered, so restore the whole model.
            with preserve_state(self._model if is_sharded(self._model) else self._layer):
                outputs = self._run(x)
            if outputs is not None:
                with torch.no_grad(), _without_autocast(outputs[0].device):
                    if added is None:
                        if self._bases is None:
                            self._bases = self._bases_at(outputs[-1].transposed, None)
                        options = positions, classes, variance_only, self._bases
                        f, covariance = self._of_linear(*outputs, *options)
                        return f, covariance[0]
                    parts = []
                    for some in added.split(self._most_at_once()):
                        bases_of_some = self._bases_at(outputs[-1].transposed, some)
                        options = positions, classes, True, bases_of_some
                        parts.append(self._of_linear(*outputs, *options))
                    return parts[0][0], torch.cat([variances for _, variances in parts])
        if self._is_tied:
            raise NotImplementedError(
                f"The outputs of {type(self._model).__name__} depend on its last layer "
                f"'{self._name}' and on another layer with the same weight. The covariance of the "
                "last layer alone is therefore not supported. Use all layers."
            )
        if self._general is None:
            self._general = OutputCovariance(self._model, self._precision, memory=self._memory)
        return self._general(x, positions, classes, variance_only=variance_only, added=added)

    def _run(self, x: Any) -> tuple[Tensor, Tensor, WeightSharingRule] | None:
        """Return the outputs, the last layer's input and its rule, or None if the formula fails.

        The formula holds if the layer computes W a_r + b and the model's outputs equal the layer's,
        in value and in derivative: random noise that is propagated back must arrive unchanged.
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
        if has_known_code(self._model) and (outputs := self._run_known(x, rule)) is not None:
            return outputs
        runs: list[tuple[Tensor, Tensor]] = []

        def hook(layer: Any, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            z = output.detach().requires_grad_()
            runs.append((rule.input_of(args, kwargs), z))
            if "weight" not in own and not copies:  # computed from other parameters
                own["weight"] = cast("Tensor", layer.weight).detach()
            return z.clone()  # which activations may change in place

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
        is_used_before = self._alone and any(a.requires_grad for a, _ in runs)
        if len(runs) != 1 or f.dim() < 2 or not f.requires_grad or is_used_before:
            return None
        ((a, z),) = runs
        if not self._is_unchanged(f, z, [*learned.values()], rule.features):
            return None
        f, a = f.detach(), a.detach()
        return (f, a, rule) if _computes(own, rule, a[:1], f[:1]) else None

    def _run_known(
        self, x: Any, rule: WeightSharingRule
    ) -> tuple[Tensor, Tensor, WeightSharingRule] | None:
        """Return the same as `_run` for a model of known code, or None if another layer follows.

        If the model returns the layer's own tensor, unchanged, its derivative is the layer's.
        """
        runs: list[tuple[Tensor, Tensor, int]] = []

        def hook(_: Any, args: tuple, kwargs: dict, output: Tensor) -> None:
            runs.append((rule.input_of(args, kwargs), output, output._version))

        handle = self._layer.register_forward_hook(hook, with_kwargs=True)
        with torch.no_grad():
            f = call_with(self._model, None, x)
            handle.remove()
            if len(runs) != 1 or f.dim() < 2 or rule.features != -1:
                return None
            ((a, z, version),) = runs
            if f is not z or f._version != version:
                return None
            is_linear = _computes(self._layer._parameters, rule, a[:1], f[:1])
        return (f, a, rule) if is_linear else None

    def _is_unchanged(self, f: Tensor, z: Tensor, parameters: list[Tensor], features: int) -> bool:
        """Return whether outputs f equal the layer's z in value and derivative, up to axes.

        The parameters must not have another use after the layer.
        """
        # Equal values are not enough, because later operations, or hooks on tensors and on nodes of
        # the graph, may change only derivatives.
        noise = self._noise
        if noise is None or (noise.shape, noise.dtype) != (f.shape, f.dtype):
            self._noise = noise = noise_like(f)
        back, *others = torch.autograd.grad(f, [z, *parameters], noise, allow_unused=True)
        if any(other is not None for other in others):
            return False
        return _equal_outputs(z, f, features) and _equal_outputs(back, noise, features)

    def _of_linear(
        self,
        f: Tensor,
        a: Tensor,
        rule: WeightSharingRule,
        positions: Tensor | None,
        classes: Tensor | None,
        variance_only: bool,
        bases: list[_Basis],
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and covariances by the layer's formula, some positions at a time.

        The covariances are (1, ..., K, K), and the variances (D, ..., K) for D inverse spectra.
        """
        D = len(bases[0].inverse)
        C, M, wide = f.shape[-1], f.shape[:-1].numel(), at_least_float32(f)
        memory, itemsize = self._memory or default_memory(f.device), wide.element_size()
        weight = self._parameters.get("weight")
        d_in = 1 if weight is None else self._precision[weight][0].numel // C

        def most(K: int) -> int:
            # For each position: K rows of the basis, these weighted, and its input twice.
            of_one = itemsize * ((0 if variance_only else 3 * K * C) + 2 * (d_in + D * C))
            return max(1, memory // of_one)

        if positions is None and classes is None and M <= most(C):  # the usual case
            inputs = rule.inputs(a)[0].flatten(0, 1).to(wide.dtype)  # (M, d_in)
            result = _some(inputs, None, C, bases, variance_only).to(wide.dtype)
            if not any(basis.is_weight for basis in bases):  # a bias, for which this may be cached
                result = result.expand(-1, M, *result.shape[2:]).clone(
                    memory_format=torch.contiguous_format
                )
            return f.clone(), result.view(D, *f.shape[:-1], *result.shape[2:])
        mask = check_positions(positions, f.shape).to(f.device)
        shape = tuple(mask.shape) if positions is None else (int(mask.sum()),)
        columns = check_classes(classes, shape, C)
        f = f[mask]  # (M, C)
        if columns is not None:
            columns = columns.to(f.device)
            f = f.gather(1, columns)
        K = f.shape[1]
        result = wide.new_empty((D, len(f), K) if variance_only else (D, len(f), K, K))
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
                result[:, of_now] = _some(now, of_rows, C, bases, variance_only)
                num_done += len(now)
        return f.unflatten(0, shape), result.unflatten(1, shape)

    def _most_at_once(self) -> int:
        """Return the number of inverse spectra that fit into the memory."""
        nbytes = sum(self._precision[name][1].nbytes for name in self._parameters.values())
        return max(1, (self._memory or default_memory(self._device)) // nbytes)

    def _bases_at(self, transposed: bool, added: Tensor | None) -> list[_Basis]:
        """Return the basis of each parameter, with the inverse spectra 1 / (s + δ)."""
        all_bases = []
        for local, name in self._parameters.items():
            block, spectrum = self._precision[name]
            if local == "weight":
                Q_B, Q_A, s = bases(block, spectrum, transposed)  # (1, d_out, d_in)
                Q_B = None if Q_B is None else Q_B[0]
            else:
                Q_B, Q_A = block.Q_B if block.Q_B.dim() == 2 else None, None  # None of a diagonal
                s = spectrum.reshape(1, 1, -1)
            s = s if added is None else s + added.to(s)[:, None, None]
            squares = None
            if Q_B is not None and Q_B.numel() <= MOST_KEPT:
                squares = Q_B.square().mT
            all_bases.append(_Basis(Q_B, squares, Q_A, s.reciprocal(), local == "weight"))
        return all_bases


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    is_enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_enabled else nullcontext()


def _some(
    a: Tensor, columns: Tensor | None, C: int, bases: list[_Basis], variance_only: bool
) -> Tensor:
    """Return covariances (1, m, K, K) or variances (D, m, K) for the inputs a at m positions."""
    # Weight and bias are independent in the posterior, so their covariances add. For both the
    # covariance is Q diag(w) Qᵀ, with one w for each position, or for all of them (a bias).
    total: Tensor | None = None
    for Q, squares_B, Q_A, inverse, is_weight in bases:
        w = inverse  # (D, 1, k) of a bias
        if is_weight:
            squares = (a if Q_A is None else a.to(Q_A.dtype) @ Q_A[0]).square()
            # A plain product is faster than a batch of one.
            w = (squares @ inverse[0].mT)[None] if len(inverse) == 1 else squares @ inverse.mT
        if variance_only:
            if Q is not None and squares_B is None:
                squares_B = Q.square().mT
            part = w if squares_B is None else w @ squares_B  # (D, m or 1, C)
            if columns is not None:
                part = part.expand(-1, len(a), C).gather(2, columns.expand(len(part), -1, -1))
        elif Q is not None:
            rows = Q[None] if columns is None else Q[columns]  # (m or 1, K, k)
            part = ((rows * w[0, :, None]) @ rows.mT)[None]
        elif columns is None:  # Q is the identity: outputs are uncorrelated
            part = w.diag_embed()
        else:
            equal = columns[:, :, None] == columns[:, None]
            part = (equal * w[0].expand(len(a), C).gather(1, columns)[:, None])[None]
        total = part if total is None else total + part
    assert total is not None  # a parameter is uncertain
    return total


def _computes(
    parameters: Mapping[str, Tensor | None], rule: WeightSharingRule, a: Tensor, f: Tensor
) -> bool:
    """Return whether an example's outputs are W a_r + b."""
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None:  # of a sharded model, computed from other parameters
        return False
    weight = weight if rule.transposed else weight.flatten(1).mT
    inputs, positions = rule.inputs(a)[0], _positions(f)  # (1, R, d_in) and (1, R, C)
    if inputs.shape[-1] != len(weight) or inputs.shape[1] != positions.shape[1]:
        return False
    rows = inputs[0].to(weight.dtype)
    # Not F.linear, which a tensor of another class or the user's code may replace.
    z = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return close(positions, z.unsqueeze(0))


def _positions(f: Tensor) -> Tensor:
    """Return (N, ..., C) as (N, R, C)."""
    return f.flatten(1, -2) if f.dim() > 2 else f.unsqueeze(1)


def _equal_outputs(z: Tensor, f: Tensor, features: int) -> bool:
    """Return whether the layer's output equals the model's, up to the axis of features."""
    if features != -1 or z.shape != f.shape:
        z, f = _positions(z.movedim(features, -1)), _positions(f)
    return z.shape == f.shape and torch.equal(z, f)
