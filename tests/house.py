"""What someone has to read: the size of the house, and how far it is from a call to its result.

``make house`` prints it. Lines are as ruff formats them. Files and functions are those of ours that
run in between, counted while they run.
"""

import ast
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[1]
PACKAGES = ("kfac_backend", "marglik")


def texts(folder: str) -> list[str]:
    """Each module of a folder."""
    return [path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))]


def lines(folder: str) -> int:
    return sum(len(text.splitlines()) for text in texts(folder))


def share(count: Callable[[str], int]) -> float:
    """The percentage of both packages' lines that are counted."""
    modules = [text for package in PACKAGES for text in texts(package)]
    return 100 * sum(map(count, modules)) / sum(len(text.splitlines()) for text in modules)


def comments(text: str) -> int:
    return sum(line.lstrip().startswith("#") for line in text.splitlines())


def checks(text: str) -> int:
    """Lines that check, raise or catch: what would go if all inputs were right."""

    def numbers(node: ast.AST) -> Iterator[int]:
        match node:
            case ast.FunctionDef(name=name) if name.lstrip("_").startswith("check"):
                yield from span(node)
            case ast.Raise() | ast.Assert() | ast.ExceptHandler():
                yield from span(node)
            case ast.If(test=test, body=[ast.Raise()]):
                yield node.lineno
                yield from span(test)
            case ast.Try(handlers=[_, *_]):
                yield node.lineno
            case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
                if name.lstrip("_").startswith("check"):
                    yield from span(node)

    def span(node: ast.AST) -> range:
        return range(node.lineno, node.end_lineno + 1)

    return len({number for node in ast.walk(ast.parse(text)) for number in numbers(node)})


def long_functions(folder: str, most: int = 60) -> list[str]:
    """The functions of more lines than these, docstrings included."""
    return [
        node.name
        for text in texts(folder)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= most
    ]


def members(folder: str) -> dict[str, int]:
    """How many public members each class has: fields, methods, and attributes that it sets."""

    def names(node: ast.ClassDef) -> Iterator[str]:
        for part in node.body:
            match part:
                case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    yield name
        for part in ast.walk(node):
            match part:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    yield name

    return {
        node.name: len({name for name in names(node) if not name.startswith("_")})
        for text in texts(folder)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    }


def passed(run: Callable[[], object]) -> tuple[int, int, int]:
    """How many files and functions of ours a call passes, and how often any of these is called."""
    calls = Counter[tuple[Path, str]]()

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        # Neither the body of a module, which runs when it is imported, nor comprehensions.
        if event == "call" and not code.co_name.startswith("<") and path.is_relative_to(ROOT):
            if path.relative_to(ROOT).parts[0] in PACKAGES:
                calls[path, code.co_qualname] += 1

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len({path for path, _ in calls}), len(calls), calls.total()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


BATCH = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])


def factors() -> None:
    """The factors of a small network, in eval mode."""
    from kfac_backend import kronecker_factors

    kronecker_factors(network(), [BATCH], "classification")


def factors_again() -> Callable[[], object]:
    """The same by a pass that has proved the network before."""
    from kfac_backend.curvature import CurvaturePass

    curvature = CurvaturePass(network(), "classification")
    curvature.factors_of([BATCH])
    return lambda: curvature.factors_of([BATCH], repeat_proof=False)


def kfac_step() -> Callable[[], object]:
    """A training step of K-FAC with new factors, after the first."""
    from kfac_backend.optimizer import KFAC

    model = network()
    optimiser = KFAC(model, "classification", lr=0.1, factor_every=1, update_every=1)

    def step() -> None:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
        optimiser.step()

    step()
    return step


def learning() -> None:
    """Three epochs of ``marglik_training`` of a small network."""
    from marglik import marglik_training

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(32, 3), torch.arange(32) % 2)
    marglik_training(model, DataLoader(data, 8), "classification", n_epochs=3)


def python(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def modules_loaded() -> int:
    listed = python("-c", "import kfac_backend, sys; print(*sys.modules)")
    return sum(name.split(".")[0] == "kfac_backend" for name in listed.split())


def train_options() -> int:
    """Options of ``marglik train``, without those of the model's and the data's class."""
    listed = python("-m", "marglik", "train", "--help", "all")
    words = {line.split()[0].rstrip(",") for line in listed.splitlines() if line.split()}
    options = {w.split("[")[0] for w in words if w.startswith("--")}
    return sum(not option.startswith(("--model", "--data", "--help")) for option in options)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # three epochs are too few for decays to settle
    factors()  # a first time, for what is made once: classes, caches
    learning()
    for folder in ("experiments", "tests", *reversed(PACKAGES)):
        print(f"{lines(folder):7,}  lines of Python in {folder}")
    print(f"{lines('kfac_backend/engine'):7,}  of them in its engine")
    print(f"{len(long_functions('kfac_backend')):7}  functions there of more than 60 lines")
    most = max(members("marglik/training").items(), key=lambda item: item[1])
    print(f"{most[1]:7}  public members of {most[0]}, the most of a class in marglik/training")
    print(f"{train_options():7}  options of `marglik train` before model and data")
    for what, run in (
        ("from `kronecker_factors` to a block", factors),
        ("to a block, when proved before", factors_again()),
        ("in a step of K-FAC with new factors", kfac_step()),
        ("for three epochs of `marglik_training`", learning),
    ):
        print("{:7} files, {} functions, {:,} calls {}".format(*passed(run), what))
    print(f"{share(checks):7.1f} % of lines check, raise or catch")
    print(f"{share(comments):7.1f} % of lines are a comment")
    print(f"{modules_loaded():7}  modules of ours that `import kfac_backend` loads")
