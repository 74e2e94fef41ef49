"""`factor_gradients`: differentiate a function of the factors in variables behind the inputs.

An augmentation with a learned range changes all inputs, and with them the factors A and B of every
layer. To learn the range by the evidence, its derivative must include this change. Source: Immer et
al. 2022 (arXiv:2202.10638), who differentiate the whole evidence; here it is the chain rule. With
the derivatives G_A = ∂F/∂A and G_B = ∂F/∂B of a function F of the factors,

    dF/dη = Σ_layers (⟨G_A, dA/dη⟩ + ⟨G_B, dB/dη⟩),

and because A is a mean of outer products a aᵀ, and B a sum of outer products b bᵀ, these are
derivatives of Σ aᵀ G_A a and Σ bᵀ G_B b at fixed G. One more pass, batch by batch, is therefore
enough. It differentiates its backward passes once more and sums no factor.

A parameter of the likelihood changes no input, but only the backward vectors v. A row b is linear
in its vector, so Σ bᵀ G b is a quadratic form q(v). Its derivative along v' is ½ (q(v + v') − q(v −
v')), with negligible rounding. These are plain backward passes, as models under `fully_shard` need:
for a second backward pass through the first, FSDP has already freed the weights.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfac_backend.blocks.kronecker import KroneckerFactors
from kfac_backend.engine.batches import NO_BATCH
from kfac_backend.engine.driver import Driver
from kfac_backend.engine.factor_sums import FactorSums
from kfac_backend.engine.model_calls import plain_attention
from kfac_backend.engine.rule_assignment import RuleAssignment
from kfac_backend.layers.gram import FactorSum, Gram
from kfac_backend.layers.rule import BlockSums
from kfac_backend.likelihoods import loss_sum
from kfac_backend.options import CurvatureOptions, KfacApprox
from kfac_backend.ranks import ProcessGroupOption
from kfac_backend.sharding import check_whole, is_sharded


class BlockDerivative(NamedTuple):
    """Derivatives of a function with respect to one block's factors, in the factors' shapes."""

    B: Tensor
    A: Tensor | None = None


def factor_gradients(
    factors: KroneckerFactors,
    model: nn.Module,
    data: Iterable[Any],
    tensors: Sequence[Tensor],
    of_factors: Mapping[str, BlockDerivative],
    of_loss: float = 0.0,
    options: CurvatureOptions | None = None,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
    process_group: ProcessGroupOption = "default",
) -> list[Tensor]:
    """Return the gradient of F(factors) + c·Σ ℓ in tensors that the model's inputs depend on.

    The gradient includes the change of the loss Hessian Λ with the outputs. It uses the columns of
    the root S of Λ. If the Fisher draws, it uses S ε with random signs ε, which is unbiased. The
    model's parameters, and the blocks of parameters without a rule, are constants.

    Args:
        factors: factors of the model, at which F was differentiated.
        model: the model, in the mode in which the factors were computed.
        data: batches of all the data of the factors or of a random part of it, whose gradient is
            scaled by the share of the examples.
        tensors: leaf tensors from which the model computes inputs of its layers, such as buffers;
            they need not require a gradient. Parameters of layers are not supported. Or the
            likelihood's parameters, see `Likelihood.with_parameters`; under `fully_shard` only
            these.
        of_factors: ∂F/∂B and ∂F/∂A of each block, by name; omitted blocks do not count.
        of_loss: c.
        options: by default the options of the factors.
        generator: random numbers for a Fisher that draws.
        progress: whether to show a progress bar over the batches.
        process_group: the ranks that have a shard of the data each, as in `kronecker_factors`.

    Returns:
        For each tensor its gradient, summed over the data and the ranks.

    Raises:
        ValueError: there is no data, or no input depends on a tensor.
        NotImplementedError: two layers use a tensor in different ways; and as in
            `kronecker_factors`.
    """
    derivatives = FactorDerivatives(
        factors, model, tensors, of_factors, of_loss, options,
        generator=generator, process_group=process_group,
    )  # fmt: skip
    return derivatives.gradients(data, progress)


class FactorDerivatives:
    """`factor_gradients` of several parts of the data, one after the other, with one proof.

    It has the arguments of `factor_gradients`, and ``outputs``: an optional list that receives
    the outputs and targets of this rank's data, on the CPU.
    """

    def __init__(
        self,
        factors: KroneckerFactors,
        model: nn.Module,
        tensors: Sequence[Tensor],
        of_factors: Mapping[str, BlockDerivative],
        of_loss: float = 0.0,
        options: CurvatureOptions | None = None,
        *,
        generator: torch.Generator | None = None,
        process_group: ProcessGroupOption = "default",
        outputs: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        if not all(tensor.is_leaf and tensor.is_floating_point() for tensor in tensors):
            raise ValueError(
                "The gradient is requested for a tensor that was computed from others, or that "
                "contains integers. Pass the leaf tensors from which the model computes its "
                "layers' inputs."
            )
        numbers = list(map(id, factors.likelihood.parameters.values()))
        if not all(id(tensor) in numbers for tensor in tensors):
            check_whole(model, "The gradient of factors in variables of the inputs")
        options = factors.options if options is None else options
        self._factors, self._tensors = factors, list(tensors)
        self._driver = Driver(
            model, factors.likelihood, options, generator=generator, process_group=process_group
        )
        kind = PairedVectors if is_sharded(model) else PairedRows
        self._sink = kind(self._tensors, factors, of_factors, of_loss, options)
        self._sink.outputs = outputs

    def gradients(self, data: Iterable[Any], progress: bool = False) -> list[Tensor]:
        """Return the gradient over some data, scaled to the factors' data."""
        driver = self._driver
        driver.start(self._sink)
        # The proof only concerns the dependence of outputs on layers.
        with _requiring(self._tensors, False):
            driver.add_all(data, "Gradient of the factors", progress)
        sums = driver.finish()
        if not sums.num_data:
            raise ValueError(NO_BATCH)
        scale = self._factors.num_data / sums.num_data
        return [scale * gradient for gradient in sums.others.values()]


class PairedRows(FactorSums):
    """Differentiate Σ ⟨G, x xᵀ⟩ over all rows x that `FactorSums` would sum.

    The blocks of parameters without a rule are fixed. See `factor_gradients` for the arguments.
    """

    differentiable = True
    takes_example_gradients = False
    outputs: list[tuple[Tensor, Tensor]] | None = None

    def __init__(
        self,
        tensors: list[Tensor],
        factors: KroneckerFactors,
        of_factors: Mapping[str, BlockDerivative],
        of_loss: float,
        options: CurvatureOptions,
    ) -> None:
        super().__init__(options)
        self._tensors, self._factors = tensors, factors
        self._of_factors, self._of_loss = of_factors, of_loss

    def start(self, assignment: RuleAssignment, kfac_approx: KfacApprox) -> None:
        """Make the rules, with scalars instead of sums."""
        super().start(assignment, kfac_approx)
        self._gradients = [torch.zeros_like(tensor) for tensor in self._tensors]
        self._scalars: list[Tensor] = []
        # A weight and its bias have separate derivatives G_B, so they cannot share one sum.
        for rule in self.rules.values():
            rule.separate()
        weights: dict[FactorSum, Tensor] = {}
        of_slot: dict[tuple[str, tuple[int, int]], FactorSum] = {}
        for tracked, rule in self.rules.items():
            for local, name in tracked.parameters.items():
                index, count = slot = tracked.slots.get(local, (0, 1))
                G, terms = self._of_factors.get(name), self._factors.blocks[name].num_terms
                is_one_use = of_slot.setdefault((name, slot), rule.B[local]) is rule.B[local]
                if not is_one_use or (G is not None and G.A is not None and terms is None):
                    raise NotImplementedError(
                        f"Parameter '{name}' is used in different ways. Its block is the nearest "
                        "product of both uses, which cannot be differentiated. Use separate "
                        "tensors, or freeze it (requires_grad_(False))."
                    )
                if G is None:
                    continue
                of_B = G.B if count == 1 else G.B[index : index + 1]
                if G.A is None:
                    weights[rule.B[local]] = of_B
                    continue
                of_A = G.A if count == 1 else G.A[index : index + 1]
                # The factor over the columns is a mean over its terms.
                terms: Any = terms[index] if isinstance(terms, tuple) else terms
                rows, columns = rule.B[local], rule.A[local]
                if rule.transposed and local != "bias":
                    rows, columns = columns, rows
                weights |= {rows: of_B, columns: of_A / max(terms, 1)}
        # Rules choose the rows x as in any pass. Instead of Σ x xᵀ, each row is paired with G at
        # once, while its graph still exists.
        for rule in self.rules.values():
            for total in (*rule.A.values(), *rule.B.values()):
                moves = self.differentiable or total in rule.B.values()
                weight = weights.get(total) if moves else None
                total.gram = _Paired(total.gram, weight, self._scalars, self.differentiable)

    @contextmanager
    def around_batch(self) -> Iterator[None]:
        """Return a context in which the tensors require a gradient, and no attention is fused.

        Fused attention has only one derivative.
        """
        with _requiring(self._tensors, True), plain_attention():
            yield

    def batch_done(self, f: Tensor, y: Tensor) -> None:
        """Differentiate a part's inner products, as one number in one backward pass.

        The graph is dropped after each part, so that memory holds one part's.
        """
        value = self._of_loss * loss_sum(f, y, self._factors.likelihood)
        value = torch.stack([value.double(), *(s.double() for s in self._scalars)]).sum()
        self._scalars.clear()
        if not value.requires_grad:
            raise ValueError(
                "The model's outputs do not depend on the tensors for which the gradient is "
                "requested. Compute the layers' inputs from these tensors in the model's forward."
            )
        try:
            gradients = torch.autograd.grad(value, self._tensors, allow_unused=True)
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise NotImplementedError(
                "The derivative of the factors needs an activation that the model changed in "
                "place. Pass inplace=False (to ReLU, Dropout and similar layers)."
            ) from error
        self._add(gradients, f, y)

    def _add(self, gradients: Sequence[Tensor | None], f: Tensor, y: Tensor) -> None:
        if self.outputs is not None:
            self.outputs.append((f.detach().double().cpu(), y.cpu()))
        for total, gradient in zip(self._gradients, gradients, strict=True):
            if gradient is not None:
                total += gradient

    def sums(self) -> tuple[dict[str, list[BlockSums]], dict[str, Tensor]]:
        """Return the gradients by the tensors' numbers."""
        return {}, {str(k): gradient for k, gradient in enumerate(self._gradients)}


class PairedVectors(PairedRows):
    """Differentiate in the likelihood's parameters, by vectors on both sides; see the module."""

    differentiable = False
    _moved = 0, 0, 1.0
    """Data of the present vector: the tensor, the index in it, and the factor of its q, ±1/size for
    v' times size."""

    @contextmanager
    def around_batch(self) -> Iterator[None]:
        """Return a context in which the parameters require a gradient."""
        with _requiring(self._tensors, required=True):
            yield

    @torch.enable_grad()
    def vectors(
        self, of_fisher: Callable[[Tensor, Tensor], Iterator[Tensor]], f: Tensor, y: Tensor
    ) -> Iterator[Tensor]:
        """Yield v + ∂v/∂ξ and v − ∂v/∂ξ for each vector v and each number ξ of the likelihood."""
        # Only vectors with a graph: drawn labels have none, and no known derivative in ξ.
        for v in of_fisher(f.detach().requires_grad_(), y):
            for which, xi in enumerate(self._tensors):
                # ⟨u, v⟩ is linear in u. Its derivative in ξ, differentiated in u, is ∂v/∂ξ.
                u = torch.zeros_like(v, requires_grad=True)
                (slopes,) = torch.autograd.grad(v, xi, u, create_graph=True, allow_unused=True)
                for entry, slope in enumerate(() if slopes is None else slopes.flatten()):
                    (step,) = torch.autograd.grad(slope, u, retain_graph=True)
                    if not step.any() or not v.any():
                        continue
                    # Scale it to the length of v: otherwise q(v + v') and q(v − v') share most of
                    # their digits.
                    size = float(v.detach().norm() / step.norm())
                    for sign in (size, -size):
                        self._moved = which, entry, 1 / sign
                        yield v.detach() + sign * step

    def vector_done(self) -> None:
        """Add half of a vector's quadratic form q to a number's derivative, or subtract it."""
        super().vector_done()
        for scalar in self._scalars:
            which, entry, weight = self._moved
            self._gradients[which].view(-1)[entry] += 0.5 * weight * scalar
        self._scalars.clear()

    def batch_done(self, f: Tensor, y: Tensor) -> None:
        """Add the loss's derivative."""
        loss = self._of_loss * loss_sum(f.detach(), y, self._factors.likelihood)
        self._add(torch.autograd.grad(loss, self._tensors, allow_unused=True), f, y)


@contextmanager
def _requiring(tensors: Sequence[Tensor], required: bool) -> Iterator[None]:
    """Context in which tensors require a gradient, or do not."""
    before = [tensor.requires_grad for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.requires_grad_(required)
        yield
    finally:
        for tensor, former in zip(tensors, before, strict=True):
            tensor.requires_grad_(former)


class _Paired(Gram):
    """Inner product of a Gram matrix Σ x xᵀ with ``weight``, a matrix G, with its graph.

    ``scalars`` receives the inner products of added rows. G is (groups, d, d), or (d, d) for all
    groups; None leaves it out. With ``differentiable``, rows without a graph are ignored.
    """

    def __init__(
        self, gram: Gram, weight: Tensor | None, scalars: list[Tensor], differentiable: bool
    ) -> None:
        super().__init__(gram.like, gram.groups, gram.size)
        self.entries = gram.entries
        self._weight, self._scalars, self._differentiable = weight, scalars, differentiable

    def add(self, rows: Tensor, fresh: bool = False) -> None:
        """Add Σ xᵀ G x over the rows."""
        if self._weight is None or (self._differentiable and not rows.requires_grad):
            return
        rows = self.entries(rows)
        weight = self._weight.to(rows)
        if len(rows) != self.groups:  # a diagonal, with a group per entry
            paired = rows.square() * weight.flatten()
        else:
            paired = (rows @ weight) * rows
        self._scalars.append(paired.sum())

    def total(self) -> Tensor:
        """Return zeros, because nothing is summed."""
        return self.zeros()
