"""`marglik evaluate`: the metrics of a saved posterior's predictions."""

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from marglik.commands.option_parsing import PresetOrFile
from marglik.commands.several_ranks import is_another_rank
from marglik.runs.evaluate import evaluate_run
from marglik.runs.summary import print_evaluation
from marglik.storage.run_files import EVALUATION

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--config", action=PresetOrFile, help="YAML file of options.")
    parser.add_function_arguments(evaluate_run, as_positional=True)


def run(parser: ArgumentParser, options: Any) -> None:
    """Evaluate, print the metrics, and write the report again."""
    from marglik.report import write_report  # here, since plots take long to import

    options.pop("config", None)
    results = evaluate_run(**parser.instantiate(options).as_dict())
    if is_another_rank():
        return
    print_evaluation(results)
    folder = Path(results["output"])
    print(f"\nWritten to {folder / EVALUATION}; the report to {write_report([folder])}")
