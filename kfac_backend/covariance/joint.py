"""The joint covariance of the outputs of several inputs, differentiable in the inputs.

J(x) Σ J(x')ᵀ for every two of q inputs, as Bayesian optimisation needs it. As in
`output_covariance`, C vectors are propagated back to the layers' outputs only, here with a graph
(``create_graph``), and the layers' inputs and gradients are contracted in the eigenbasis of their
blocks. With one position G̃_nc = b̃_nc ã_nᵀ, so that two examples have the covariance
Σ_i b̃_nci b̃_mdi Σ_j ã_nj ã_mj / s_ij, which needs no gradient (d_out, d_in) of any example. With
several positions a tensor's gradients are computed some rows at a time, and again in the backward
pass instead of being kept.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfac_backend.blocks.block import EigenBlock
from kfac_backend.covariance.eigenbasis import (
    LARGEST_PRODUCT,
    bases,
    by_group,
    dense_in_basis,
    grouped,
    rotated,
)
from kfac_backend.covariance.layer_gradients import PosteriorPrecision
from kfac_backend.covariance.output_covariance import check_classes, check_rows, proof_for
from kfac_backend.covariance.parameter_gradients import ParameterGradients, group_of
from kfac_backend.covariance.uncovered import UncoveredGradients
from kfac_backend.layers import ExampleGradients, Use
from kfac_backend.model.calls import plain_attention, restoration
from kfac_backend.model.capture import Capture
from kfac_backend.model.checks import check_output
from kfac_backend.model.rule_assignment import TrackedLayer
from kfac_backend.precision import at_least_float32, full_float32

__all__ = ["JointCovariance", "joint_covariance"]


class JointCovariance:
    """A function from sets of q inputs to their outputs (T, q, C) and covariances (T, q·C, q·C).

    Exact for the linearised network. Both results are differentiable in the inputs if these require
    a gradient; parameters and their posterior are constants. All sets are computed at once, with C
    backward passes, whose graph is held in memory if the inputs require a gradient.

    Args:
        model: the network at the posterior's mean. It runs in the mode (train or eval) it is in.
        precision: the posterior precision, block by block; parameters without a block are
            constants.

    Raises:
        ValueError: no block, or one of a parameter that the model does not have.
    """

    def __init__(self, model: nn.Module, precision: PosteriorPrecision) -> None:
        self._proof = proof_for(model, precision)
        self._model = model
        self._precision = precision
        device = next(model.parameters()).device.type
        self._product_bytes = LARGEST_PRODUCT.get(device, LARGEST_PRODUCT["cuda"])

    def __call__(
        self, x: Float[Tensor, "T q *shape"], classes: list[int] | None = None
    ) -> tuple[Float[Tensor, "T q K"], Float[Tensor, "T q_K q_K"]]:
        """Outputs and covariances of T sets of inputs; output c of input p is number p·K + c.

        Args:
            x: the inputs, in the model's dtype and on its device.
            classes: indices of the K wanted outputs; all C if None.

        Raises:
            TypeError: a model whose output is not a tensor.
            ValueError: no inputs; indices of outputs that the model does not have.
            NotImplementedError: outputs that are not (N, C); a layer that hooks cannot follow.
        """
        if x.dim() < 3 or not x.shape[:2].numel():
            raise ValueError(
                f"x has shape {tuple(x.shape)}; sets of inputs (T, q, ...) are needed, with at "
                "least one input: x[None] for a single set."
            )
        with (
            full_float32(),
            plain_attention.held(),
            torch.inference_mode(False),
        ):
            differentiable = torch.is_grad_enabled() and x.requires_grad
            flat = (x.clone() if x.is_inference() else x).flatten(0, 1)
            layers = (tracked.layer for tracked in self._proof.assignment.layers)
            restore = restoration(self._model, *layers)
            try:
                self._prove(flat.detach())
                if not differentiable:
                    flat = flat.detach()
                f, covariance = self._joint(flat, x.shape[1], classes, differentiable)
            finally:
                restore()
        return f.unflatten(0, x.shape[:2]), covariance

    def _prove(self, x: Tensor) -> None:
        """Prove, once, that the hooks see all."""
        if not self._proof.is_made(len(x)):
            self._proof.make(x, len(x))
            self._gradients = ParameterGradients(self._proof.assignment)
            self._uncovered = UncoveredGradients(
                self._model, self._proof.assignment.diagonal, self._product_bytes
            )

    def _joint(
        self, x: Tensor, q: int, classes: list[int] | None, differentiable: bool
    ) -> tuple[Tensor, Tensor]:
        """Outputs (N, K) and covariances (T, q·K, q·K)."""
        N = len(x)
        seen: dict[tuple[TrackedLayer, Use], list[tuple[int, Tensor]]] = {}
        current = 0

        def on_gradient(tracked: TrackedLayer, use: Use, b: Tensor) -> None:
            check_rows(tracked, use, N)
            rows = self._gradients.rules[tracked].position_gradients(use, b)  # (M, R, d_out)
            seen.setdefault((tracked, use), []).append((current, rows))

        with Capture(
            self._model,
            self._proof.assignment,
            lambda tracked, use: None,
            on_gradient,
            keep_inputs=True,
            differentiable=differentiable,
        ) as capture:
            f = capture.forward(x)
            check_output(f)
            if f.dim() != 2 or len(f) != N:
                raise NotImplementedError(
                    f"The model returned shape {tuple(f.shape)} for {N} inputs; joint covariances "
                    "support outputs (N, C), such as those of regression."
                )
            wanted = torch.arange(f.shape[1]) if classes is None else torch.tensor(classes)
            check_classes(wanted, (N,), f.shape[1])
            for current in range(len(wanted)):
                vector = torch.zeros_like(f)
                vector[:, wanted[current]] = 1
                capture.backward(f, [vector])
        wanted = wanted.to(f.device)
        f = f[:, wanted]
        if not differentiable:
            f = f.detach()
        K = len(wanted)
        total = at_least_float32(f.detach()).new_zeros(N // q, q * K, q * K)
        with (
            torch.autocast(f.device.type, enabled=False),
            torch.set_grad_enabled(differentiable),
        ):
            uses = [(*key, _stacked(found, K)) for key, found in seen.items()]
            # The graph holds the hooks, which hold ``seen``, which would hold the graph: a cycle
            # that reference counting never frees.
            seen.clear()
            for (name, (slot, slots)), gradients in self._gradients.of_uses(uses):
                block, spectrum = self._precision[name]
                if slots > 1:
                    block, spectrum = group_of(block, slot), spectrum[slot]
                one_way = gradients.in_one_way()
                if one_way is None:
                    (dense,) = gradients.dense(N * K * spectrum.numel() * 8)
                    in_basis = dense_in_basis(dense, block, spectrum) * spectrum.rsqrt()
                    total = total + _gram(in_basis.flatten(2), q)
                    continue
                joined, transposed = one_way
                total = total + joint_covariance(
                    joined, block, spectrum, q, self._product_bytes, transposed=transposed
                )
            if self._proof.assignment.diagonal:
                total = total + self._of_uncovered(x, f, wanted, q)
        return f, total

    def _of_uncovered(self, x: Tensor, f: Tensor, wanted: Tensor, q: int) -> Tensor:
        """The part of parameters without a rule, whose blocks are diagonal."""
        positions = torch.zeros(len(x), dtype=torch.long, device=x.device)
        columns = wanted.expand(len(x), -1)
        parts = [part for _, part in self._uncovered(x, f, positions, columns)]
        total = f.new_zeros(())
        for name in parts[0]:
            b = torch.cat([part[name].b for part in parts], 1)
            total = total + joint_covariance(ExampleGradients(b), *self._precision[name], q)
        return total


def joint_covariance(
    gradients: ExampleGradients,
    block: EigenBlock,
    spectrum: Float[Tensor, "*G rows columns"],
    q: int,
    product_bytes: int = 8 * 2**20,
    *,
    transposed: bool = False,
) -> Float[Tensor, "T q_C q_C"]:
    """J(X) Σ J(X)ᵀ of T sets X of q examples, for the uncertainty of one parameter; exact.

    Args:
        gradients: the outputs' gradients in the parameter, of N = T·q examples.
        block: eigenvectors of the parameter's posterior precision.
        spectrum: its eigenvalues > 0, see `EigenBlock.spectrum`.
        q: the number of consecutive examples in a set.
        product_bytes: bytes of the gradients that are computed at once, but at least one row.
        transposed: whether the parameter is stored inputs first, (d_in, d_out).
    """
    b = gradients.b.to(block.Q_B.dtype)
    if gradients.a is None or block.Q_A is None:
        b = b.sum(2)  # (G, N, C, d_out)
        if block.Q_B.shape[-1] == 1:  # a diagonal, for P groups of one entry or one of P
            return _gram(b.movedim(0, 2).flatten(2) * spectrum.flatten().rsqrt(), q)
        b = rotated(b, by_group(block.Q_B)) * grouped(spectrum)[:, None, None, :, 0].rsqrt()
        return _gram(b.movedim(0, 2).flatten(2), q)
    Q_B, Q_A, spectrum = bases(block, spectrum, transposed)
    a = rotated(gradients.a.to(block.Q_A.dtype), Q_A)
    b = rotated(b, Q_B)
    G, N, R, C, d_out = b.shape
    d_in = a.shape[-1]
    # For large sets of small layers the gradients take less memory than the products of pairs.
    if R == 1 and q * (d_in + C * d_out) <= C * d_in * d_out:
        b, a = b[:, :, 0].unflatten(1, (-1, q)), a[:, :, 0].unflatten(1, (-1, q))
        pairs = a[:, :, :, None] * a[:, :, None]  # (G, T, q, q, d_in)
        weights = pairs @ spectrum.reciprocal().mT[:, None, None]  # (G, T, q, q, d_out)
        scaled = weights[..., None, :] * b[:, :, :, None]  # (G, T, q, q, C, d_out)
        return torch.einsum("gtprco,gtrdo->tpcrd", scaled, b).flatten(3).flatten(1, 2)

    def of_rows(b: Tensor, a: Tensor, spectrum: Tensor) -> Tensor:
        in_basis = torch.einsum("nrco,nri->ncoi", b, a) * spectrum.rsqrt()
        return _gram(in_basis.flatten(2), q)

    rows = max(1, product_bytes // (N * C * d_in * b.element_size()))
    total = b.new_zeros(())
    for g in range(G):
        for start in range(0, d_out, rows):
            some = slice(start, start + rows)
            part = b[g, ..., some], a[g], spectrum[g, some]
            again = b.requires_grad or a.requires_grad
            total = total + (
                checkpoint(of_rows, *part, use_reentrant=False, preserve_rng_state=False)
                if again
                else of_rows(*part)
            )
    return total


def _gram(features: Float[Tensor, "N C P"], q: int) -> Float[Tensor, "T q_C q_C"]:
    """The inner products between all outputs of a set's examples."""
    rows = features.unflatten(0, (-1, q)).flatten(1, 2)
    return rows @ rows.mT


def _stacked(found: list[tuple[int, Tensor]], K: int) -> Tensor:
    """The gradients (M, R, K, d_out) of all K outputs; zero for outputs that do not reach a use."""
    by_output = dict(found)
    none = torch.zeros_like(found[0][1])
    return torch.stack([by_output.get(c, none) for c in range(K)], 2)
