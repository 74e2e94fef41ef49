"""The four commands: their options in groups, the call of what they do, and what they print.

What a command needs is imported when it is asked for, since torch takes seconds.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from marglik.runs.launch import is_another_rank
from marglik.runs.options import add_config, add_fields, provenance_of, taken

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

__all__ = ["ADD_OPTIONS", "RUN"]

# Title -> prefix and fields of a config; what matters first comes first. A prefix is the name of
# an argument of `train` or `fit`; without one, the fields are the run's.
TRAIN = {
    "the run": {
        "": ("epochs", "batch_size", "output", "resume", "overwrite", "members", "baseline"),
        "optimizer": ("name", "lr"),
        "prior": ("weight_decay",),
    },
    "training": {
        "": ("augment", "held_out", "monitor", "seed"),
        "optimizer.kfac": ("damping",),
    },
    "how the weight decays are learned": {
        "prior": (
            "structure", "every", "burn_in", "steps", "method", "average", "keep",
            "curvature_from",
        ),
    },
    "the curvature": {
        "curvature": ("kfac_approx", "fisher", "batch_size", "unsupported", "backward_precision"),
    },
    "predictions": {
        "predictive": ("method",),
    },
    "the machine": {
        "": (
            "accelerator", "devices", "rank_timeout", "precision", "compile", "progress",
        ),
    },
}  # fmt: skip
FIT = {
    "the run": {
        "": ("output", "overwrite", "batch_size", "seed"),
        "prior": ("method", "structure", "weight_decay", "temperature", "sigma_noise", "layers"),
    },
    "the curvature": {
        "curvature": (
            "kfac_approx", "fisher", "mc_samples", "corrected", "batch_size", "unsupported",
            "diagonal_above", "backward_precision",
        ),
    },
    "predictions": {
        "predictive": ("method", "networks", "layers", "batch_size", "calibration"),
    },
    "the machine": {"": ("accelerator", "devices", "rank_timeout", "progress")},
}  # fmt: skip


def _add_groups(parser: "ArgumentParser", groups: Any, configs: dict[str, type]) -> None:
    """Add the fields of configs, by prefix, under the titles of ``groups``."""
    for title, names_of in groups.items():
        group = parser.add_argument_group(title)
        for prefix, names in names_of.items():
            dotted = f"{prefix}." if prefix else ""
            add_fields(parser, group, configs[prefix], dotted, names)


def add_train(parser: "ArgumentParser") -> None:
    """The options of `marglik train`."""
    from marglik.data import DataSource, ImageData
    from marglik.prediction.predictive import PredictiveConfig
    from marglik.runs.config import CurvatureConfig, PriorConfig, RunConfig
    from marglik.training.optimizers import KfacConfig, OptimizerConfig

    _add_network_and_data(parser, DataSource)
    parser.add_argument(
        "--ood",
        type=ImageData | None,
        default=None,
        help="Class of out-of-distribution images, on which the predictives should be uncertain.",
    )
    configs = {
        "": RunConfig,
        "optimizer": OptimizerConfig,
        "optimizer.kfac": KfacConfig,
        "prior": PriorConfig,
        "curvature": CurvatureConfig,
        "predictive": PredictiveConfig,
    }
    _add_groups(parser, TRAIN, configs)


def run_train(parser: "ArgumentParser", options: Any) -> None:
    """Train, print the results, and write the report."""
    import torch

    from marglik.prediction.predictive import PredictiveConfig
    from marglik.report import write_report
    from marglik.runs.config import CurvatureConfig, PriorConfig, RunConfig, check_seed
    from marglik.runs.summary import print_summary
    from marglik.runs.train import train
    from marglik.training.optimizers import KfacConfig, OptimizerConfig

    provenance = provenance_of(parser, options)
    # Before `instantiate`, which draws the model's initial parameters.
    check_seed(options.seed)
    torch.manual_seed(options.seed)
    arguments: Any = parser.instantiate(options).as_dict()
    arguments["optimizer"]["kfac"] = KfacConfig(**arguments["optimizer"]["kfac"])
    results = train(
        optimizer=taken(arguments, OptimizerConfig, "optimizer"),
        prior=taken(arguments, PriorConfig, "prior"),
        curvature=taken(arguments, CurvatureConfig, "curvature"),
        predictive=taken(arguments, PredictiveConfig, "predictive"),
        run=taken(arguments, RunConfig),
        provenance=provenance,
        **arguments,  # model, data, ood, likelihood
    )
    if not is_another_rank():
        print_summary(results, write_report([results["output"]]))


def add_fit(parser: "ArgumentParser") -> None:
    """The options of `marglik fit`."""
    from marglik.data import DataSource
    from marglik.prediction.predictive import PredictiveConfig
    from marglik.runs.config import PostHocConfig, PostHocCurvatureConfig, PostHocRunConfig

    parser.add_argument(
        "--checkpoint",
        type=str,
        required=True,
        help="File with the network's parameters: safetensors, or a state dict that torch.save has "
        "written.",
    )
    _add_network_and_data(parser, DataSource)
    configs = {
        "": PostHocRunConfig,
        "prior": PostHocConfig,
        "curvature": PostHocCurvatureConfig,
        "predictive": PredictiveConfig,
    }
    _add_groups(parser, FIT, configs)


def run_fit(parser: "ArgumentParser", options: Any) -> None:
    """Fit, save, and print the prior that was found."""
    from marglik.prediction.predictive import PredictiveConfig
    from marglik.runs.config import PostHocConfig, PostHocCurvatureConfig, PostHocRunConfig
    from marglik.runs.fit import fit
    from marglik.runs.summary import print_fit

    provenance = provenance_of(parser, options)
    arguments: Any = parser.instantiate(options).as_dict()
    results = fit(
        prior=taken(arguments, PostHocConfig, "prior"),
        curvature=taken(arguments, PostHocCurvatureConfig, "curvature"),
        predictive=taken(arguments, PredictiveConfig, "predictive"),
        run=taken(arguments, PostHocRunConfig),
        provenance=provenance,
        **arguments,  # model, data, checkpoint, likelihood
    )
    if not is_another_rank():
        print_fit(results)


def add_evaluate(parser: "ArgumentParser") -> None:
    """The options of `marglik evaluate`."""
    from marglik.runs.evaluate import evaluate_run

    add_config(parser)
    parser.add_function_arguments(evaluate_run, as_positional=True)


def run_evaluate(parser: "ArgumentParser", options: Any) -> None:
    """Evaluate, print the metrics, and write the report again."""
    from marglik.report import write_report
    from marglik.runs.evaluate import evaluate_run
    from marglik.runs.summary import print_evaluation
    from marglik.storage.run_folder import EVALUATION

    options.pop("config", None)
    results = evaluate_run(**parser.instantiate(options).as_dict())
    if is_another_rank():
        return
    print_evaluation(results)
    folder = Path(results["output"])
    print(f"\nWritten to {folder / EVALUATION}; the report to {write_report([folder])}")


def add_report(parser: "ArgumentParser") -> None:
    """The options of `marglik report`."""
    parser.add_argument(
        "folders",
        nargs="+",
        type=str,
        help="Folders that marglik train, fit or evaluate has written; several are compared.",
    )
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="File to write the page to; null writes report.html into the first folder.",
    )


def run_report(parser: "ArgumentParser", options: Any) -> None:
    """Write the page, and print where it is."""
    from marglik.report import write_report

    print(f"Written to {write_report(options.folders, options.output)}")


def _add_network_and_data(parser: "ArgumentParser", source: type) -> None:
    from torch import nn

    from kfac_backend.options import Likelihood

    add_config(parser)
    parser.add_argument(
        "--model",
        type=nn.Module,
        required=True,
        help="Class of the network, whose outputs are logits, or means for regression: one of "
        "marglik.models, such as LeNet, or the path of any class, such as my_net.MyNet.",
    )
    parser.add_argument(
        "--data",
        type=source,
        required=True,
        help="Class of the data, of marglik.data: such as Digits or CIFAR10, an ImageFolder, or a "
        "TensorFile for any tensors. fit takes what the network was trained on.",
    )
    parser.add_argument(
        "--likelihood",
        type=Likelihood,
        default="classification",
        help="Distribution of the targets: classification; regression with Gaussian noise, which "
        "is learned; or bernoulli for independent yes-or-no outputs.",
    )


ADD_OPTIONS = {"train": add_train, "fit": add_fit, "evaluate": add_evaluate, "report": add_report}
RUN = {"train": run_train, "fit": run_fit, "evaluate": run_evaluate, "report": run_report}
