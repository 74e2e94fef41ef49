"""The command `marglik`: options are the constructors' own arguments, read by jsonargparse."""

import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import (
    ActionConfigFile,
    ActionYesNo,
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
)

from kfac_backend.files import atomic_path
from marglik.config import RunConfig

__all__ = ["main"]

TRACEBACK_VARIABLE = "MARGLIK_TRACEBACK"
"""Set to 1 to see the traceback of an error that otherwise ends in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 for bad input, 130 when interrupted."""
    # Importing torchvision makes torch complain of itself.
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=FutureWarning)
    try:
        parser, train_parser = _parsers()
        return _train(parser, train_parser, parser.parse_args(arguments))
    except KeyboardInterrupt:
        print("\nmarglik: interrupted; the log so far is in the output folder.", file=sys.stderr)
        return 130
    except ArgumentError as error:
        _print_error(f"{error} See marglik train --help.")
        return 2
    except (ValueError, TypeError, NotImplementedError, OSError, FloatingPointError) as error:
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        _print_error(str(error))
        return 2


def _print_error(message: str) -> None:
    print(f"marglik: error: {' '.join(message.split())}", file=sys.stderr)


def preset_names() -> list[str]:
    """The names that --config takes besides paths."""
    return sorted(
        Path(p.name).stem for p in files("marglik.presets").iterdir() if ".yaml" in p.name
    )


class _PresetOrFile(ActionConfigFile):
    """--config: a YAML file, or the name of a preset that the package ships."""

    def __call__(
        self, parser: Any, cfg: Any, values: Any, option_string: str | None = None
    ) -> None:
        if values in preset_names():
            values = str(files("marglik.presets") / f"{values}.yaml")
        elif not Path(values).is_file():
            raise FileNotFoundError(
                f"--config {values}: no such file, nor a preset ({', '.join(preset_names())})."
            )
        super().__call__(parser, cfg, values, option_string)


class _HelpFormatter(DefaultHelpFormatter):
    """Leaves out the hundreds of subclasses that torch.nn.Module has."""

    def _get_help_string(self, action: Any) -> str:
        text = super()._get_help_string(action)
        return re.sub(r", known subclasses: torch\.nn\.Module.*\)", ")", text)


def _parsers() -> tuple[ArgumentParser, ArgumentParser]:
    """The command's parser, and that of `marglik train`."""
    from marglik.experiment import train

    parser = ArgumentParser(
        prog="marglik",
        version=version("marglik"),
        description="Learn a weight decay per layer while the network trains.",
        exit_on_error=False,
        formatter_class=_HelpFormatter,  # of the subcommands as well
    )
    commands = parser.add_subcommands()
    train_parser = ArgumentParser(
        description="Train a network and its weight decays together.", exit_on_error=False
    )
    train_parser.add_argument(
        "--config",
        action=_PresetOrFile,
        help=f"A YAML file of options, or a preset: {', '.join(preset_names())}.",
    )
    train_parser.add_function_arguments(train, skip={"run"})
    _add_run_options(train_parser)
    commands.add_subcommand("train", train_parser, help="train on images, learn the weight decays")
    return parser, train_parser


def _add_run_options(parser: ArgumentParser) -> None:
    """The fields of `RunConfig` as options of their own; truth values as --name and --no_name."""
    group = parser.add_argument_group("the run")
    help_of = {p.arg_name: p.description for p in parse_docstring(RunConfig.__doc__ or "").params}
    for field in fields(RunConfig):
        if isinstance(field.default, bool):
            kind: dict[str, Any] = {"action": ActionYesNo(yes_prefix="", no_prefix="no_")}
        else:
            kind = {"type": get_type_hints(RunConfig)[field.name]}
        description = " ".join((help_of[field.name] or "").split())
        group.add_argument(f"--{field.name}", default=field.default, help=description, **kind)


def _train(parser: ArgumentParser, train_parser: ArgumentParser, config: Any) -> int:
    import torch

    from marglik.experiment import train
    from marglik.summary import print_summary

    config.train.pop("config", None)  # its options are in the others now
    options = train_parser.dump(config.train)
    # Before the model is made, whose initial parameters are random.
    torch.manual_seed(config.train.seed)
    arguments: Any = parser.instantiate(config)["train"].as_dict()
    run = RunConfig(**{field.name: arguments.pop(field.name) for field in fields(RunConfig)})
    results = train(**arguments, run=run)
    with atomic_path(Path(results["output"]) / "config.yaml") as temporary:
        temporary.write_text(options, encoding="utf-8")
    print_summary(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
