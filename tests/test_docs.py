"""The documentation is whole: every public name, no broken link, nothing that is fetched."""

import ast
import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OPTIONAL = ("marglik.adapters.", "marglik.callbacks.transformers")


def documented():
    """The names that the pages of the interface show."""
    pages = "\n".join(path.read_text() for path in sorted((DOCS / "api").glob("*.md")))
    return set(re.findall(r"^<!-- api: (\S+) -->$", pages, re.M))


MODULES = sorted({name.rpartition(".")[0] for name in documented()})


def undocumented(value):
    """The methods and properties of a class's own that have no docstring."""
    for name, own in vars(value).items():
        function = own.fget if isinstance(own, property) else getattr(own, "__func__", own)
        if inspect.isfunction(function) and function.__module__ == value.__module__:
            if not name.startswith("_") and not function.__doc__:
                yield name


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of other libraries, when imported
@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_a_docstring_and_a_page(module):
    """All that a module exports; and all that the pages show exists."""
    try:
        found = import_module(module)
    except ImportError:  # of an extra, which is not installed
        assert module.startswith(OPTIONAL), module
        return
    pages = documented()
    shown = {name for name in pages if name.rpartition(".")[0] == module}
    assert [name for name in shown if not hasattr(found, name.rpartition(".")[2])] == []
    for name in set(found.__all__):
        value = getattr(found, name)
        if callable(value):
            assert inspect.getdoc(value) and value.__doc__, f"{module}.{name} has no docstring"
        if inspect.isclass(value):
            assert list(undocumented(value)) == [], f"{module}.{name}"
        places = {f"{module}.{name}", f"{module.split('.')[0]}.{name}"}
        assert places & pages, f"{module}.{name} has no page in docs/api"


def test_the_packages_are_public():
    """So that a page that loses its names is noticed."""
    assert {"kfac_backend", "kfac_backend.layers", "marglik", "marglik.data"} <= set(MODULES)


@pytest.fixture(scope="module")
def generator():
    """The module behind `make pages`."""
    if Path(sys.prefix).name == ".venv-lowest":
        pytest.skip("written by the newest versions of griffe, jsonargparse and jupytext")
    spec = spec_from_file_location("generated_pages", DOCS / "hooks/generated_pages.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(generator):
    """`make pages` writes them; later Pythons print options and types in another form.

    A process of its own makes them, since the help lists all subclasses that are imported.
    """
    command = [sys.executable, generator.__file__, "--list"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    outdated = set(result.stdout.split())
    if sys.version_info[:2] != (3, 11):
        outdated -= {"docs/command-line.md"}
    assert not outdated, "run `make pages`"
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert {path.stem for path in (ROOT / "examples/notebooks").glob("*")} == examples


def test_the_reference_shows_signatures_arguments_and_members(generator):
    """And is out of date if any of them changes."""
    text = generator.documented("marglik.calibrate")
    found = re.search(r"```python\n(def calibrate\(.*?)\n```", text, re.S)[1]
    (function,) = ast.parse(f"{found}: ...").body
    given = inspect.signature(import_module("marglik").calibrate).parameters
    arguments = function.args.args + function.args.kwonlyargs
    assert [argument.arg for argument in arguments] == list(given)
    assert all(f"- `{name}`" in text for name in given)
    assert "#### Posterior.fit\n" in generator.documented("marglik.Posterior")
    page = DOCS / "api/marglik.md"
    changed = page.read_text().replace("def calibrate(", "def calibrated(")
    assert generator.PART.sub(generator._part, changed) == page.read_text() != changed


def test_the_command_line_page_has_the_options_of_each_command(generator):
    from marglik.application.cli import COMMANDS

    page = (DOCS / "command-line.md").read_text()
    assert re.findall(r"^<!-- help: (\w+) -->$", page, re.M) == list(COMMANDS)
    for option in ("--prior.weight_decay", "--resume, --no_resume", "--output OUTPUT"):
        assert option in page


@pytest.mark.slow
def test_a_notebook_runs(generator, tmp_path):
    """With a kernel of its own; `tests/examples` runs all notebooks."""
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(ROOT / "examples/notebooks/counts.ipynb", as_version=4)
    nbformat.validate(content)
    kernel = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(content, timeout=600, kernel_name="python3", resources=kernel).execute()
    printed = json.dumps([cell.get("outputs") for cell in content.cells])
    assert "negative_binomial(r=" in printed and "image/png" in printed


def test_each_page_is_in_the_navigation():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w./-]+\.md", str(config["nav"])))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("experiments/*/README.md")}
    assert pages <= listed
    for page in listed - pages:
        assert (ROOT / page).exists() or page == "examples/index.md", page


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, with the examples' code alone."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True,
        env={"MARGLIK_DOCS_EXAMPLES": "skip", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_is_built_and_whole(site):
    """What mkdocs does not look at as it builds; links and anchors it checks itself."""
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {"index.html", "choosing.html", "experiments/index.html", "examples/digits.html"} <= set(
        pages
    )
    for page, text in pages.items():
        for image in re.findall(r'<img[^>]* src="([^"]+)"', text):
            assert (site / page).parent.joinpath(image).exists(), (page, image)
    for command in ("train", "fit", "evaluate", "report"):
        assert f"usage: marglik {command} " in pages["command-line.html"]
    assert 'id="the-curvature"' in pages["mathematics.html"]
    assert 'id="posteriorfit"' in pages["api/marglik.html"]


@pytest.mark.slow
def test_the_site_fetches_nothing(site):
    loads = r"<(?:script|img|iframe|source)[^>]* src=\"([^\"]+)\"|<link[^>]* href=\"([^\"]+)\""
    for path in site.rglob("*.html"):
        for found in re.findall(loads, path.read_text()):
            assert not re.match(r"(https?:)?//", "".join(found)), (path, found)
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", path.read_text()), path
