"""A benchmark in parts, each a JSON file: its options, and which parts are still to be measured."""

import argparse
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["parse_options", "parts_to_measure", "parts_parser"]


def parts_parser(
    description: str, parts: Collection[str], default_device: str
) -> argparse.ArgumentParser:
    """A parser of parts, --resume and --device."""
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--resume", action="store_true", help="keep the parts that are there")
    parser.add_argument("--device", default=default_device, help=f"default: {default_device}")
    return parser


def parse_options(parser: argparse.ArgumentParser, parts: Collection[str]) -> argparse.Namespace:
    """The options, with all parts if none is named; leaves the process if one is unknown."""
    options = parser.parse_args()
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
            print(f"{name}: kept")
        else:
            yield name, path
