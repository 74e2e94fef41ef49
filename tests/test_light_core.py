"""What the core dependencies alone suffice for; what is said where an extra is missing."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "laplace-torch": "laplace",
    "curvlinops-for-pytorch": "curvlinops",
    "scikit-learn": "sklearn",
    "pillow": "PIL",
    "pyyaml": "yaml",
}
"""Distribution -> module, where it is not the name with underscores."""

BLOCKED = """
import sys, time

class Without:  # as if these were not installed
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *rest):
        absent = name.partition(".")[0] in {refused!r}
        return None if absent else self.finder.find_spec(name, *rest)

sys.meta_path[:] = map(Without, sys.meta_path)
import torch, numpy, safetensors.torch, tqdm.auto
"""

NEED_AN_EXTRA = {
    "MarglikClassifier", "MarglikRegressor", "write_report",
}  # fmt: skip

CORE = """
start = time.process_time()
import kfac_backend, marglik
seconds = time.process_time() - start
from torch import nn
from kfac_backend.optimizer import KFAC
for name in set(marglik.__all__) - {extras}:
    getattr(marglik, name)
assert set(marglik.__all__) <= set(dir(marglik))

x, y = torch.randn(30, 4), torch.randint(3, (30,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 10)
model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
optimizer, prior = KFAC(model, "classification", lr=0.1), marglik.PriorLearner("classification")
prior.start(model, optimizer, loader, 2)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
prior.finish()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
learner = marglik.PriorLearner("classification", epochs=1)
marglik.OnlineTraining(model, sgd, loader, learner).run()
marglik.save_posterior(learner.posterior, "saved")
again = marglik.load_posterior("saved", model)
assert marglik.laplace_predictive(again)(x).mean.shape == (30, 3)
print(f"seconds {seconds}")
"""

MISSING = {
    "marglik.MarglikClassifier": ("sklearn", "tables"),
    "marglik.calibrate(posterior, [(x, y)])": ("scipy", "statistics"),
    "marglik.maximize_evidence(posterior)": ("scipy", "statistics"),
    "kfac_backend.KfacGGN": ("laplace", "laplace"),
    "marglik.write_report(['.'])": ("yaml", "report"),
    "marglik.data.Digits().load()": ("sklearn", "statistics"),
    "marglik.data.TableFile('table.csv').load()": ("pandas", "tables"),
    "marglik.application.runs.config.RunConfig(logger='tensorboard')": ("tensorboard", "loggers"),
    "marglik.application.runs.config.RunConfig(logger='wandb')": ("wandb", "loggers"),
}  # fmt: skip

REFUSALS = """
import kfac_backend, marglik, marglik.data, marglik.application.runs.config, pathlib
x, y = torch.randn(30, 4), torch.randint(3, (30,))
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters())
posterior = marglik.Posterior(model, "classification")
posterior.fit([(x, y)])
pathlib.Path("table.csv").write_text("a,b")
for line in {lines!r}:
    try:
        eval(line)
    except ModuleNotFoundError as error:
        print("refused", error.name, error, sep="|")
    else:
        print("not refused", line)
for module in ("marglik.application.cli", "marglik.__main__"):
    try:
        __import__(module)
    except SystemExit as error:
        print("refused", module, error, sep="|")
"""


def optional():
    """The modules of the extras, and those that come with them; not the tools of development."""
    extras = PROJECT["optional-dependencies"]
    of_users = extras.keys() - {"dev", "docs", "bench", "models"}
    requirements = {requirement for name in of_users for requirement in extras[name]}
    names = {re.split(r"[\[<>=! ]", requirement)[0] for requirement in requirements}
    names |= {"matplotlib", "torchmetrics", "asdl", "plotly"}
    return {MODULES.get(name, name.replace("-", "_")) for name in names - {"marglik"}}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What a process prints that cannot import any extra: seconds, and the refusals."""
    code = BLOCKED.format(refused=sorted(optional()))
    code += CORE.replace("{extras}", repr(NEED_AN_EXTRA)) + REFUSALS.format(lines=list(MISSING))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False,
        cwd=tmp_path_factory.mktemp("core"),
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines and lines[0].startswith("seconds "), done.stderr
    return lines


def test_the_core_learns_saves_and_predicts_without_any_extra(printed):
    """Its own import takes at most 0.3 s of a processor beside torch's."""
    assert float(printed[0].split()[1]) < 0.3


def test_a_missing_extra_is_one_line_that_says_how_to_get_it(printed):
    expected = [
        f"refused|{module}|{module} is not installed: pip install 'marglik[{extra}]'."
        for module, extra in MISSING.values()
    ]
    command = "marglik: docstring_parser is not installed: pip install 'marglik[command]'."
    expected += [
        f"refused|{module}|{command}" for module in ("marglik.application.cli", "marglik.__main__")
    ]
    assert printed[1:] == expected
    assert {extra for _, extra in MISSING.values()} <= set(PROJECT["optional-dependencies"])


COMMANDS = """
from marglik.application.cli import main
options = "--config digits --model MLP --model.in_features 64 --model.hidden [4] --epochs 1"
options += " --prior.every 1 --prior.steps 1 --ood.num_images 20 --no_progress --no_baseline"
assert main(["train", *options.split(), "--output", "run"]) == 0
assert main(["evaluate", "run", "--no_progress"]) == 0
"""


def test_commands_do_without_laplace_torch(tmp_path):
    """Which is an extra of its own."""
    code = BLOCKED.format(refused=["laplace", "curvlinops"]) + COMMANDS
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
