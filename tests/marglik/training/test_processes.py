"""Several processes, each of which has a part of the data, are refused before any work."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_one_of_several_processes_is_refused(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.marglik.training.ranks_elsewhere"]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        found = json.loads((tmp_path / f"{rank} of {world}").read_text())
        assert found["predicts"]  # with a posterior that is there
        assert (found["steps"] > 0) == (world == 1)  # nothing was trained in vain
        assert len(found["said"]) == 11
        for name, said in found["said"].items():
            if world == 1:  # control
                assert said == "works", name
            else:
                assert said.startswith("This is one of 2 processes of torch.distributed"), name
                assert "destroy_process_group()" in said
