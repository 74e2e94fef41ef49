"""`marglik train`: train a network, learn the weight decays."""

from typing import Any

import torch
from jsonargparse import ArgumentParser

from marglik.commands.option_parsing import (
    PresetOrFile,
    add_fields,
    preset_names,
    provenance_of,
    take_fields,
)
from marglik.commands.several_ranks import is_another_rank
from marglik.runs.config import RunConfig
from marglik.runs.summary import print_summary
from marglik.runs.train import train

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--config",
        action=PresetOrFile,
        help=f"YAML file of options, or the name of a preset: {', '.join(preset_names())}.",
    )
    parser.add_function_arguments(train, skip={"run", "provenance"})
    add_fields(parser, RunConfig, "the run")


def run(parser: ArgumentParser, options: Any) -> None:
    """Train, print the results, and write the report."""
    from marglik.report import write_report  # here, since plots take long to import

    provenance = provenance_of(parser, options)
    # Before `instantiate`, which draws the model's initial parameters.
    torch.manual_seed(options.seed)
    arguments: Any = parser.instantiate(options).as_dict()
    config = take_fields(arguments, RunConfig)
    results = train(**arguments, run=config, provenance=provenance)
    if not is_another_rank():
        print_summary(results, write_report([results["output"]]))
