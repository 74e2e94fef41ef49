"""Peak memory, and what is said when it is exhausted."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from experiments.timing import peak_memory
from kfac_backend.curvature import CurvaturePass
from tests.kfac_backend.block_checks import MODES
from tests.kfac_backend.networks import images, wide_resnet


def test_peak_memory_is_that_of_a_training_step_and_the_factors():
    model, (x, y) = wide_resnet(2, torch.float32), images(8, torch.float32, size=32)
    cpu = torch.device("cpu")

    def step():
        nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad()

    step()
    of_step = peak_memory(step, cpu)
    for kfac_approx in MODES:
        curvature = CurvaturePass(model, "classification", kfac_approx=kfac_approx)
        curvature.add(x, y)
        blocks = curvature.factors().blocks.values()
        size = sum(F.nbytes for b in blocks for F in (b.B, b.A) if F is not None)

        def work(curvature=curvature):
            curvature.add(x, y)
            curvature.factors()

        assert peak_memory(work, cpu) <= 1.3 * of_step + size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS")
def test_out_of_memory_is_torchs_own_error_with_the_way_out():
    code = """
import re, resource, torch, traceback
from torch import nn
from kfac_backend import kronecker_factors

model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32768, 2))
x, y = torch.randn(512, 3, 32, 32), torch.zeros(512, dtype=torch.long)
kronecker_factors(model[:1].append(nn.Flatten()), [(x[:2], torch.zeros(2, dtype=torch.long))],
                  "classification", fisher="mc", kfac_approx="reduce")
model[-1].requires_grad_(False)
used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 250 * 2**20, resource.RLIM_INFINITY))
try:
    kronecker_factors(model, [(x, y)], "classification")
except RuntimeError as error:
    print("".join(traceback.format_exception_only(error)))
    data = zip(x.split(16), y.split(16))
    print("seen", kronecker_factors(model, data, "classification").num_data)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search("(?s)memory.*a batch of 512 examples. Use smaller batches", done.stdout), (
        done.stderr
    )
    assert "seen 512" in done.stdout, done.stdout + done.stderr
