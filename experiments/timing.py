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

__all__ = ["interleaved", "medians", "peak_memory", "seconds"]


def interleaved(
    work: Mapping[str, Callable[[], object]], repetitions: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each repetition of each work; all take turns, after one round that warms up."""
    measured: dict[str, list[float]] = {name: [] for name in work}
    for repetition in tqdm(range(repetitions + 1), desc="Repetitions", disable=None, leave=False):
        for name, function in work.items():
            elapsed = seconds(function, device)
            if repetition > 0:
                measured[name].append(elapsed)
    return measured


def medians(measured: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: statistics.median(values) for name, values in measured.items()}


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one run."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Bytes that tensors take at the most during a run, beyond those that were there before."""
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
