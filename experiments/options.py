"""Options that the experiments share: where results lie, and which parts of a benchmark to measure.

Your results and those that come with the project never mix. Without ``--results``, everything is
read from and written to ``results/`` in the working directory, which git ignores.
"""

import argparse
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["SHIPPED", "add_results", "parse_options", "parts_parser", "parts_to_measure"]

OWN = Path("results")
SHIPPED = Path(__file__).parent / "results"
"""Results that the READMEs quote, under version control."""


def add_results(parser: argparse.ArgumentParser) -> None:
    """The option --results."""
    parser.add_argument(
        "--results", type=Path, default=OWN, metavar="FOLDER",
        help="folder where results are read and written; default: results/, for your own. The "
        "results that the READMEs quote are in experiments/results/: name it to show them (--list, "
        "--report) or, as a maintainer, to replace them",
    )  # fmt: skip


def parts_parser(
    description: str, parts: Collection[str], default_device: str
) -> argparse.ArgumentParser:
    """A parser for the parts to measure, --resume, --device and --results."""
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument(
        "parts", nargs="*", help=f"what to measure: {', '.join(parts)}; default: all"
    )
    parser.add_argument("--resume", action="store_true", help="keep the parts that have results")
    parser.add_argument(
        "--device", default=default_device, help=f"where to measure; default: {default_device}"
    )
    add_results(parser)
    return parser


def parse_options(
    parser: argparse.ArgumentParser,
    parts: Collection[str],
    arguments: Collection[str] | None = None,
) -> argparse.Namespace:
    """The options, with all parts if none is named; exits with an error if a part is unknown."""
    options = parser.parse_args(None if arguments is None else list(arguments))
    unknown = set(options.parts) - set(parts)
    if unknown:
        parser.error(f"no part {sorted(unknown)[0]!r}; choose from {', '.join(parts)}")
    options.parts = options.parts or list(parts)
    return options


def parts_to_measure(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each part to measure and its file, leaving out the parts that are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        path = folder / f"{name}.json"
        if path.exists() and options.resume:
            print(f"{name}: kept", flush=True)
        else:
            print(f"{name}: measuring", flush=True)
            yield name, path
