"""`marglik report`: one page about one run, or several side by side."""

from typing import Any

from jsonargparse import ArgumentParser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
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


def run(parser: ArgumentParser, options: Any) -> None:
    """Write the page, and print where it is."""
    from marglik.report import write_report  # here, since plots take long to import

    print(f"Written to {write_report(options.folders, options.output)}")
