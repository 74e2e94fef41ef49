"""What earlier proofs found out about a model, kept while the model's structure stays the same.

A proof costs a fraction of a batch, and an online loop makes a pass, and so a proof, at each
update. What holds for all values of the parameters need not be found again: how batches split,
which rule a derived layer matches, which runs work on inputs that all examples share. It is kept
here under a description of the model's structure: everything that its modules hold (classes, modes,
hooks, settings, shapes) except the numbers in its tensors. What other numbers can change, such as a
gate that was zero, is proved in each pass, see `proof.Proof`.

A proof calls `recall` with its `proof_key` before it runs anything. It calls `remember` after it
passed, or to forget findings that did not hold again. Findings are dropped with the model, to which
they hold no reference.
"""

import hashlib
import pickle
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kfac_backend.layers import Rule
from kfac_backend.layers.rows import Run
from kfac_backend.model.batches import Plan
from kfac_backend.model.rule_assignment import RuleAssignment, TrackedLayer

__all__ = ["Findings", "Key", "findings_of", "proof_key", "recall", "remember"]

MOST_BYTES = 2**20
"""Size up to which a structure is described. A model that holds more, such as a data set, gets a
whole proof in each pass."""

MOST_PROOFS = 16
"""Findings that are kept of one model, for different inputs or layers; the oldest go first."""

Key = tuple[Any, ...]
"""What a proof depends on, see `proof_key`."""
_Name = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Findings:
    """What a whole proof found out, by names: a reference to a module would keep the model."""

    plan: Plan
    output_dim: int
    rules: Mapping[_Name, type[Rule]]
    runs: Mapping[_Name, tuple[Run, ...]]

    def applied(self, assignment: RuleAssignment) -> RuleAssignment:
        """A new assignment of the same model's layers, completed by the findings."""
        layers = [
            t if self.rules[_name(t)] is t.rule else replace(t, rule=self.rules[_name(t)])
            for t in assignment.layers
        ]
        tracked = [*layers, *assignment.own_parameters]
        runs = {t.layer: self.runs[_name(t)] for t in tracked if _name(t) in self.runs}
        return replace(assignment, layers=layers, runs=runs)


def findings_of(
    before: RuleAssignment, after: RuleAssignment, plan: Plan, output_dim: int
) -> Findings | None:
    """What a proof found out, from the assignment before and after it; None if it cannot be kept.

    Folded rows are not kept, since other examples may disprove them. Parameters that are followed
    operation by operation, or have only a diagonal, are not kept either: their findings refer to
    the model's modules.
    """
    same = (
        [_name(t) for t in before.layers] == [_name(t) for t in after.layers]
        and before.own_parameters == after.own_parameters
        and before.divided == after.divided
        and before.names == after.names
        and not (after.operations.names or after.unknown or after.diagonal)
    )
    if not same or any({"folded", "followed"} & set(kinds) for kinds in after.runs.values()):
        return None
    tracked = [*after.layers, *after.own_parameters]
    return Findings(
        plan,
        output_dim,
        {_name(t): t.rule for t in after.layers},
        {_name(t): after.runs[t.layer] for t in tracked if t.layer in after.runs},
    )


def proof_key(model: nn.Module, assignment: RuleAssignment, x: Any) -> Key | None:
    """What a proof depends on besides numbers: with equal keys, a proof has the same findings.

    These are the model's structure, the layers and parameters that the proof is about, the shape of
    an example, and the dtypes that autocast computes in.

    Returns:
        None if the model's structure cannot be described: it holds something that cannot be pickled
        (a file, a lock, a generator), or too much.
    """
    structure = _structure(model)
    if structure is None:
        return None
    about = tuple((*_name(t), t.rule, t.layer_type, t.built_in) for t in assignment.all)
    device = next(model.parameters()).device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    names = tuple(assignment.names), tuple(assignment.unknown), assignment.unsupported
    return structure, about, names, _shapes(x), device, autocast, torch.get_num_threads()


def recall(model: nn.Module, key: Key | None) -> Findings | None:
    """The findings of an earlier proof of this model with the same key; None without one."""
    return None if key is None else _proofs.get(model, {}).get(key)


def remember(model: nn.Module, key: Key | None, findings: Findings | None) -> None:
    """Keep the findings for as long as the model lives; forget them if they are None."""
    if key is None:
        return
    proofs = _proofs.setdefault(model, {})
    proofs.pop(key, None)
    if findings is not None:
        proofs[key] = findings
    if len(proofs) > MOST_PROOFS:
        del proofs[next(iter(proofs))]


_proofs: WeakKeyDictionary[nn.Module, dict[Key, Findings]] = WeakKeyDictionary()


def _name(tracked: TrackedLayer) -> _Name:
    return tracked.name, tuple(tracked.parameters.values())


def _shapes(x: Any) -> Any:
    """The shapes and dtypes of one example."""
    if isinstance(x, Mapping):
        return tuple((key, _shapes(value)) for key, value in x.items())
    return (type(x), x.shape[1:], x.dtype) if isinstance(x, Tensor) else type(x)


def _structure(model: nn.Module) -> bytes | None:
    """A hash of everything that a model's modules hold, except the numbers in tensors."""
    digest = _Digest()
    try:
        _Description(digest, protocol=5).dump(model)
    except Exception:  # a user's object may refuse to be described in any way
        return None
    return digest.hash.digest()


class _Digest:
    """A file object that keeps only the hash of what is written to it."""

    def __init__(self) -> None:
        self.hash, self.size = hashlib.blake2b(digest_size=16), 0

    def write(self, data: Any) -> None:
        self.size += memoryview(data).nbytes
        if self.size > MOST_BYTES:
            raise ValueError("The model holds too much for its structure to be compared.")
        self.hash.update(data)


class _Description(pickle.Pickler):
    """Describes objects by what they hold; the result is never unpickled.

    The pickler walks through lists, mappings, settings and whatever else objects hold. It also
    marks where the same object comes twice, so that tied tensors differ from equal ones.
    """

    def reducer_override(self, value: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(value, Tensor):
            layout = value.shape, value.requires_grad, value.is_leaf
            return str, (f"{type(value)} {value.dtype} {value.device}",), layout
        if isinstance(value, nn.Module):  # its own __getstate__ might leave something out
            return str, ("module",), (type(value), vars(value))
        if isinstance(value, types.FunctionType):
            cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
            held = value.__code__.co_code, cells, value.__defaults__, value.__kwdefaults__
            return str, (f"{value.__qualname__} {id(value.__code__)}",), held
        if isinstance(value, type) and value is not str:
            return str, (f"{value.__module__}.{value.__qualname__} {id(value)}",), _of_class(value)
        return NotImplemented


def _of_class(kind: type) -> tuple[Any, ...]:
    """The code and the settings of a module's class, which may be patched after a proof."""
    if not issubclass(kind, nn.Module):
        return ()
    held = [value for c in kind.__mro__ for value in vars(c).values()]
    code = (id(f.__code__) for f in held if isinstance(f, types.FunctionType))
    return *code, *(value for value in held if isinstance(value, bool | int | float | str))
