"""The commands' options, as `marglik COMMAND --help all` prints them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.pages import Page

from marglik.cli import COMMANDS

ROOT = Path(__file__).parents[2]
MARK = "<!-- help -->"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page of the command line with the help of each command."""
    if MARK not in markdown:
        return markdown
    sections = (f"## {name}\n\n```text\n{printed_help(name)}```\n" for name in COMMANDS)
    return markdown.replace(MARK, "\n".join(sections))


def printed_help(command: str) -> str:
    """What ``--help`` prints at a width that pages have room for."""
    width = {**os.environ, "COLUMNS": "96", "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-m", "marglik.cli", command, "--help", "all"]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, env=width)
    return done.stdout
