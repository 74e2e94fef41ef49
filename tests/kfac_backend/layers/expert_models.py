"""Mixtures of experts whose weights are stacked."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_backend import counted_positions
from tests.kfac_backend.layers.padded_models import mean_of_counted
from tests.kfac_backend.networks import Model
from tests.random_numbers import normal

E, K = 4, 2


class Experts(nn.Module):
    """The attributes and arguments of transformers' experts, and a loop over positions.

    Without ``has_post_expert_norm``, which transformers has had since 5.20.
    """

    def __init__(self, has_gate: bool, has_bias: bool, is_transposed: bool):
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = has_gate, has_bias, is_transposed
        self.num_experts, self.act_fn = E, torch.tanh
        for name, out, into in ((self.up, 6 if has_gate else 3, 3), ("down_proj", 3, 3)):
            shape = (E, into, out) if is_transposed else (E, out, into)
            setattr(self, name, nn.Parameter(torch.zeros(shape)))
            if has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.zeros(E, out)))

    @property
    def up(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    def _apply_gate(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up

    def map(self, name: str, e: int, x: Tensor) -> Tensor:
        weight = getattr(self, name)[e]
        bias = getattr(self, f"{name}_bias")[e] if self.has_bias else None
        return F.linear(x, weight.T if self.is_transposed else weight, bias)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        outputs = []
        for x_m, experts, weights in zip(x, top_k_index, top_k_weights, strict=True):
            of_experts = []
            for e in map(int, experts):  # tolist() fails under jacrev of torch 2.9
                h = self.map(self.up, e, x_m)
                h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
                of_experts.append(self.map("down_proj", e, h))
            outputs.append(weights @ torch.stack(of_experts))
        return torch.stack(outputs)


def routed(**options: bool) -> nn.Module:
    """Each position goes to two of four experts; the mean over the positions that count."""

    def forward(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, mask = batch["x"], batch["mask"]
        with counted_positions(mask):
            rows = x.flatten(0, 1)
            weights, index = m.router(rows).softmax(-1).topk(K)
            y = m.experts(rows, index, weights).view_as(x).tanh()
        return m.head(mean_of_counted(y, mask))

    layers = {"router": nn.Linear(3, E), "head": nn.Linear(3, 3), "experts": Experts(**options)}
    return Model(forward, **layers)


def routed_batch() -> dict[str, Tensor]:
    """Three sequences, one of them padded; the first ones choose fewer experts than there are."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    return {"x": normal(3, 3, 3), "mask": mask}
