"""What is released: metadata, and a wheel that works by itself, on the Pythons that CI runs."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNTYPED_BASES = (
    "marglik.adapters.",
    "marglik.callbacks.transformers.",
    "marglik.estimators.",
    "marglik.MarglikClassifier",
    "marglik.MarglikRegressor",
)
"""Classes of extras that are not there, and of scikit-learn, which has no types."""


def test_the_version_stands_in_one_place():
    """The command reads it, and the package that is installed has it."""
    assert version("marglik") == PROJECT["version"]
    for file in ("marglik/__init__.py", "kfac_backend/__init__.py", "CITATION.cff", "mkdocs.yml"):
        assert PROJECT["version"] not in (ROOT / file).read_text(), file


def whole(requirements):
    """The requirements, with those of the project's extras in place of the extras."""
    for requirement in requirements:
        if requirement.startswith("marglik["):
            for name in re.findall(r"\w+", requirement)[1:]:
                yield from whole(PROJECT["optional-dependencies"][name])
        else:
            yield requirement


def test_ci_runs_the_oldest_and_the_newest_python():
    """Of those that the classifiers name, from the one that is required on."""
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    named = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.M)
    assert job["strategy"]["matrix"]["python"] == [named[0], named[-1]]
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert {"run": ".ci/run"} in job["steps"]


def test_a_tag_is_published_if_it_is_the_version_of_the_changelog(tmp_path):
    """The check in the workflow, run on this version, on another tag, and without a section."""
    (job,) = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[1] == ".ci/run" and job["permissions"]["id-token"] == "write"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def succeeds(tag, changelog):
        (tmp_path / "CHANGELOG.md").write_text(changelog)
        environment = os.environ | {"GITHUB_REF_NAME": tag}
        return subprocess.run(
            ["bash", "-ec", commands[0].replace("python -", f"{sys.executable} -")],
            cwd=tmp_path, env=environment, capture_output=True,
        ).returncode == 0  # fmt: skip

    section = f"## [{PROJECT['version']}] - "
    assert succeeds(f"v{PROJECT['version']}", changelog)
    assert not succeeds("v999.0", changelog)
    assert not succeeds(f"v{PROJECT['version']}", changelog.replace(section, "## "))


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*_*.yml")))
def test_forms_of_issues_have_what_a_form_needs(form):
    content = yaml.safe_load(form.read_text())
    assert content["name"] and content["description"]
    assert {field["type"] for field in content["body"]} == {"textarea"}
    assert all(field["id"] and field["attributes"]["label"] for field in content["body"])


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_pages_say_the_lowest_versions(page):
    bounds = {r.name: str(r.specifier) for r in map(Requirement, PROJECT["dependencies"])}
    python, torch = PROJECT["requires-python"], bounds["torch"]
    expected = (python.replace(">=", ""), torch.replace(">=", ""))
    sentence = r"Python (?:>= )?([\d.]+\d)(?: or newer)?, (?:and )?torch (?:>= )?([\d.]+\d)"
    assert re.findall(sentence, (ROOT / page).read_text()) == [expected]


@pytest.mark.skipif(Path(sys.prefix).name != ".venv-lowest", reason="of make test-lowest")
def test_the_lowest_environment_has_the_lowest_versions():
    """A bound that another package's requirement lies above would never be tested."""
    differ = {}
    for line in whole([*PROJECT["dependencies"], "marglik[dev,adapters]"]):
        requirement = Requirement(line)
        (lowest,) = (b.version for b in requirement.specifier if b.operator == ">=")
        found = version(requirement.name)
        if not Requirement(f"{requirement.name}=={lowest}").specifier.contains(found):
            differ[line] = found
    assert differ == {}


@pytest.fixture(scope="module")
def uv():
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if found is None:
        pytest.skip("uv is not installed: pip install uv")
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what git tracks, in a folder that is named as the package is."""
    copy = tmp_path_factory.mktemp("clones") / "marglik"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "experiments/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(uv, clone, tmp_path_factory):
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([uv, "build", "-q", "--out-dir", str(folder), str(clone)], check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_packages(built, clone):
    wheel, sdist = built
    assert wheel.name == f"marglik-{PROJECT['version']}-py3-none-any.whl"
    inside = set(zipfile.ZipFile(wheel).namelist())
    of_packages = {
        path.relative_to(clone).as_posix()
        for package in ("kfac_backend", "marglik")
        for path in (clone / package).rglob("*")
        if path.is_file() and path.suffix != ".md"
    }
    assert {"marglik/py.typed", "marglik/application/presets/digits.yaml"} <= of_packages
    metadata = f"marglik-{PROJECT['version']}.dist-info/"
    assert {name for name in inside if not name.startswith(metadata)} == of_packages
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert of_packages | {"README.md", "LICENSE", "pyproject.toml"} <= names


@pytest.mark.slow
def test_beside_a_clone_the_installed_package_is_found(uv, clone, tmp_path):
    """And not the clone's folder, which is called marglik, too, and would be an empty package."""
    folder = tmp_path / "environment"
    python = str(folder / "bin/python")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(folder)], check=True)
    install = [uv, "pip", "install", "-q", "--no-deps", "--python", python, "-e", str(clone)]
    subprocess.run(install, check=True)
    code = "from importlib.util import find_spec; print(find_spec('marglik').origin)"
    found = subprocess.run(
        [python, "-c", code], cwd=clone.parent, check=True, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": ""},
    )  # fmt: skip
    assert found.stdout.strip() == str(clone / "marglik" / "__init__.py")


@pytest.mark.slow
def test_the_index_can_show_the_readme(uv, built):
    """Without links and pictures that only a clone has."""
    check = [uv, "tool", "run", "twine", "check", "--strict", *map(str, built)]
    subprocess.run(check, check=True, capture_output=True)
    with zipfile.ZipFile(built[0]) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        shown = wheel.read(metadata).decode()
    assert "## Two commands" in shown and set(re.findall(r"\]\((.{4})", shown)) == {"http"}


@pytest.fixture(scope="module")
def environment(uv, built, tmp_path_factory):
    """An environment with the wheel, what it depends on, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel") / "environment"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(folder)], check=True)
    install = [uv, "pip", "install", "-q", "--python", str(folder / "bin/python")]
    subprocess.run([*install, f"{built[0]}[all]"], check=True)
    yield folder
    shutil.rmtree(folder)  # gigabytes, which pytest would keep


def run(environment, *command):
    """What a command of the environment prints; the checkout is not on its path."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True,
        env={**os.environ, "PATH": f"{environment / 'bin'}:/usr/bin:/bin", "PYTHONPATH": "",
             "VIRTUAL_ENV": str(environment)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(environment):
    """Its first command, and the backend without laplace-torch, from an empty folder."""
    code = (
        "import sys, kfac_backend; print(kfac_backend.__file__); "
        "print(sorted({'laplace', 'curvlinops', 'marglik'} & set(sys.modules)))"
    )
    where, loaded = run(environment, "python", "-c", code).splitlines()
    assert Path(where).is_relative_to(environment) and loaded == "[]"
    assert run(environment, "marglik", "--version").split() == ["marglik", PROJECT["version"]]
    arguments = ("--config", "digits", "--epochs", "2", "--no_progress")
    shown = run(environment, "marglik", "train", *arguments)
    assert "log marginal likelihood per example" in shown
    assert Path("runs/digits/report.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("package", ["kfac_backend", "marglik"])
def test_the_types_of_all_public_names_are_known(package, environment):
    """But for those whose base classes have none.

    A type may be inferred: attributes that a constructor's call says all of have no annotation
    beside it, which basedpyright counts as "ambiguous".
    """
    checker = Path(sys.executable).with_name("basedpyright")
    arguments = ["--verifytypes", package, "--ignoreexternal", "--outputjson"]
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(checker), *arguments], capture_output=True, text=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": "", "VIRTUAL_ENV": str(environment)},
    )  # fmt: skip
    found = json.loads(done.stdout)["typeCompleteness"]
    public = [symbol for symbol in found["symbols"] if symbol["isExported"]]
    assert len(public) > 1000
    unknown = [s["name"] for s in public if not (s["isTypeKnown"] or s["isTypeAmbiguous"])]
    assert [name for name in unknown if not name.startswith(UNTYPED_BASES)] == []
