"""The Kronecker-factored GGN of a whole model: one block per parameter tensor."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kfac_backend.atomic_files import parse_json, read_tensors, sha256_of_tensors, write_tensors
from kfac_backend.blocks.block import (
    CorrectedBlock,
    EigenBlock,
    KroneckerBlock,
    compute_eigenvalues,
    decompose,
    gathered_blocks,
    missing_values,
)
from kfac_backend.layers.gram import Factor
from kfac_backend.likelihoods import Likelihood, likelihood_of
from kfac_backend.options import CurvatureOptions, check_positive
from kfac_backend.ranks import Ranks

FORMAT, FORMAT_VERSION = "kfac_backend.KroneckerFactors", 10
FIELDS = ("num_data", "num_outputs", "num_loss_terms", "loss")


BLOCKS_PER_LINE = 10
"""Blocks that a line of the representation stands for."""


@dataclass(frozen=True, repr=False)
class KroneckerFactors:
    """GGN ≈ block-diag(B ⊗ A) over the parameter tensors: a sum over the data, without the prior.

    ``c * factors`` are the factors of the same data with a weight c ≥ 0, as if each example
    occurred c times. B, the loss and all counts are multiplied by c, and the mean A is unchanged.
    Sums of factors are therefore weighted sums over the data. ``0.95 * old + 0.05 * new`` is a
    moving average of A and B, and ``factors * (1/T)`` tempers the likelihood by T. Regression has
    noise 1; for another σ use ``factors * (1/σ²)``.

    Source: Eschenhagen et al. 2023 (arXiv:2311.00636), sections 3.2 and 3.3.
    """

    blocks: dict[str, KroneckerBlock]
    """Parameter name -> block, in the order of ``model.named_parameters()``."""
    num_data: float
    """N, the number of examples; an example of weight c counts c times."""
    num_outputs: int
    """C, the size of the outputs' last axis."""
    num_loss_terms: float
    """The number of loss terms, with weights; N unless examples have several."""
    loss: float
    """Σ ℓ (nats) over the data: see `likelihoods.loss_sum`."""
    likelihood: Likelihood
    options: CurvatureOptions
    """The options of the pass, with the resolved mode of kfac_approx="auto"; for a sum of factors,
    the options of the first."""

    def __len__(self) -> int:
        return len(self.blocks)

    def __repr__(self) -> str:
        lines = [
            f"{type(self).__name__}({len(self)} blocks, '{self.likelihood}', "
            f"{self.num_data:g} examples, {self.num_outputs} outputs)"
        ]
        items, counted = list(self.blocks.items()), set[object]()
        for start in range(0, len(items), BLOCKS_PER_LINE):
            some = items[start : start + BLOCKS_PER_LINE]
            names = dict.fromkeys([some[0][0], some[-1][0]])
            number = sum(block.numel for _, block in some)
            nbytes = 0
            for _, block in some:  # a factor that several blocks share counts once
                tensors = [F.entries for F in {*block.factors.values()} - counted if not F.is_meta]
                tensors += vars(block.eigen).values() if isinstance(block, CorrectedBlock) else ()
                nbytes += sum(tensor.nbytes for tensor in tensors if tensor is not None)
                counted |= {*block.factors.values()}
            lines.append(f"  {' to '.join(names)}: {number:,} parameters, {nbytes / 2**20:.1f} MiB")
        return "\n".join(lines)

    def __add__(self, other: "KroneckerFactors") -> "KroneckerFactors":
        """Return the factors of the union of both data sets, exactly."""
        self._check_same_kind(other)
        add = cache(Factor.add)  # once for the B of a weight and its bias
        return replace(
            self,
            blocks={n: block.add(other.blocks[n], add) for n, block in self.blocks.items()},
            num_data=self.num_data + other.num_data,
            num_loss_terms=self.num_loss_terms + other.num_loss_terms,
            loss=self.loss + other.loss,
        )

    @property
    def is_corrected(self) -> bool:
        """Whether any block has corrected eigenvalues, see `corrected_factors`."""
        return any(isinstance(block, CorrectedBlock) for block in self.blocks.values())

    def __mul__(self, weight: float) -> "KroneckerFactors":
        """Return the factors of the same data with a weight ≥ 0 for each example."""
        if not 0.0 <= float(weight) < math.inf:
            raise ValueError(f"Factors can be multiplied by a finite number ≥ 0, not by {weight}.")
        c = weight if isinstance(weight, int) else float(weight)  # integer counts stay integers
        scale = cache(Factor.scale)
        return replace(
            self,
            blocks={name: block.scale(c, scale) for name, block in self.blocks.items()},
            num_data=self.num_data * c,
            num_loss_terms=self.num_loss_terms * c,
            loss=self.loss * c,
        )

    __rmul__ = __mul__

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "KroneckerFactors":
        """Return the factors on another device or in another dtype."""
        to = cache(Factor.to)
        moved = {name: block.to(device, dtype, to) for name, block in self.blocks.items()}
        return replace(self, blocks=moved)

    def check_are_here(self) -> None:
        """Raise a RuntimeError that names a block stored on another rank."""
        for name, block in self.blocks.items():
            if block.is_meta:
                raise missing_values(name)

    def gathered(
        self, ranks: Ranks, device: torch.device | str | None = None
    ) -> "KroneckerFactors":
        """Return the factors with all blocks on each rank; collective.

        Use it before one rank saves them or computes with them alone. The factors of one process
        are complete.

        Args:
            ranks: the ranks that share the data.
            device: device of the received blocks, which the ranks' backend must support. None
                selects the device of this rank's own blocks, or the CPU if it has none.
        """
        return replace(self, blocks=gathered_blocks(self.blocks, ranks, device))

    def to_dense(self, name: str) -> Tensor:
        """Return the block of one parameter as a (P, P) matrix."""
        return self.blocks[name].to_dense()

    def eigenvalues(self) -> dict[str, Tensor]:
        """Return parameter name -> all eigenvalues (P,) of its block, in float64."""
        compute_eigenvalues(self.blocks.values())
        return {name: block.eigenvalues() for name, block in self.blocks.items()}

    def num_clipped(self) -> int:
        """Return the number of the factors' eigenvalues that rounding made negative."""
        return sum(block.num_clipped() for block in self.blocks.values())

    def log_det(self, prior_precision: float | Tensor) -> Tensor:
        """Return log det(GGN + P₀), in float64, differentiable in the prior precision.

        Constant entries (an embedding's padding) are not included.

        Args:
            prior_precision: δ > 0, a scalar or one per block (len(self),).
        """
        delta = torch.as_tensor(prior_precision, dtype=torch.float64)
        check_positive("prior_precision", delta)
        terms = []
        for block, d in zip(self.blocks.values(), delta.expand(len(self)), strict=True):
            values = block.eigenvalues()  # also for a block that another rank keeps
            d = d.to(values.device)
            # Each constant adds an eigenvalue of zero, without a δ.
            constants = block.numel - block.num_parameters
            terms.append((values + d).log().sum() - constants * d.log())
        return torch.stack(terms).sum()

    def matvec(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return GGN · v for one tensor per parameter, in the parameters' shapes."""
        return {
            name: block.matvec(v[name].flatten()).view_as(v[name])
            for name, block in self.blocks.items()
        }

    def trace(self) -> Tensor:
        """Return the trace of the GGN, in float64."""
        return torch.stack([values.sum() for values in self.eigenvalues().values()]).sum()

    def frobenius_norm(self) -> Tensor:
        """Return the square root of the sum of the GGN's squared entries, in float64."""
        squares = [values.square().sum() for values in self.eigenvalues().values()]
        return torch.stack(squares).sum().sqrt()

    def det(self) -> Tensor:
        """Return the determinant of the GGN, in float64; see `log_det` for large networks."""
        return (
            torch.stack([values.log().sum() for values in self.eigenvalues().values()]).sum().exp()
        )

    def damped_inverse(self, damping: float) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
        """Return the function v ↦ (GGN + λI)⁻¹ v, for v as in `matvec`.

        The function keeps the eigenvectors, which are computed once.

        Args:
            damping: λ > 0, on the scale of a sum over the data.
        """
        check_positive("damping", damping)
        eigen = dict(zip(self.blocks, decompose(self.blocks.values()), strict=True))

        def product(v: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: block.power_matvec(v[name].flatten(), block.spectrum(damping), -1.0).view_as(
                    v[name]
                )
                for name, block in eigen.items()
            }

        return product

    def check_alignment(self, model: nn.Module) -> None:
        """Raise a ValueError unless there is one block per trainable parameter, in the same order.

        laplace-torch pairs blocks and parameters by their position, without any check.
        """
        shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
        differ = [n for n in shapes if n not in self.blocks or not self.blocks[n].fits(shapes[n])]
        if differ or list(self.blocks) != list(shapes):
            raise ValueError(
                "A posterior needs a block for every trainable parameter, but these have none: "
                f"{', '.join(differ) or list(self.blocks)}. Freeze them with requires_grad_(False) "
                "before the Laplace approximation is made."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the factors as plain data and tensors, which `torch.load` reads with its defaults.

        Loading restores them exactly. A symmetric factor is stored as a triangle, which is half of
        its entries, and a factor of few rows as these rows. Equal factors, such as B of a weight
        and of its bias, are stored once.

        Raises:
            RuntimeError: another rank has some of the blocks.
        """
        self.check_are_here()
        tensors, keys = dict[str, Tensor](), dict[object, str]()

        def add(key: str, tensor: Tensor) -> str:
            """Return the key of a tensor in the state; equal tensors share a key."""
            form = key.rpartition(".")[2]
            key = keys.setdefault((form, sha256_of_tensors([tensor])), key)
            tensors.setdefault(key, tensor.detach())
            return key

        entries = []
        for name, block in self.blocks.items():
            entry = {"name": name, "num_terms": block.num_terms, "constants": [*block.constants]}
            if isinstance(block, CorrectedBlock):
                parts = {k: v for k, v in vars(block.eigen).items() if v is not None}
                entry["eigen"] = {k: add(f"{name}/{k}.eigen", v) for k, v in parts.items()}
            for letter, F in block.factors.items():
                form, stored = _pack(F.matrix) if F.rows is None else ("rows", F.rows)
                entry[letter] = add(f"{name}/{letter}.{form}", stored)
            entries.append(entry)
        header = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            **{field: getattr(self, field) for field in FIELDS},
            "likelihood": str(self.likelihood),
            "options": self.options.to_json(),
            "blocks": entries,
        }
        return {"header": header, "tensors": tensors}

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], source: str = "The state"
    ) -> "KroneckerFactors":
        """Return the factors of a result of `state_dict`.

        Raises:
            ValueError: the state has another form or format version, or its factors contain NaN or
                are not positive semi-definite.
        """
        header, tensors = state.get("header") or {}, state.get("tensors") or {}
        if (header.get("format"), header.get("version")) != (FORMAT, FORMAT_VERSION):
            raise ValueError(
                f"{source} contains no Kronecker factors of version {FORMAT_VERSION}, which this "
                f"release reads. Its format is {header.get('format')}, version "
                f"{header.get('version')}. Compute the factors again, or write them with save()."
            )
        try:
            factors = dict[str, Factor]()  # equal ones are stored and solved once
            blocks = {e["name"]: _block(e, tensors, factors) for e in header["blocks"]}
            for block in blocks.values():
                block.check_semidefinite()
            return cls(
                blocks,
                options=CurvatureOptions(**header["options"]),
                **{field: header[field] for field in FIELDS},
                likelihood=likelihood_of(header["likelihood"]),
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{source} contains incomplete Kronecker factors ({error}). Save them again."
            ) from error

    def save(self, path: str | Path) -> str:
        """Write the factors as safetensors with a JSON header and a checksum, atomically.

        Returns:
            the file's SHA-256 sum.
        """
        state = self.state_dict()
        tensors = {name: tensor.contiguous() for name, tensor in state["tensors"].items()}
        return write_tensors(path, tensors, {"header": json.dumps(state["header"])})

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "KroneckerFactors":
        """Return the factors in a file written by `save`.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is damaged or truncated, and as in `from_state_dict`.
        """
        tensors, metadata = read_tensors(path, device, kind="Kronecker factors")
        header = parse_json(metadata.get("header", "{}"))
        return cls.from_state_dict({"header": header, "tensors": tensors}, str(path))

    def _check_same_kind(self, other: "KroneckerFactors") -> None:
        mine, theirs = (
            {"likelihood": str(F.likelihood), "num_outputs": F.num_outputs}
            | F.options.of_the_matrix()
            for F in (self, other)
        )
        for name, value in mine.items():
            if json.dumps(value) != json.dumps(theirs[name]):  # the order of a mapping matters
                raise ValueError(
                    f"Cannot add factors with {name} {value!r} and {theirs[name]!r}. Compute both "
                    "with the same options."
                )
        if list(self.blocks) != list(other.blocks):
            differ = sorted(self.blocks.keys() ^ other.blocks.keys())
            what = f"Only one side has {', '.join(differ[:4])}" if differ else "Their order differs"
            raise ValueError(
                f"Cannot add factors of different parameters. {what}. Compute both with the same "
                "model, and the same parameters frozen."
            )


def _block(
    entry: Mapping[str, Any], tensors: Mapping[str, Tensor], factors: dict[str, Factor]
) -> KroneckerBlock:
    """Return a block from its header entry and the state's tensors; an eigenbasis corrects it.

    ``factors`` has the factors so far, by their keys; the block's factors are added.
    """
    name, terms = entry["name"], entry["num_terms"]
    terms = tuple(terms) if isinstance(terms, list | tuple) else terms
    first, end = entry["constants"]

    def factor(key: str) -> Factor:
        if key not in factors:
            form, stored = key.rpartition(".")[2], tensors[key]
            # A copy begins at an aligned address, which may affect the bits of the matrix.
            is_rows = form == "rows"
            factors[key] = Factor(rows=stored.clone()) if is_rows else Factor(_unpack(form, stored))
        return factors[key]

    B = factor(entry["B"])
    A = factor(entry["A"]) if "A" in entry else None
    if "eigen" not in entry:
        return KroneckerBlock(name, B, A, terms, (first, end))
    eigen = EigenBlock(**{part: tensors[key] for part, key in entry["eigen"].items()})
    return CorrectedBlock(name, B, A, terms, (first, end), eigen=eigen)


def _pack(F: Float[Tensor, "*G d d"]) -> tuple[str, Tensor]:
    """Return ("triangle", entries (..., d (d + 1) / 2)), or ("whole", F) if F is not symmetric."""
    if not torch.equal(F, F.mT):
        return "whole", F
    return "triangle", torch.cat([row[..., i:] for i, row in enumerate(F.unbind(-2))], -1)


def _unpack(form: str, entries: Tensor) -> Float[Tensor, "*G d d"]:
    """Return the factor from the entries of `_pack`, to the bit."""
    if form == "whole":
        return entries
    count = entries.shape[-1]
    d = (math.isqrt(8 * count + 1) - 1) // 2
    if form != "triangle" or d * (d + 1) // 2 != count:
        raise ValueError(f"{count} entries do not form a matrix of form '{form}'")
    F = entries.new_empty(*entries.shape[:-1], d, d)
    upper = torch.ones(d, d, dtype=torch.bool, device=F.device).triu_()
    for half in (F, F.mT):
        half.masked_scatter_(upper, entries)
    return F
