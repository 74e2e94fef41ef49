"""Options that the experiments share: where results lie, and which parts of a benchmark to measure.

Results of one's own and those that come with the project never mix: without ``--results`` all
is read from and written to ``results/`` in the working directory, which git ignores.
"""

import argparse
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["SHIPPED", "add_results", "parse_options", "parts_parser", "parts_to_measure"]

OWN = Path("results")
SHIPPED = Path(__file__).parent / "results"
"""What the READMEs quote, under version control."""


def add_results(parser: argparse.ArgumentParser) -> None:
    """The option --results."""
    parser.add_argument(
        "--results", type=Path, default=OWN, metavar="FOLDER",
        help="where results are read and written; default: results/, your own. Those that the "
        "READMEs quote are in experiments/results/; name it to look at them (--list, --report), "
        "or, as a maintainer, to replace them",
    )  # fmt: skip


def parts_parser(
    description: str, parts: Collection[str], default_device: str
) -> argparse.ArgumentParser:
    """A parser of parts, --resume, --device and --results."""
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--resume", action="store_true", help="keep the parts that are there")
    parser.add_argument("--device", default=default_device, help=f"default: {default_device}")
    add_results(parser)
    return parser


def parse_options(
    parser: argparse.ArgumentParser,
    parts: Collection[str],
    arguments: Collection[str] | None = None,
) -> argparse.Namespace:
    """The options, with all parts if none is named; leaves the process if one is unknown."""
    options = parser.parse_args(None if arguments is None else list(arguments))
    unknown = set(options.parts) - set(parts)
    if unknown:
        parser.error(f"no part {sorted(unknown)[0]!r}; choose from {', '.join(parts)}")
    options.parts = options.parts or list(parts)
    return options


def parts_to_measure(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """Each part and the file that it goes to; without those that are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        path = folder / f"{name}.json"
        if path.exists() and options.resume:
            print(f"{name}: kept", flush=True)
        else:
            print(f"{name}: measuring", flush=True)
            yield name, path
