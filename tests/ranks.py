"""Worlds of ranks for tests: processes of gloo, forked from one that has imported all already.

``python -m tests.ranks MODULE FOLDER WORLD ...`` runs ``MODULE.work(folder)`` on each rank of each
world, one world after the other, and writes what it returns, tensors by name, to
``FOLDER/RANK of WORLD.safetensors``. A world of 1 has no process group at all.
"""

import os
import subprocess
import sys
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parents[1]
SECONDS = 60


def results(module: str, folder: Path, *worlds: int) -> dict[int, list[dict[str, Tensor]]]:
    """Number of ranks -> what each rank's ``work`` returned, in the order of the ranks."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.ranks", module, str(folder)]
    done = subprocess.run(
        [*command, *map(str, worlds)], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    paths = {world: [_path(folder, rank, world) for rank in range(world)] for world in worlds}
    return {world: [load_file(p) for p in of if p.exists()] for world, of in paths.items()}


def run(module: str, folder: Path, world: int) -> bool:
    """Whether all ranks of a world have done their work."""
    work = import_module(module).work
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os._exit(_one(work, folder, rank, world))
        children.append(child)
    return not any([os.waitpid(child, 0)[1] for child in children])


def _one(work, folder: Path, rank: int, world: int) -> int:
    distributed = torch.distributed
    try:
        if world > 1:
            store = f"file://{folder / f'store of {world}'}"
            distributed.init_process_group(
                "gloo", store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
            )
        found = {name: tensor.contiguous().clone() for name, tensor in work(folder).items()}
        save_file(found, _path(folder, rank, world))
    except BaseException:
        print(f"Rank {rank} of {world}:", flush=True)
        traceback.print_exc()
        return 1
    return 0


def _path(folder: Path, rank: int, world: int) -> Path:
    return folder / f"{rank} of {world}.safetensors"


def main(module: str, folder: str, *worlds: str) -> int:
    """1 if a rank failed."""
    torch.set_num_threads(1)
    return int(not all(run(module, Path(folder), int(world)) for world in worlds))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
