"""A step of a training that learns its weight decays, compared with a plain step: time, memory.

All networks are trained by SGD with momentum and Nesterov's rule, in a loop of a few lines. The
plain training has one weight decay. All take turns in one process and one thread, without an update
of the weight decays. "No average" has ``average=None``; "no comparison" also lacks the fingerprints
by which `finish` notices weights that were restored. A learner also looks at the steps of unknown
optimisers. This is off here, because it would slow the other trainings.

Memory is counted in tensors: the bytes of those that a learner keeps after some steps, apart from
weights, gradients, momentum and data; and the peak of a step beyond what is there before it.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.models import VisionTransformer
from experiments.studies import Result, markdown, study
from experiments.timing import interleaved, medians, peak_memory
from experiments.weight_decay.training import convolutions, no_norm
from marglik import PriorLearner
from marglik.models import MLP

STEPS = 20
"""Steps in a repetition."""
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP 784-160-64-10": (lambda: MLP(784, (160, 64), 10), (50, 784), 200),
    "convolutions on digits": (lambda: convolutions(no_norm, "flattened"), (50, 1, 8, 8), 60),
    "vision transformer": (
        lambda: VisionTransformer(num_classes=10, patch_size=4, dim=48, depth=3, heads=4),
        (16, 3, 32, 32),
        15,
    ),
}
"""A network, the shape of a batch, and how often its trainings repeat the steps."""
ARMS = ("plain", "learned", "no average", "no average, no comparison", "plain again")


@dataclass(frozen=True)
class Config:
    """A network."""

    network: str


class Training:
    """A network in training."""

    def __init__(self, network: str, arm: str) -> None:
        make, shape, _ = NETWORKS[network]
        torch.manual_seed(0)
        self.model = make()
        self.data = [(torch.randn(shape), torch.randint(10, shape[:1])) for _ in range(STEPS)]
        is_plain = arm.startswith("plain")
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), 1e-4, momentum=0.9, nesterov=True,
            weight_decay=5e-4 if is_plain else 0.0,
        )  # fmt: skip
        self.run()  # momentum and gradients are there
        before = set(self.tensors())
        self.learner = None
        if not is_plain:
            average: dict[str, Any] = {} if arm == "learned" else {"average": None}
            self.learner = PriorLearner("classification", epochs=10_000, **average)
            # No epoch ends, and no update is due.
            self.learner.start(self.model, self.optimizer, self.data, 10_000, hooks="gradients")
            hooks: Any = self.learner._hooks
            for handle in hooks._handles[:2]:  # on all optimisers
                handle.remove()
            for left in hooks._left if "no comparison" in arm else ():
                left.remember = left.look_before_step = lambda: None
        self.run()
        self.kept = sum(size for key, size in self.tensors().items() if key not in before)

    def tensors(self) -> dict[int, int]:
        """The bytes of all memory that tensors have, by its address."""
        gc.collect()  # otherwise new tensors may get the addresses of old ones
        found = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        found += [p.grad for p in self.model.parameters() if p.grad is not None]
        memories = [t.untyped_storage() for t in found]
        return {memory.data_ptr(): memory.nbytes() for memory in memories}

    def run(self) -> None:
        """Some steps."""
        for x, y in self.data:
            self.step(x, y)

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step; gradients keep their memory."""
        self.optimizer.zero_grad(set_to_none=False)
        cross_entropy(self.model(x), y).backward()
        self.optimizer.step()


def run(config: Config) -> Result:
    """Time the steps of all arms, which take turns, and count the bytes of their tensors."""
    device = torch.device("cpu")
    trainings = {arm: Training(config.network, arm) for arm in ARMS}
    work = {arm: training.run for arm, training in trainings.items()}
    measured = interleaved(work, NETWORKS[config.network][2], device, clock="processor")
    ratios = {
        arm: [a / b for a, b in zip(values, measured["plain"], strict=True)]
        for arm, values in measured.items()
    }
    parameters = list(trainings["plain"].model.parameters())
    return {
        "weights": sum(p.numel() for p in parameters),
        "repetitions": NETWORKS[config.network][2],
        "weights_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "seconds_of_a_step": {arm: s / STEPS for arm, s in medians(measured).items()},
        "ratios": {arm: [round(r, 4) for r in rs] for arm, rs in ratios.items()},
        "kept_bytes": {arm: training.kept for arm, training in trainings.items()},
        "peak_bytes": {
            arm: peak_memory(lambda t=training: t.step(*t.data[0]), device)
            for arm, training in trainings.items()
        },
    }


def tasks(options: argparse.Namespace) -> list[Config]:
    """One for each network."""
    return [Config(network) for network in options.data]


def table(results: list[Result]) -> str:
    """The median time of a step and its quartiles, in plain steps; memory in units of weights."""
    rows = [["network", "weights", "training", "a step, µs", "plain steps", "quartiles",
             "kept by the learner, weights", "peak of a step, weights"]]  # fmt: skip
    for result in results:
        size: Any = result["weights_bytes"]
        for arm, ratios in result["ratios"].items():
            low, middle, high = statistics.quantiles(ratios)
            rows.append([
                result["config"]["network"], f"{result['weights']:,}", arm,
                f"{1e6 * result['seconds_of_a_step'][arm]:.0f}", f"{middle:.3f}",
                f"{low:.3f} to {high:.3f}", f"{result['kept_bytes'][arm] / size:.3f}",
                f"{result['peak_bytes'][arm] / size:.2f}",
            ])  # fmt: skip
    return markdown(rows)


main = study("step_cost", __doc__, run, tasks, table, problems=NETWORKS)

if __name__ == "__main__":
    sys.exit(main())
