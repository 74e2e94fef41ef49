"""`KFAC`: the preconditioner and the optimiser that makes the step, as one optimiser.

With base="sgd" the momentum is applied before the preconditioner: m ← μm + g, v = g + μm
(Nesterov), θ ← θ − η ν F⁻¹v, where F⁻¹ is the present damped inverse and ν the KL clip. Momentum of
preconditioned gradients would add directions from outdated factors, and the clip would not limit
its length: a sum of k equal gradients is k times as long as each of them. Muon also applies
momentum before it orthogonalises (Jordan et al. 2024).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kfac_backend.engine.rule_assignment import check_module
from kfac_backend.likelihoods import Likelihood
from kfac_backend.optimizer.loss_check import MeanOver
from kfac_backend.optimizer.preconditioner import (
    KfacPreconditioner,
    PreconditionerOptions,
    no_copies,
    with_keywords,
)
from kfac_backend.options import CurvatureOptions, check_keys, check_option
from kfac_backend.ranks import ProcessGroupOption
from kfac_backend.sharding import (
    check_part,
    is_part,
    local_part,
    local_parts,
    part_of_ranks,
    part_of_whole,
    with_local_parts,
)

BaseOptimizer = Literal["sgd", "nadamw"]


class KFAC(Optimizer):
    """K-FAC optimiser: SGD with preconditioned momentum, or NAdamW with preconditioned gradients.

    Learning rate schedulers, groups, ``state_dict``, a `GradScaler` and Lightning Fabric work as
    with any torch optimiser. KFAC cannot be copied or pickled: create a new one for the copy of a
    model, and load the state. See `KfacPreconditioner` for the requirements on model and loss, and
    for other optimisers.

    ```python
    optimizer = KFAC(model, "classification", lr=0.1, damping=0.03, kfac_approx="reduce")
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    ```

    Args:
        model: the model.
        likelihood: likelihood of the loss, as for `KfacPreconditioner`.
        lr: the highest learning rate η. The default was chosen with the other defaults
            (`experiments/optimizers/optimizer_comparison.py`). While ``kl_clip`` is active, a
            higher rate has no effect; with ``kl_clip=None`` it must be tuned. Use a schedule that
            ends near 0.
        base: "sgd" preconditions the momentum v and then adds the weight decay w, θ ← θ − η(ν F⁻¹v
            + wθ). ν is the factor of ``kl_clip``. "nadamw" is torch's NAdam of the preconditioned
            gradients, with decoupled weight decay.
        momentum: momentum of "sgd".
        nesterov: whether to use Nesterov momentum.
        betas: betas of "nadamw".
        eps: eps of "nadamw".
        weight_decay: see ``base``. It does not change padding of embeddings.
        params: the model's parameters, or groups of them with options of the base optimiser
            (``lr``, ``weight_decay``), if not all trainable ones. Other parameters are not changed;
            another optimiser may train them. Use groups instead of a second K-FAC of the same
            model. As with any torch optimiser, parameters that are unfrozen later are trained once
            `add_param_group` has added them, and parameters that are frozen later do not change.
        options: options of the preconditioner; see `PreconditionerOptions`.
        curvature: options of the factors; see `CurvatureOptions`.
        exclude: names of parameters, or patterns of them, that are trained without preconditioning.
        loss_mean_over: the unit over which the loss is a mean: "terms", as in torch's losses, or
            "examples", if the terms of an example are summed.
        seed: the seed of the labels that fisher="mc" draws.
        process_group: the ranks that each have a part of a step's data; see `KfacPreconditioner`.
        keywords: single options that override fields of ``options`` and ``curvature``:
            ``damping=0.1, kfac_approx="reduce"``.

    Raises:
        TypeError: a keyword is not an option; the error lists all options.
        ValueError: an option is not supported, a parameter belongs to another model, or a group has
            an option of K-FAC.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        lr: float = 0.1,
        *,
        base: BaseOptimizer = "sgd",
        momentum: float = 0.9,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        params: Any = None,
        options: PreconditionerOptions = PreconditionerOptions(),  # noqa: B008
        curvature: CurvatureOptions = CurvatureOptions(kfac_approx="expand", fisher="mc"),  # noqa: B008
        exclude: Sequence[str] = (),
        loss_mean_over: MeanOver = "terms",
        seed: int = 0,
        process_group: ProcessGroupOption = "default",
        **keywords: Any,
    ) -> None:
        check_module(model)
        check_option("base", base, BaseOptimizer)
        options, curvature = with_keywords(KFAC, options, curvature, keywords)
        if params is None:
            params = [p for p in model.parameters() if p.requires_grad]
        params = list(params)
        for group in params:
            _check_group(group)
        if base == "sgd":
            nesterov = nesterov and momentum > 0
            self.base: Optimizer = torch.optim.SGD(
                params, lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
            )
        else:
            self.base = torch.optim.NAdam(
                params, lr, betas, eps, weight_decay, decoupled_weight_decay=True
            )
        """The optimiser that takes the step; groups and state are its own."""
        self.preconditioner = KfacPreconditioner(
            model,
            likelihood,
            options,
            curvature,
            params=_parameters(self.base),
            exclude=exclude,
            loss_mean_over=loss_mean_over,
            seed=seed,
            process_group=process_group,
        )
        """The preconditioner, which replaces the gradients before the step."""
        super().__init__(self.base.param_groups, self.base.defaults)
        self._share()
        # Options of the present groups. A group without one has the constructor's.
        self._first_rates = [float(group["lr"]) for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step; return the closure's loss, if there is a closure.

        Raises:
            FloatingPointError: factors or gradients are not finite.
        """
        loss: Tensor | float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in _parameters(self.base):
            if not p.requires_grad:  # otherwise a gradient from before it was frozen would move it
                p.grad = None
        if isinstance(self.base, torch.optim.SGD):
            self.preconditioner.check_gradients()  # before the momentum includes them
            self._add_momentum()
            self.preconditioner.step(lr=self._rate(), checked=True)
            with self._without_momentum(), self.preconditioner.constants_kept():
                self.base.step()
        else:
            self.preconditioner.step(lr=self._rate())
            with self.preconditioner.constants_kept():
                self.base.step()
        return loss

    @torch.no_grad()
    def _add_momentum(self) -> None:
        """Update m ← μm + g; g becomes g + μm (Nesterov) or m."""
        for group in self.param_groups:
            mu = group["momentum"]
            gradients, momenta = [], []
            for p in group["params"] if mu else ():
                if p.grad is None:
                    continue
                if self.state[p].get("momentum_buffer") is None:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                gradients.append(p.grad)
                momenta.append(self.state[p]["momentum_buffer"])
            if not gradients:
                continue
            # A model may be partly sharded, and lists must not mix both kinds of tensors.
            gradients, momenta = local_parts(gradients), local_parts(momenta)
            # Like torch's SGD without dampening, whose step then adds no momentum. One operation
            # for all tensors, because a GPU would wait for the start of each.
            torch._foreach_mul_(momenta, mu)
            torch._foreach_add_(momenta, gradients)
            if group["nesterov"]:
                torch._foreach_add_(gradients, momenta, alpha=mu)
            else:
                torch._foreach_copy_(gradients, momenta)

    @contextmanager
    def _without_momentum(self) -> Iterator[None]:
        """Context in which SGD uses the gradients without momentum."""
        momenta = [group["momentum"] for group in self.param_groups]
        for group in self.param_groups:
            group["momentum"] = 0.0
        try:
            yield
        finally:
            for group, momentum in zip(self.param_groups, momenta, strict=True):
                group["momentum"] = momentum

    def _rate(self) -> float:
        """Return the schedule's highest learning rate, for the KL clip."""
        names = ("lr", "initial_lr", "max_lr")  # names that torch's schedulers write
        rates = [
            float(group[name]) for group in self.param_groups for name in names if name in group
        ]
        # If the rate is set by hand and not by a scheduler, the first rate is the highest known
        # one.
        return max(rates + self._first_rates)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the model; the next step computes new factors.

        Raises:
            ValueError: a tensor is not a parameter of the model, or an option belongs to K-FAC.
        """
        _check_group(param_group)
        if "base" not in vars(self) or self.param_groups is not self.base.param_groups:
            super().add_param_group(param_group)  # in the constructor
            return
        self.base.add_param_group(param_group)
        self._share()
        try:
            self.preconditioner.add_params(self.param_groups[-1]["params"])
        except ValueError:
            self.param_groups.pop()
            raise
        self._first_rates.append(float(self.param_groups[-1]["lr"]))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the steps unscale gradients; a `GradScaler` asks before each of them.

        Raises:
            ValueError: fisher="empirical", whose factors already belong to the scaled loss.
        """
        if self.preconditioner.takes_loss_gradients:
            raise ValueError(
                "fisher='empirical' would use gradients of a loss that a GradScaler has scaled. "
                "Pass fisher='mc'. In bfloat16, without a scaler, remove Lightning's clipping, "
                "which also reads the scaler."
            )
        return False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise a TypeError for copies, like `KfacPreconditioner`."""
        raise no_copies(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimiser's state, with the preconditioner's state under its own key.

        With several ranks all must call it.
        """
        base, preconditioner = self.base.state_dict(), self.preconditioner.state_dict()
        ranks = self.preconditioner.ranks
        parameters, step = _parameters(self.base), preconditioner["step"]
        part = part_of_ranks(parameters, ranks.rank, ranks.size, step)
        return {**base, "preconditioner": preconditioner, "part": part}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`; with several ranks all must call it.

        Raises:
            ValueError: the state belongs to another optimiser, model or other options, lacks
                entries, or has another precision; nothing is changed then.
            RankError: ranks have different states; nothing is changed then.
        """
        base = dict(state_dict)
        base.pop("part", None)
        self.preconditioner.ranks.agree_on_state(lambda: self._check_base(state_dict))
        preconditioner = base.pop("preconditioner")
        self.preconditioner.load_state_dict(preconditioner)  # it rejects a state that does not fit
        base["state"] = dict(base["state"])
        for i, p in zip(_parameters(base), _parameters(self.base), strict=True):
            of_parameter = base["state"].get(i, {})
            base["state"] |= {i: {k: _spread(v, p) for k, v in of_parameter.items()}}
        self.base.load_state_dict(base)
        # torch casts NAdam's product of momenta, a float32 number, to the parameter's dtype.
        for i, p in zip(_parameters(base), _parameters(self.base), strict=True):
            if "mu_product" in base["state"].get(i, {}):
                product = base["state"][i]["mu_product"].to("cpu", copy=True)
                self.base.state[p]["mu_product"] = product
        self._share()

    def _check_base(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Raise a ValueError unless the state is complete, and fits the groups and the parameters.

        It returns values that must be the same on all ranks.
        """
        check_keys("KFAC", state, ("param_groups", "state", "preconditioner"))
        check_part(state, self.preconditioner.ranks.rank, self.preconditioner.ranks.size)
        groups, names = state["param_groups"], ["params", *self.defaults]
        missing = [name for name in names if any(name not in group for group in groups)]
        if missing:
            raise ValueError(
                f"The state belongs to another base optimiser than {type(self.base).__name__}: it "
                f"has no {missing[0]!r}. Pass the same `base`."
            )
        theirs, ours = (
            [len(g["params"]) for g in groups] for groups in (groups, self.param_groups)
        )
        if theirs != ours:
            raise ValueError(
                f"The state has {len(theirs)} groups of {theirs} parameters, but this optimiser "
                f"has {len(ours)} groups of {ours}. Create the same groups first (params, "
                "add_param_group)."
            )
        for i, p in zip(_parameters(state), _parameters(self.base), strict=True):
            for name, value in state["state"].get(i, {}).items():
                if not torch.is_tensor(value) or not value.dim():  # a number, such as the step's
                    continue
                if is_part(value) and not is_part(p):
                    raise ValueError(
                        f"The state's {name!r} is sharded over ranks, but its parameter is whole. "
                        "Save kfac_backend.sharding.gathered_state(optimizer.state_dict())."
                    )
                there, here = (f"{tuple(t.shape)} in {t.dtype}" for t in (value, p))
                if there != here:
                    raise ValueError(
                        f"The state's {name!r} is {there}, but its parameter is {here}. Load the "
                        "state as it was saved, with the same model and dtype."
                    )
                if not local_part(value).isfinite().all():
                    raise ValueError(
                        f"The state's {name!r} contains NaN or infinity. Load another checkpoint."
                    )
        part = state.get("part") or {}
        return {"the loaded step of the momentum": part.get("step")}

    def _share(self) -> None:
        self.param_groups, self.state = self.base.param_groups, self.base.state
        for group in self.param_groups:
            if len({is_part(p) for p in group["params"]}) > 1:
                group["foreach"] = False  # torch's lists must not mix them either


def _check_group(group: Any) -> None:
    """Raise a ValueError for options of K-FAC in a group, where they would have no effect."""
    if not isinstance(group, Mapping):
        return
    ours = [
        f.name for options in (PreconditionerOptions, CurvatureOptions) for f in fields(options)
    ]
    wrong = [n for n in (*ours, "exclude", "loss_mean_over", "seed", "process_group") if n in group]
    if wrong:
        raise ValueError(
            f"A group has {', '.join(map(repr, wrong))}, which K-FAC only supports for all groups "
            "together. Pass it to the constructor. To set dampings by parameter: "
            "preconditioner.damping = {name: λ}."
        )


def _spread(value: Any, parameter: nn.Parameter) -> Any:
    """Spread a parameter's whole state like the parameter; return others unchanged."""
    if not is_part(parameter) or is_part(value) or not torch.is_tensor(value) or not value.dim():
        return value
    part = part_of_whole(value.to(parameter.device), parameter).clone()
    return with_local_parts([parameter], [part])[0]


def _parameters(optimizer: Optimizer | Mapping[str, Any]) -> list[Any]:
    """Return the parameters of an optimiser, or their numbers in its state, group by group."""
    groups = optimizer["param_groups"] if isinstance(optimizer, Mapping) else optimizer.param_groups
    return [p for group in groups for p in group["params"]]
