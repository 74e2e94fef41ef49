"""Which optimiser? SGD, AdamW, SOAP and K-FAC on three small problems, tuned alike.

Each method has the same number of quasi-random trials of its learning rate, or, with K-FAC, of
learning rate and damping together. The settings with the lowest last validation loss then run with
three other seeds, for the same steps and with the same schedule: a linear warm-up of 5 % of the
steps, then a cosine to zero. SOAP and K-FAC renew their preconditioners every 10 steps. K-FAC
preconditions Nesterov's SGD, with a KL clip of 1e-3 and factors of every tenth batch. One row has
moving averages (.9) of these factors, and one has no KL clip. The target of the tables is the last
loss of tuned SGD. Eschenhagen et al. 2023 have no such comparison.

``make optimizer-comparison`` runs the missing parts; ``--data`` selects problems. SOAP is from the
package pytorch-optimizer.
"""

import sys
from collections.abc import Sequence
from typing import Any

from experiments.data import data_file, default_source, images
from experiments.data.dart import DART
from experiments.optimizers import steps_to_target
from experiments.optimizers.runs import Config, Method, Problem, Schedule, Timing
from experiments.optimizers.steps_to_target import Study
from marglik.data import Digits
from marglik.data.batches import Splits
from marglik.models import GPT, LeNet, WideResNetFixup

__all__ = ["METHODS", "PROBLEMS", "STUDY"]


def _digits() -> Splits:
    return Digits(validation=0.25).load()


def _cifar10() -> Splits:
    return images(default_source(), max_train=4_000, max_test=1_000, validation=0.25).load()


def _dart() -> Splits:
    path = data_file("dart-v1.1.1-full-dev.json.gz")
    return DART(path, num_train=6_000, num_test=500, validation=1 / 12).load()


def _lenet(splits: Any) -> LeNet:
    return LeNet(splits.num_classes, 1, 8)


def _wide_resnet(splits: Any) -> WideResNetFixup:
    return WideResNetFixup(10, 1, splits.num_classes)


def _gpt(splits: Any) -> GPT:
    return GPT(256, context=splits.train[0].shape[1], dim=32, depth=2, heads=4)


PROBLEMS = {
    "digits": Problem("digits, LeNet", _digits, _lenet, "classification", 64),
    "gpt": Problem("DART, GPT, nats per byte", _dart, _gpt, "classification", 32),
    "cifar10": Problem(
        "CIFAR-10 (JPEG), WRN-10-1 Fixup", _cifar10, _wide_resnet, "classification", 32,
        scalar_lr_factor=0.1,
    ),
}  # fmt: skip
CLIPPED = {"norm_control": "kl_clip", "norm_limit": 1e-3, "ema_decay": 0.0}
PLAIN = {"norm_control": "none", "ema_decay": 0.0}
AVERAGED = {**CLIPPED, "ema_decay": 0.9}
METHODS = {
    "nesterov": Method("SGD, Nesterov", "nesterov"),
    "adamw": Method("AdamW", "adamw", weight_decay=1e-2),
    "soap": Method("SOAP", "soap", betas=(0.95, 0.95), weight_decay=1e-2),
    "expand": Method("K-FAC-expand, KL clip", "nesterov", "expand", CLIPPED),
    "reduce": Method("K-FAC-reduce, KL clip", "nesterov", "reduce", CLIPPED),
    "reduce averaged": Method("K-FAC-reduce, KL clip, averages", "nesterov", "reduce", AVERAGED),
    "reduce plain": Method("K-FAC-reduce", "nesterov", "reduce", PLAIN),
}
SGD_LR, ADAM_LR = (1e-3, 1.0), (1e-4, 1e-1)
STUDY = Study(
    title="",
    methods=METHODS,
    schedules={"digits": Schedule(400, 20), "gpt": Schedule(240, 12), "cifar10": Schedule(200, 10)},
    lr=dict.fromkeys(METHODS, SGD_LR) | {"adamw": ADAM_LR, "soap": ADAM_LR},
    damping=(1e-3, 1.0),
    block=10,
    choose_first=False,
)  # fmt: skip


def run_one(task: Config | Timing) -> dict[str, Any]:
    """Run a search, the seeds, or the timing."""
    return steps_to_target.run_task(task, PROBLEMS, METHODS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, run the seeds, time, write tables and figures; returns the exit status."""
    return steps_to_target.main(
        arguments,
        name="optimizer_comparison",
        description=__doc__ or "",
        studies=[STUDY],
        problems=PROBLEMS,
        run_one=run_one,
        data=list(PROBLEMS),
        trials=8,
        seeds=3,
    )


if __name__ == "__main__":
    sys.exit(main())
