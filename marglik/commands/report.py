"""`marglik report`: one page about one run, or several side by side."""

from typing import Any

from jsonargparse import ArgumentParser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "folders", nargs="+", type=str, help="Folders of marglik train, fit or evaluate."
    )
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="The page's file; report.html in the first folder if null.",
    )


def run(parser: ArgumentParser, options: Any) -> None:
    """Write the page, and print where it is."""
    from marglik.report import write_report  # here, since plots take long to import

    print(f"Written to {write_report(options.folders, options.output)}")
