"""Outputs of the linearised network f(x) + J(x) (θ − θ*) at given parameters θ, without J.

⟨v, Jᵀu⟩ is linear in u, and its derivative in u is J v. So a backward pass that keeps a graph gives
Jᵀu, and one backward pass through that graph gives J v for each v. Forward mode (torch.func.jvp)
would repeat the forward pass for each v. It would also change state of the whole process, which an
interrupt or a second thread could leave behind.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kfac_backend.covariance.output_covariance import default_memory
from kfac_backend.model.batches import detached, examples, make_plan
from kfac_backend.model.calls import call_with, num_examples, plain_attention
from kfac_backend.model.checks import check_output
from kfac_backend.precision import at_least_float32, full_float32

__all__ = ["linearised_outputs"]


def linearised_outputs(
    model: nn.Module,
    changes: Mapping[str, Float[Tensor, "S *shape"]],
    x: Any,
    memory: int | None = None,
) -> Float[Tensor, "S N *R C"]:
    """f(x) + J(x) Δ for S changes Δ of the parameters, with J the Jacobian at the model's own.

    Outputs may have any shape, and batches any type. Each change costs about one backward pass,
    whatever the number of outputs.

    Args:
        model: the network at θ*, in the mode (train or eval) it is in.
        changes: parameter name -> S changes θ − θ*; other parameters keep their values.
        x: inputs, moved to the model's device.
        memory: bytes that the graph may hold, not counting what one pass needs; the default is that
            of `OutputCovariance`. Batches of tensors are split to keep it, down to one example.

    Raises:
        TypeError: a model whose output is not a tensor.
        NotImplementedError: an operation that cannot be differentiated twice.
    """
    device = next(model.parameters()).device
    with torch.inference_mode(False), full_float32(), plain_attention.held():
        x = detached(x, device)
        parts = _parts(model, list(changes), x, memory or default_memory(device))
        found = [_outputs(model, changes, part) for part in parts]
    return torch.cat(found, 1)


def _outputs(model: nn.Module, changes: Mapping[str, Tensor], x: Any) -> Tensor:
    f, u, products = _transposed(model, list(changes), x)
    wide = at_least_float32(f.detach())
    found = []
    for change in zip(*changes.values(), strict=True):
        v = dict(zip(changes, change, strict=True))
        tangents = [v[name].view_as(p).to(p.dtype) for name, p in products.items()]
        if not products:  # the outputs depend on none of the parameters
            found.append(wide)
            continue
        try:
            (Jv,) = torch.autograd.grad(list(products.values()), u, tangents, retain_graph=True)
        except RuntimeError as error:
            raise _as_named(model, error) from error
        found.append(wide + at_least_float32(Jv))
    return torch.stack(found)


def _transposed(
    model: nn.Module, names: list[str], x: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The outputs f, a vector u in their shape, and Jᵀu by parameter, with a graph in u."""
    own = dict(model.named_parameters())
    with torch.enable_grad():
        theta = {name: own[name].detach().requires_grad_() for name in names}
        f = call_with(model, theta, x)
        check_output(f)
        u = torch.zeros_like(f, requires_grad=True)
        if not f.requires_grad:
            return f, u, {}
        try:
            found = torch.autograd.grad(
                f, list(theta.values()), u, create_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            raise _as_named(model, error) from error
    pairs = zip(theta, found, strict=True)
    return f, u, {name: g for name, g in pairs if g is not None and g.requires_grad}


def _parts(model: nn.Module, names: list[str], x: Any, memory: int) -> Iterator[Any]:
    """The batch in parts whose graphs fit into the memory."""
    N = num_examples(x)
    splits = N == 1 or make_plan(model, x, next(model.parameters()).device).splits
    if not N or not splits:
        _check(model, names, x)
        yield x
        return
    few = min(N, 2)
    held = _check(model, names, examples(x, slice(few)))
    # The two passes through the graph hold up to twice as much beside it.
    size = max(1, memory * few // max(1, 2 * held))
    for start in range(0, N, size):
        yield examples(x, slice(start, start + size))


def _check(model: nn.Module, names: list[str], x: Any) -> int:
    """The bytes that the graph of Jᵀu holds; proves that J v from it is right.

    A user's autograd function that can be differentiated only once cuts Jᵀu off from u. Its part
    would be missing in J v without any error. So ⟨w, J v⟩ = ⟨Jᵀw, v⟩ is tested for random v and w.

    Raises:
        NotImplementedError: the test fails.
    """
    storages: dict[int, int] = {}

    def count(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    # Step 1: Jᵀu with its graph, whose saved tensors are counted.
    with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
        f, u, products = _transposed(model, names, x)
    if not products:
        return 0
    noise = torch.Generator(f.device).manual_seed(0)
    *v, other = (
        torch.randn(t.shape, generator=noise, device=t.device, dtype=t.dtype)
        for t in (*products.values(), f)
    )
    # Step 2: J v through that graph.
    own = dict(model.named_parameters())
    try:
        (Jv,) = torch.autograd.grad(
            list(products.values()), u, v, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        raise _as_named(model, error) from error
    # Step 3: Jᵀw by a plain backward pass, which is right whatever can be differentiated twice.
    with torch.enable_grad():
        theta = {name: own[name].detach().requires_grad_() for name in names}
        f = call_with(model, theta, x)
        found = torch.autograd.grad(f, list(theta.values()), other, allow_unused=True)
    J_t = {name: g for name, g in zip(names, found, strict=True) if g is not None}
    Jv = torch.zeros_like(f) if Jv is None else Jv
    left, right = (
        torch.cat([t.double().flatten() for t in many])
        for many in ([J_t.get(name, torch.zeros_like(g)) for name, g in products.items()], v)
    )
    difference = (other.double() * Jv.double()).sum() - left @ right
    # For a random v, ⟨Jᵀw, v⟩ is about as large as the norm of Jᵀw.
    is_cut = bool(difference.abs() > torch.finfo(f.dtype).eps ** 0.5 * left.norm())
    if is_cut or any(g.any() for name, g in J_t.items() if name not in products):
        raise _as_named(model, RuntimeError("a function of it cannot be differentiated twice"))
    return sum(storages.values())


def _as_named(model: nn.Module, error: RuntimeError) -> RuntimeError:
    """The error itself, or one with a way out if an operation cannot be differentiated twice."""
    message = str(error)
    if not any(words in message for words in ("is not implemented", "not implemented", "twice")):
        return error
    reason = message.splitlines()[0].rstrip(".")
    return NotImplementedError(
        f"{type(model).__name__} cannot be linearised, since that differentiates it twice: "
        f"{reason}. Replace the operation, or use the outputs' covariances, which differentiate "
        "once: the predictives 'probit' and 'mc'."
    )
