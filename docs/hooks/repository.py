"""Pages that lie elsewhere in the repository, and links that hold there and in the site.

A page links to files as they lie in the repository, so that links work where its Markdown is read.
Here they become links of the site; a link to a file that the site lacks, such as source code,
keeps its text alone.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
STUDIES = sorted(ROOT.glob("experiments/*/README.md"))
PAGES = (
    *("kfac_backend/README.md", "experiments/README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(path.relative_to(ROOT).as_posix() for path in STUDIES),
)
RESULTS = "experiments/results"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's own pages, and the tables and figures of the results."""
    tables = ROOT.glob(f"{RESULTS}/**/table.md")
    figures = ROOT.glob(f"{RESULTS}/**/*.png")
    for path in [*(ROOT / page for page in PAGES), *sorted(tables), *sorted(figures)]:
        where = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, where, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """The page with links that hold in the site; code is left alone."""
    here = page.file.src_uri
    of_docs = not here.startswith((*PAGES, RESULTS, "examples/"))
    in_repository = f"docs/{here}" if of_docs else here

    def resolved(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or ":" in path:
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), path))
        if not (ROOT / there).exists():
            return found[0]  # for mkdocs to complain of
        there = {"README.md": "index.md", "examples": "examples/index.md"}.get(there, there)
        there = re.sub(r"^examples/(\w+)\.py$", r"examples/\1.md", there).removeprefix("docs/")
        if files.get_file_from_path(there) is None:
            return text
        link = posixpath.relpath(there, posixpath.dirname(here) or ".")
        return f"{image}[{text}]({link}{'#' if anchor else ''}{anchor})"

    pieces = FENCE.split(markdown)
    return "".join(p if p.startswith("```") else LINK.sub(resolved, p) for p in pieces)
