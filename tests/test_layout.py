"""The project's own promises: import direction, one list of dependencies, no stray hosts."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from tests import house

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("kfac_backend", "marglik", "experiments")
# Distribution -> the module that it is imported by, where the names differ.
MODULES = {
    "laplace-torch": "laplace",
    "scikit-learn": "sklearn",
    "docstring-parser": "docstring_parser",
    "pillow": "PIL",
    "pyyaml": "yaml",
}
# Bounded for laplace-torch's sake; with which pandas reads Parquet.
NOT_IMPORTED = {"curvlinops-for-pytorch", "pyarrow"}


@cache
def imports(package, of_types=True):
    """(file, module) of every import of a package, at any depth, or of those at run time."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and not of_types]
        names = [block for block in blocks if getattr(block.test, "id", "") == "TYPE_CHECKING"]
        left_out = {id(node) for block in names for node in ast.walk(block)}
        for node in ast.walk(tree):
            if id(node) in left_out:
                continue
            if isinstance(node, ast.Import):
                found += [(path, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                found += [(path, f"{node.module}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.append((path, node.module))
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("kfac_backend", ("marglik", "experiments")), ("marglik", ("experiments",))],
)
def test_imports_point_one_way(package, forbidden):
    found = imports(package)
    assert len(found) > 10
    backwards = [(str(p), m) for p, m in found if m.split(".")[0] in forbidden]
    assert not backwards


def rooms(package):
    """Room -> the rooms of the package that it imports from; a module at the top is a room."""
    there = {path.stem for path in (ROOT / package).glob("*")}
    graph = {}
    # What a package lends on first use is no import.
    for path, module in imports(package, of_types=package != "marglik"):
        own, *below = path.relative_to(ROOT / package).with_suffix("").parts
        names = module.split(".")
        if names[0] == package and there.intersection(names[1:2]) and (own != "__init__" or below):
            graph.setdefault(own, set()).add(names[1])
    return {room: others - {room} for room, others in graph.items()}


def test_the_library_never_imports_the_application():
    """But for the command, and for names that `marglik` and `marglik.data` lend on first use."""
    library = ROOT / "marglik"
    application, command = library / "application", library / "__main__.py"
    lend = {library / "__init__.py", library / "data" / "__init__.py"}
    for of_types, expected in ((True, {command, *lend}), (False, {command})):
        found = {
            path
            for path, module in imports("marglik", of_types)
            if module.startswith("marglik.application.")
        }
        of_application = {path for path in found if path.is_relative_to(application)}
        assert len(of_application) > 10
        assert found - of_application == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_in_one_direction(package):
    graph = rooms(package)
    assert len(graph) > 5
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the rooms


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_modules_import_each_other(package):
    """Also where an import stands inside a function, or is for types alone."""
    graph = {}
    for path, imported in imports(package):
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        folder = ROOT.joinpath(*imported.split("."))
        is_module = folder.is_dir() or folder.with_suffix(".py").exists()
        module = imported if is_module else imported.rpartition(".")[0]
        if module.split(".")[0] == package and module != own:
            graph.setdefault(own, set()).add(module)
    assert len(graph) > 10
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_is_crowded(package):
    modules = Counter(path.parent for path in (ROOT / package).rglob("*.py"))
    assert len(modules) > 5
    assert {str(room): count for room, count in modules.items() if count > 14} == {}


def test_one_file_imports_laplace():
    """It keeps laplace-torch's dependencies quiet, which complain when they are imported first."""
    found = [*imports("kfac_backend"), *imports("marglik")]
    files = {p.relative_to(ROOT) for p, m in found if m.split(".")[0] == "laplace"}
    assert files == {Path("kfac_backend/laplace_torch/kron.py")}


def distributions(requirements):
    """The names of what is required, also by the extras of this project among it."""
    found = set()
    for requirement in requirements:
        name = re.split(r"[\[<>=! ]", requirement)[0]
        if name == PYPROJECT["project"]["name"]:
            extras = re.findall(r"\w+", requirement.partition("[")[2])
            of_extras = PYPROJECT["project"]["optional-dependencies"]
            found |= distributions(r for extra in extras for r in of_extras[extra])
        else:
            found.add(name)
    return found


def test_dependencies_are_those_that_are_imported():
    declared = distributions([*PYPROJECT["project"]["dependencies"], "marglik[all]"])
    used = {m.split(".")[0] for package in PACKAGES for _, m in imports(package)}
    third_party = used - set(sys.stdlib_module_names) - set(PACKAGES)
    benchmarks = "asdl singd pytorch_optimizer ivon cleanlab dattri kronfluence trak ogb"
    adapters = "botorch gpytorch linear_operator posteriors tensordict"
    extras = "accelerate transformers matplotlib peft"
    optional = set(f"{benchmarks} {adapters} {extras}".split())
    peers = {"curvlinops"}  # declared by another name, and imported by an experiment only
    by_module = {MODULES.get(name, name): name for name in declared}
    assert third_party - set(by_module) - optional - peers == set()
    assert {by_module[m] for m in by_module if m not in third_party} == NOT_IMPORTED


def test_conda_environment_installs_python_pip_and_what_the_tests_need():
    """By an extra of the project, so that no dependency is listed twice."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PYPROJECT["project"]["name"]
    assert environment["channels"][0] == "conda-forge"
    python, pip, through_pip = environment["dependencies"]
    assert python == f"python{PYPROJECT['project']['requires-python']}"
    assert pip == "pip"
    assert through_pip == {"pip": ["-e .[dev]"]}
    plugins = {"pytest", "hypothesis", "beartype"}  # of the options in pyproject.toml, too
    assert distributions(["marglik[all]"]) | plugins <= distributions(["marglik[dev]"])


def test_the_backend_imports_few_packages():
    """What runs without the others is tested in `test_light_core`."""
    own = {"torch", "numpy", "safetensors", "jaxtyping", "tqdm"}
    ours = [m for p, m in imports("kfac_backend") if p.parent.name != "laplace_torch"]
    found = {module.split(".")[0] for module in ours}
    # scipy is of an extra: coverages of counts and of Student's t alone import it.
    assert found - set(sys.stdlib_module_names) - {"kfac_backend", "scipy"} <= own


@pytest.mark.parametrize("package", ["kfac_backend", "marglik"])
def test_a_public_name_means_one_thing(package):
    """Not also a submodule, which would take its place once it has been imported."""
    exported = import_module(package).__all__
    folder = ROOT / package
    modules = {path.stem for path in folder.glob("*.py")} | {p.name for p in folder.glob("*/")}
    assert exported and not set(exported) & modules


def test_commands_are_listed_and_pages_name_no_others():
    """`make help` lists all targets, and experiments/README.md all studies and their pages."""
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    listed = {line.split()[0] for line in shown.splitlines()}
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert listed == set(targets.split())
    tracked = [ROOT / folder for folder in (".", "docs", "experiments", "kfac_backend")]
    of_studies = sorted(ROOT.glob("experiments/*/README.md"))
    tracked += [path.parent for path in of_studies]
    pages = "\n".join(page.read_text() for folder in tracked for page in folder.glob("*.md"))
    assert set(re.findall(r"`make ([a-z\d-]+)", pages)) <= listed
    entry = (ROOT / "experiments/README.md").read_text()
    assert of_studies and all(f"]({path.parent.name}/README.md)" in entry for path in of_studies)
    table = re.findall(r"^\| `(\w+)\.(\w+)", entry, re.M)
    studies = {
        (path.parent.name, path.stem)
        for path in ROOT.glob("experiments/*/*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert studies and studies <= set(table)


def test_a_block_is_reached_through_few_functions():
    """Counted in a process of its own, as ``make house`` counts them."""
    count = "from tests import house as h; h.factors(); print(*(h.passed(w)[1] for w in ({})))"
    code = count.format("h.factors, h.factors_again()")
    proving, proved = map(int, house.python("-c", code).split())
    assert 100 < proving <= 150 and 50 < proved <= 100


def test_few_functions_of_the_backend_are_long():
    assert len(house.long_functions("kfac_backend")) <= 4
    assert len(house.long_functions("kfac_backend", 30)) > 20  # the control


def test_classes_of_a_training_have_few_members():
    """The control is the posterior, which has the names of laplace-torch, too."""
    assert max(house.members("marglik/training").values()) <= 25
    assert house.members("marglik/posterior")["Posterior"] > 25
