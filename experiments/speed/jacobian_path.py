"""laplace-torch's GLM predictive on WRN-16-4 Fixup, in a process with limited memory.

Its Jacobians (N, C, P) take 3.3 GiB for 32 images and ten classes, and arrays made from them take
several times that. Prints JSON: seconds of a batch and the process's peak memory, or the error.
"""

import argparse
import json
import resource
import statistics
import time
import warnings

import torch
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from torch.utils.data import DataLoader, TensorDataset

from experiments.speed.contenders import network


def main() -> None:
    """Fit to a few images, then time the predictive's mean and covariance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--gibibytes", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    # Only data is limited: the libraries' mappings are large but take no memory.
    limit = options.gibibytes * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.manual_seed(0)
    model = network(torch.device("cpu"))
    for p in model.parameters():
        p.requires_grad_(p.numel() > 1)  # laplace-torch's backends cannot take Fixup's scalars
    x, y = torch.randn(options.batch_size, 3, 32, 32), torch.arange(options.batch_size) % 10
    laplace = Laplace(model, "classification", "all", "kron", backend=CurvlinopsGGN)
    laplace.fit(DataLoader(TensorDataset(x[:4], y[:4]), batch_size=4))
    seconds = []
    try:
        for _ in range(options.repetitions + 1):
            start = time.perf_counter()
            laplace._glm_predictive_distribution(x)  # pyright: ignore[reportAttributeAccessIssue]
            seconds.append(time.perf_counter() - start)
        result = {"seconds": statistics.median(seconds[1:])}
    except RuntimeError as error:
        result = {"error": str(error).partition("\n")[0]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"batch_size": options.batch_size, "peak_gibibytes": peak / 2**30} | result))


if __name__ == "__main__":
    main()
