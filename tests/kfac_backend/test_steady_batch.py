"""What one batch dispatches when the pass is under way: few operations, and no wait for the device.

On a GPU each operation is a kernel whose start takes as long as a small layer's work.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_backend.curvature import CurvaturePass
from kfac_backend.optimizer import KFAC, PreconditionerOptions
from marglik.models import WideResNetFixup

NO_WORK = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand",
    "permute", "promote_types", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view",  # views and metadata
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",  # memory
}  # fmt: skip
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_to_cpu"}


class Dispatched(TorchDispatchMode):
    """A context that counts the operations by name."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def computing(self) -> int:
        """Those that compute, or copy."""
        return sum(number for name, number in self.counts.items() if name not in NO_WORK)


def third_batch(model: nn.Module, **options) -> Dispatched:
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    curvature = CurvaturePass(model, "classification", **options)
    for _ in range(2):
        curvature.add(*batch)
    with Dispatched() as dispatched:
        curvature.add(*batch)
    return dispatched


@pytest.mark.parametrize(("mode", "most"), [("reduce", 900), ("expand", 1140)])
def test_a_batch_of_the_exact_pass(mode, most):
    """Forward and backward passes alone take 448 operations."""
    model = WideResNetFixup(16, 4).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn_like(p)
    dispatched = third_batch(model, kfac_approx=mode)
    assert 448 < dispatched.computing() <= most
    assert not WAITS & set(dispatched.counts)


@pytest.mark.parametrize(
    ("likelihood", "spoil", "message"),
    [
        ("classification", lambda x, y: y.__setitem__(1, 4), "Label 4 is out of range"),
        ("classification", lambda x, y: x.__setitem__(1, torch.nan), "The inputs contain NaN"),
        ("classification", lambda x, y: x.mul_(1e38), "activations overflow"),
        ("regression", lambda x, y: y.__setitem__(1, torch.inf), "The targets contain NaN"),
        ("bernoulli", lambda x, y: y.__setitem__(1, 1.5), r"needs targets in \[0, 1\]"),
    ],
)
@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
def test_what_is_wrong_with_a_steady_batch_is_said_later(likelihood, spoil, message, fisher):
    """After the third batch at the end, after the fourth at once; and the pass must be reset."""
    first = nn.Linear(3, 8)
    nn.init.constant_(first.weight, 1e3)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(5, 3)
    y = torch.randint(4, (5,)) if likelihood == "classification" else torch.rand(5, 4)
    y = y.to(torch.uint8) if fisher == "mc" and likelihood == "classification" else y
    for number in (3, 4):
        curvature = CurvaturePass(model, likelihood, fisher=fisher)
        for _ in range(number - 1):
            curvature.add(x, y)
        wrong = x.clone(), y.clone()
        spoil(*wrong)
        if number == 3:
            curvature.add(*wrong)
        with pytest.raises(ValueError, match=message):
            curvature.factors() if number == 3 else curvature.add(*wrong)
        with pytest.raises(RuntimeError, match="Call reset"):
            curvature.factors()
        curvature.reset()
        curvature.add(x, y)
        assert curvature.factors().num_data == 5


@pytest.mark.parametrize(
    ("mode", "every", "most", "waits"),
    [("reduce", 100, 280, 1), ("reduce", 1, 1570, 6), ("expand", 1, 2780, 6)],
)
def test_a_step_of_kfac(mode, every, most, waits):
    """Forward and backward passes and a step of SGD take 164 operations, 210 one by one.

    A wait for the device is for an error that names what is not finite.
    """
    torch.manual_seed(0)
    model = WideResNetFixup(16, 4)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn_like(p)
    options = PreconditionerOptions(factor_every=every, update_every=every)
    optimizer = KFAC(model, "classification", options=options, kfac_approx=mode)
    x, y = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(2):
        step()
    with Dispatched() as dispatched:
        step()
    assert 164 < dispatched.computing() <= most
    assert sum(dispatched.counts[name] for name in WAITS) <= waits
