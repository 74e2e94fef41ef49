"""Reference models whose linear operations are noted and perturbed: their uses, by brute force.

A reference model is a plain function ``reference(taps, *example)`` of one example alone, written
from a layer's documentation, that calls ``taps.linear`` and ``taps.embedding`` where a weight meets
its inputs. Each operation's output is perturbed, and the model's output differentiated by that.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.oracles import Use, UsesByKey, kfac_blocks_from_uses, loss_hessians


class Noted(NamedTuple):
    """A parameter in one linear operation of one example.

    ``a`` (R, d_in) are the operation's inputs, ``counted`` (R,) the positions that count, if not
    all do, ``key`` the parameter's name and group; see `Use` for the rest.
    """

    key: tuple[str, int]
    operation: int
    a: Tensor
    counted: Tensor | None
    ragged: bool = False
    input_first: bool = False
    is_bias: bool = False


class Taps:
    """The linear operations of a reference model: they note their inputs and can be perturbed."""

    def __init__(self, perturbations: Sequence[Tensor] = ()):
        self.perturbations = perturbations
        self.outputs: list[Tensor] = []  # of each operation, (R, d_out), rows that do not count too
        self.noted: list[Noted] = []

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        names: tuple[str, str],
        groups: tuple[int, int] = (0, 0),
        counted: Tensor | None = None,
        ragged: bool = False,
        input_first: bool = False,
    ) -> Tensor:
        """W x + bias of x (..., d_in), of parameters with these names (and groups of them).

        Args:
            x: inputs; all axes but the last are positions.
            weight: (d_out, d_in), or (d_in, d_out) if ``input_first``.
            bias: (d_out,).
            names: of weight and bias.
            groups: which parts of those parameters they are.
            counted: (...) of bool, the positions that count.
            ragged: whether reduce scales by 1/√R_n, see `Use`.
            input_first: see ``weight``.
        """
        a = x.detach().reshape(-1, x.shape[-1])
        rows = None if counted is None else counted.flatten()
        k = len(self.outputs)
        self.noted.append(Noted((names[0], groups[0]), k, a, rows, ragged, input_first))
        out = x @ (weight if input_first else weight.T)
        if bias is not None:
            ones = torch.ones(len(a), 1, dtype=torch.float64)
            self.noted.append(Noted((names[1], groups[1]), k, ones, rows, is_bias=True))
            out = out + bias
        return self._perturbed(out)

    def embedding(
        self, tokens: Tensor, weight: Tensor, name: str, padding_idx: int | None = None
    ) -> Tensor:
        """Rows of the weight (V, d) for tokens (...): a linear use with one-hot inputs."""
        a = torch.eye(len(weight), dtype=torch.float64)[tokens.flatten()]
        rows = None if padding_idx is None else tokens.flatten() != padding_idx
        self.noted.append(Noted((name, 0), len(self.outputs), a, rows, input_first=True))
        return self._perturbed(weight[tokens])

    def _perturbed(self, out: Tensor) -> Tensor:
        k = len(self.outputs)
        self.outputs.append(out.detach().reshape(-1, out.shape[-1]))
        return out + self.perturbations[k].reshape(out.shape) if self.perturbations else out


def uses_of(
    reference: Callable[..., Tensor], examples: Sequence[tuple]
) -> tuple[UsesByKey, list[Tensor]]:
    """All uses of all parameters in a reference model, and its outputs (T, C) of each example.

    Args:
        reference: ``reference(taps, *example)`` is the output (C,) or (..., C) of one example
            alone; its linear operations are calls of the taps.
        examples: the arguments of each example, which do not influence each other.

    Raises:
        ValueError: if two examples make different operations.
    """
    uses: list[tuple[tuple[str, int], Use]] = []
    outputs = []
    for n, example in enumerate(examples):
        taps = Taps()
        f = reference(taps, *example).detach()
        outputs.append(f.reshape(-1, f.shape[-1]))

        def perturbed(*perturbations: Tensor, example: tuple = example) -> Tensor:
            f = reference(Taps(perturbations), *example)
            return f.reshape(-1, f.shape[-1])

        zeros = tuple(torch.zeros_like(out) for out in taps.outputs)
        jacobians = torch.autograd.functional.jacobian(perturbed, zeros)  # each (T, C, R, d_out)
        if n == 0:
            uses = [(i.key, Use([], [], i.ragged, i.input_first, i.is_bias)) for i in taps.noted]
        if [key for key, _ in uses] != [item.key for item in taps.noted]:
            raise ValueError(f"Example {n} makes other linear operations than example 0.")
        for (_, use), item in zip(uses, taps.noted, strict=True):
            rows = slice(None) if item.counted is None else item.counted
            use.a.append(item.a[rows])
            use.b.append(jacobians[item.operation].transpose(1, 2)[:, rows])
    by_key: UsesByKey = {}
    for key, use in uses:
        by_key.setdefault(key, []).append(use)
    return by_key, outputs


def reference_blocks(
    reference: Callable[..., Tensor],
    examples: Sequence[tuple],
    likelihood: str,
    approx: str,
    ignored: Iterable[Tensor] | None = None,
) -> dict[str, Tensor]:
    """Dense K-FAC blocks {name: (numel, numel)} of all linear operations of a reference model.

    See `uses_of` for the first two arguments; ``ignored`` has one bool for each loss term.
    """
    return reference_blocks_of_modes(reference, examples, likelihood, ignored)[approx]


def reference_blocks_of_modes(
    reference: Callable[..., Tensor],
    examples: Sequence[tuple],
    likelihood: str,
    ignored: Iterable[Tensor] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """The same in either mode, of the same uses, whose Jacobians are what takes the time."""
    uses, outputs = uses_of(reference, examples)
    hessians = loss_hessians(outputs, likelihood, ignored)
    return {
        approx: kfac_blocks_from_uses(uses, hessians, approx) for approx in ("expand", "reduce")
    }
