"""`marglik fit`: a posterior for a network that was trained elsewhere."""

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from kfac_backend.files import atomic_path
from marglik.commands.options import PresetOrFile, add_fields, sources_of, take_fields
from marglik.config import PostHocRunConfig
from marglik.fit import fit
from marglik.run_files import CONFIG
from marglik.summary import print_fit

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--config", action=PresetOrFile, help="A YAML file of options.")
    parser.add_function_arguments(fit, skip={"run", "sources"})
    add_fields(parser, PostHocRunConfig, "the run")


def run(parser: ArgumentParser, options: Any) -> None:
    """Fit, save, and print the prior that was found."""
    options.pop("config", None)
    text, sources = parser.dump(options), sources_of(parser, options)
    arguments: Any = parser.instantiate(options).as_dict()
    config = take_fields(arguments, PostHocRunConfig)
    results = fit(**arguments, run=config, sources=sources)
    with atomic_path(Path(results["output"]) / CONFIG) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print_fit(results)
