"""Timing by interleaved repetitions, and peak memory, for all benchmarks."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "processor": time.process_time,
}
"""The clocks. With one thread, processor seconds change little with other work on the machine."""


def interleaved(
    work: Mapping[str, Callable[[], object]],
    repetitions: int,
    device: torch.device,
    clock: str = "wall",
    warm_up: bool = True,
) -> dict[str, list[float]]:
    """Seconds of each repetition of each work; all take turns, after one round that warms up."""
    measured: dict[str, list[float]] = {name: [] for name in work}
    rounds = range(0 if warm_up else 1, repetitions + 1)
    for repetition in tqdm(rounds, desc="Repetitions", disable=None, leave=False):
        for name, function in work.items():
            elapsed = seconds(function, device, clock)
            if repetition > 0:
                measured[name].append(elapsed)
    return measured


def medians(measured: Mapping[str, list[float]]) -> dict[str, float]:
    """The median seconds of each work."""
    return {name: statistics.median(values) for name, values in measured.items()}


def median_ratios(measured: Mapping[str, list[float]], to: str) -> dict[str, float]:
    """The median of each work's seconds divided by those of the work ``to`` in the same round."""
    return {
        name: statistics.median(a / b for a, b in zip(values, measured[to], strict=True))
        for name, values in measured.items()
    }


def seconds(work: Callable[[], object], device: torch.device, clock: str = "wall") -> float:
    """Seconds of one run, by one of `CLOCKS`."""
    _wait(device)
    start = CLOCKS[clock]()
    work()
    _wait(device)
    return CLOCKS[clock]() - start


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Peak bytes of tensors during a run, beyond those that were there before."""
    if device.type == "cuda":
        _wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in trace if event["name"] == "[memory]"
    )
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
