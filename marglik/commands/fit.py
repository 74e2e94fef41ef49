"""`marglik fit`: a posterior for a network that was trained elsewhere."""

from typing import Any

from jsonargparse import ArgumentParser

from marglik.commands.option_parsing import PresetOrFile, add_fields, provenance_of, take_fields
from marglik.commands.several_ranks import is_another_rank
from marglik.runs.config import PostHocRunConfig
from marglik.runs.fit import fit
from marglik.runs.summary import print_fit

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--config", action=PresetOrFile, help="YAML file of options.")
    parser.add_function_arguments(fit, skip={"run", "provenance"})
    add_fields(parser, PostHocRunConfig, "the run")


def run(parser: ArgumentParser, options: Any) -> None:
    """Fit, save, and print the prior that was found."""
    provenance = provenance_of(parser, options)
    arguments: Any = parser.instantiate(options).as_dict()
    config = take_fields(arguments, PostHocRunConfig)
    results = fit(**arguments, run=config, provenance=provenance)
    if not is_another_rank():
        print_fit(results)
