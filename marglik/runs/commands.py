"""The four commands: their options in groups, the call of what they do, and what they print.

What a command needs is imported when it is asked for, since torch takes seconds.
"""

import inspect
import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentParser, DefaultHelpFormatter

from marglik.storage.provenance import Provenance

__all__ = [
    "ADD_OPTIONS",
    "RUN",
    "HelpFormatter",
    "PresetOrFile",
    "is_another_rank",
    "preset_names",
    "start_ranks",
    "whole_names",
]

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


def _train_configs() -> dict[str, type]:
    from marglik.prediction.predictive import PredictiveConfig
    from marglik.runs.config import CurvatureConfig, PriorConfig, RunConfig
    from marglik.training.optimizers import OptimizerConfig

    return {
        "": RunConfig,
        "optimizer": OptimizerConfig,
        "prior": PriorConfig,
        "curvature": CurvatureConfig,
        "predictive": PredictiveConfig,
    }


def _add_train(parser: ArgumentParser) -> None:
    from marglik.data import DataSource, ImageData
    from marglik.training.optimizers import KfacConfig

    _add_network_and_data(parser, DataSource)
    parser.add_argument(
        "--ood",
        type=ImageData | None,
        default=None,
        help="Class of out-of-distribution images, on which the predictives should be uncertain.",
    )
    _add_groups(parser, TRAIN, _train_configs() | {"optimizer.kfac": KfacConfig})


def _train(parser: ArgumentParser, options: Any) -> None:
    """Train, print the results, and write the report."""
    import torch

    from marglik.report import write_report
    from marglik.runs.config import check_seed
    from marglik.runs.summary import print_summary
    from marglik.runs.train import train
    from marglik.training.optimizers import KfacConfig

    provenance = _provenance(parser, options)
    # Before `instantiate`, which draws the model's initial parameters.
    check_seed(options.seed)
    torch.manual_seed(options.seed)
    arguments: Any = parser.instantiate(options).as_dict()
    arguments["optimizer"]["kfac"] = KfacConfig(**arguments["optimizer"]["kfac"])
    results = train(**_made(arguments, _train_configs()), provenance=provenance)
    if not is_another_rank():
        print_summary(results, write_report([results["output"]]))


def _fit_configs() -> dict[str, type]:
    from marglik.prediction.predictive import PredictiveConfig
    from marglik.runs.config import PostHocConfig, PostHocCurvatureConfig, PostHocRunConfig

    return {
        "": PostHocRunConfig,
        "prior": PostHocConfig,
        "curvature": PostHocCurvatureConfig,
        "predictive": PredictiveConfig,
    }


def _add_fit(parser: ArgumentParser) -> None:
    from marglik.data import DataSource

    parser.add_argument(
        "--checkpoint",
        type=str,
        required=True,
        help="File with the network's parameters: safetensors, or a state dict that torch.save has "
        "written.",
    )
    _add_network_and_data(parser, DataSource)
    _add_groups(parser, FIT, _fit_configs())


def _fit(parser: ArgumentParser, options: Any) -> None:
    """Fit, save, and print the prior that was found."""
    from marglik.runs.fit import fit
    from marglik.runs.summary import print_fit

    provenance = _provenance(parser, options)
    arguments: Any = parser.instantiate(options).as_dict()
    results = fit(**_made(arguments, _fit_configs()), provenance=provenance)
    if not is_another_rank():
        print_fit(results)


def _add_evaluate(parser: ArgumentParser) -> None:
    from marglik.runs.evaluate import evaluate_run

    _add_config(parser)
    parser.add_function_arguments(evaluate_run, as_positional=True)


def _evaluate(parser: ArgumentParser, options: Any) -> None:
    """Evaluate, print the metrics, and write the report again."""
    from marglik.report import write_report
    from marglik.runs.evaluate import evaluate_run
    from marglik.runs.summary import print_evaluation
    from marglik.storage.run_folder import EVALUATION

    options.pop("config", None)
    results = evaluate_run(**parser.instantiate(options).as_dict())
    if not is_another_rank():
        print_evaluation(results)
        folder = Path(results["output"])
        print(f"\nWritten to {folder / EVALUATION}; the report to {write_report([folder])}")


def _add_report(parser: ArgumentParser) -> None:
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


def _report(parser: ArgumentParser, options: Any) -> None:
    """Write the page, and print where it is."""
    from marglik.report import write_report

    print(f"Written to {write_report(options.folders, options.output)}")


def _add_groups(parser: ArgumentParser, groups: Any, configs: dict[str, type]) -> None:
    """Add the fields of configs, by prefix, under the titles of ``groups``."""
    for title, names_of in groups.items():
        group = parser.add_argument_group(title)
        for prefix, names in names_of.items():
            _add_fields(group, configs[prefix], prefix, names)


def _add_network_and_data(parser: ArgumentParser, source: type) -> None:
    from torch import nn

    from kfac_backend.options import Likelihood

    _add_config(parser)
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


ADD_OPTIONS = {
    "train": _add_train,
    "fit": _add_fit,
    "evaluate": _add_evaluate,
    "report": _add_report,
}
RUN = {"train": _train, "fit": _fit, "evaluate": _evaluate, "report": _report}


# How options are made of dataclasses, and files of options are read.


def preset_names() -> list[str]:
    """The presets, which --config accepts by name."""
    return sorted(
        Path(p.name).stem for p in files("marglik.presets").iterdir() if ".yaml" in p.name
    )


def _add_config(parser: ArgumentParser) -> None:
    names = ", ".join(preset_names())
    parser.add_argument(
        "--config",
        action=PresetOrFile,
        help=f"YAML file of options, or the name of a preset: {names}.",
    )
    for action in parser._actions:  # jsonargparse's --print_config has a backspace in it
        if isinstance(action.metavar, str):
            action.metavar = action.metavar.replace("\b", "")


class PresetOrFile(ActionConfigFile):
    """--config: a YAML file, or the name of a preset that the package ships."""

    def __call__(
        self, parser: Any, cfg: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Read the file, as jsonargparse's own action does."""
        if values in preset_names():
            values = str(files("marglik.presets") / f"{values}.yaml")
        elif not Path(values).is_file():
            raise FileNotFoundError(
                f"--config {values or repr('')}: no such file or preset; the presets are "
                f"{', '.join(preset_names())}."
            )
        super().__call__(parser, cfg, values, option_string)


class HelpFormatter(DefaultHelpFormatter):
    """Help without the list of the hundreds of subclasses of torch.nn.Module.

    They are not searched for either: that would import packages that happen to be installed, such
    as transformers, and take tens of seconds.
    """

    def _get_help_string(self, action: Any) -> str:
        # Compared as text, since importing torch takes seconds.
        if "torch.nn.modules.module.Module" in str(getattr(action, "_typehint", "")):
            action.extra_help = str  # a function that returns an empty text
        return super()._get_help_string(action)


def whole_names(arguments: Sequence[str]) -> list[str]:
    """The arguments with --model NAME replaced by the path of our class of that name, if any.

    jsonargparse finds imported classes by their short names itself, but torchvision has an MLP,
    too, which makes the name ambiguous.
    """
    from marglik import models

    found = list(arguments)
    for i, argument in enumerate(found):
        option, equals, name = argument.partition("=")
        if option == "--model" and name in models.__all__:
            found[i] = f"{option}{equals}marglik.models.{name}"
        elif argument in models.__all__ and found[i - 1] == "--model":
            found[i] = f"marglik.models.{argument}"
    return found


def _add_fields(group: Any, config: type, prefix: str, names: Collection[str]) -> None:
    """Add fields of a dataclass to a group of options, with their help from its docstring.

    Args:
        group: the group.
        config: the dataclass.
        prefix: the name of the dataclass among the options; empty if its fields are options of
            their own, whose booleans then are --name and --no_name.
        names: the fields; others keep their defaults, and can be set from Python alone.
    """
    hints, help_of = get_type_hints(config), _help_of(config)
    for field in fields(config):
        if field.name in names:
            kind: dict[str, Any] = {"type": hints[field.name]}
            if isinstance(field.default, bool) and not prefix:
                kind = {"action": ActionYesNo(yes_prefix="", no_prefix="no_")}
            default = None if field.default is MISSING else field.default
            name = f"--{prefix}.{field.name}" if prefix else f"--{field.name}"
            group.add_argument(name, default=default, help=help_of[field.name], **kind)


def _help_of(config: Any) -> dict[str, str]:
    """Field -> its help, from the docstrings of the dataclass and of those that it extends."""
    found: dict[str, str] = {}
    for base in reversed(inspect.getmro(config)):
        for param in parse_docstring(base.__doc__ or "").params:
            found[param.arg_name] = " ".join((param.description or "").split())
    return found


def _made(arguments: dict[str, Any], configs: dict[str, type[Any]]) -> dict[str, Any]:
    """The arguments of a command's function: its options, with configs in place of their fields."""
    arguments = dict(arguments)
    for prefix, config in configs.items():
        if prefix:
            arguments[prefix] = config(**arguments.pop(prefix, {}))
        else:
            names = [field.name for field in fields(config) if field.name in arguments]
            arguments["run"] = config(**{name: arguments.pop(name) for name in names})
    return arguments


def _provenance(parser: ArgumentParser, options: Any) -> Provenance:
    """The options as YAML, the preset, and how to build network and data.

    Removes --config from the options: its content is among them already.
    """
    shipped = {str(files("marglik.presets") / f"{name}.yaml"): name for name in preset_names()}
    given = [shipped.get(str(path)) for path in options.pop("config", None) or ()]
    preset = ", ".join(name for name in given if name) or None
    plain = json.loads(parser.dump(options, format="json_compact"))
    return Provenance(parser.dump(options), plain.get("model"), plain.get("data"), preset)


# Several ranks of one machine.


def is_another_rank() -> bool:
    """Whether this process is a rank other than the first.

    From the environment that torchrun sets, as importing torch would be slow.
    """
    return os.environ.get("RANK", "0") != "0"


def start_ranks(options: Any, arguments: Sequence[str]) -> None:
    """If ``--devices`` asks for several ranks, become torchrun, which runs this command on each.

    Raises:
        ValueError: a number of devices that is not possible on this machine.
    """
    devices = options.get("devices")
    # A process that torchrun has started is a rank already.
    if devices in (None, 1) or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    from marglik.runs.build import number_of_ranks
    from marglik.runs.config import check_devices

    check_devices(devices, options.rank_timeout)
    number = str(number_of_ranks(devices, options.accelerator))
    # Ranks that each used all cores would slow each other down. A user's own setting has priority.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(number))))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number]
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", "--", "marglik", *arguments])
