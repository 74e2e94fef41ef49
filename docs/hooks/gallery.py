"""A page for each example: its text, its code, what it prints, and its figures.

Examples are scripts in the percent format (``# %%`` begins code, ``# %% [markdown]`` text). Each
runs in a process of its own (`run_example`), and again only if it, or the packages, have changed:
what it printed is kept in ``build/gallery``. ``MARGLIK_DOCS_EXAMPLES=skip`` shows the code alone.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("run_example.py")
KEPT = ROOT / "build/gallery"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SKIPPED = os.environ.get("MARGLIK_DOCS_EXAMPLES") == "skip"
NOT_RUN = "!!! note\n    This build shows the code alone; `make docs` runs it.\n\n"

_logger = logging.getLogger("mkdocs.hooks.gallery")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the examples below the gallery's page in the navigation."""
    for entry in config.nav or []:
        if entry.get("Gallery") == "examples/index.md":
            pages = (f"examples/{p.stem}.md" for p in EXAMPLES)
            entry["Gallery"] = [{"All examples": "examples/index.md"}, *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each example, its figures, and the page that lists them."""
    index = ["# Gallery\n\nEach example is a script in `examples/` that runs by itself.\n"]
    index.append("The folder `examples/notebooks/` has each example as a Jupyter notebook.\n")
    for script in EXAMPLES:
        folder = None if SKIPPED else outcome(script)
        cells = json.loads((folder / "cells.json").read_text()) if folder else cells_of(script)
        text = "".join(as_markdown(cell, script.stem) for cell in cells)
        title, _, rest = text.partition("\n")
        text = f"{title}\n\n{NOT_RUN if SKIPPED else ''}{rest}"
        files.append(File.generated(config, f"examples/{script.stem}.md", content=text))
        for figure in sorted(folder.glob("*.png")) if folder else ():
            where = f"examples/{script.stem}/{figure.name}"
            files.append(File.generated(config, where, abs_src_path=str(figure)))
        paragraph = " ".join(rest.strip().split("\n\n")[0].split())
        index.append(f"## [{title.removeprefix('# ')}]({script.stem}.md)\n\n{paragraph}\n")
    files.append(File.generated(config, "examples/index.md", content="\n".join(index)))
    return files


def outcome(script: Path) -> Path:
    """The folder with what an example printed and drew; made where it is not there yet."""
    folder = KEPT / f"{script.stem}_{fingerprint(script)}"
    if not (folder / "cells.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, str(RUNNER), str(script), str(folder)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "agg"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise PluginError(f"{script.name} failed:\n{done.stderr[-4000:]}")
        _logger.info(f"{script.name} ran for {time.monotonic() - start:.0f} s")
    return folder


def fingerprint(script: Path) -> str:
    """Changes with the example, with the packages' code, and with torch."""
    sources = [script, RUNNER]
    for package in ("kfac_backend", "marglik"):
        sources += sorted((ROOT / package).rglob("*.py"))
    found = hashlib.sha256(f"{version('torch')} {os.environ.get('MARGLIK_DATA')}".encode())
    for path in sources:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def cells_of(script: Path) -> list[dict]:
    """The example's cells without outputs."""
    command = [sys.executable, str(RUNNER), str(script)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def as_markdown(cell: dict, name: str) -> str:
    """A cell's text; or its code, what it printed, and its figures."""
    if cell["kind"] == "markdown":
        return cell["source"] + "\n\n"
    text = f"```python\n{cell['source']}\n```\n\n"
    if cell.get("output"):
        text += f'<div class="output" markdown>\n\n```text\n{cell["output"]}\n```\n\n</div>\n\n'
    return text + "".join(f"![]({name}/{figure})\n\n" for figure in cell.get("figures", ()))
