"""``python -m tests.faults``: what is done to runs, and what they survive (``make faults``)."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from tests.faults import damage, dead_ranks, kills, outside, read_only
from tests.faults.copies import one_thread_alone
from tests.faults.families import Family, Outcome, Workplace, survived, tally
from tests.faults.runs import whole_runs

__all__ = ["FAMILIES", "main"]

FAMILIES = {
    "kills at random times": Family(kills.kills_at_random_times, 200),
    "kills at every write": Family(kills.kills_at_writes),
    "SIGTERM, SIGHUP, Ctrl-C": Family(kills.requests_to_end, 60),
    "writes that fail": Family(kills.failing_writes, 60),
    "read-only folders": Family(read_only.read_only_folders),
    "two processes, one folder": Family(kills.two_processes, 20),
    "damaged files": Family(damage.damaged_files, 200),
    "bad inputs from outside": Family(outside.bad_inputs),
    "dead ranks": Family(dead_ranks.dead_ranks, 20),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the families, print the table; returns 1 if a case did not survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="families whose name contains one of these"
    )
    parser.add_argument(
        "--case", default="", help="cases whose name contains this; the others' results stay"
    )
    parser.add_argument("--cases", type=int, help="at most so many of each family, spread evenly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the table goes")
    options = parser.parse_args(arguments)
    one_thread_alone()
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        whole = whole_runs(Path(scratch) / "whole")
        one_thread_alone()
        for name, family in FAMILIES.items():
            if not any(part in name for part in options.only):
                continue
            start, outcome = time.perf_counter(), Outcome(name)
            count = min(filter(None, (family.count or 10**6, options.cases)))
            place = Workplace(whole, Path(scratch) / name, Random(options.seed), count)
            cases = [case for case in family.cases(place) if options.case in case.name]
            if not cases:
                continue
            step = -(-len(cases) // (options.cases or len(cases)))
            for case in cases[step // 2 :: step]:  # not the first write, but one in the middle
                survived(case, outcome, Path(scratch))
                if case.name in outcome.failures:
                    print(f"{name}, {case.name}: {outcome.failures[case.name]}", flush=True)
            seconds = time.perf_counter() - start
            print(f"{name}: {outcome.ways.total()} of {outcome.all}, {seconds:.0f} s", flush=True)
            outcomes.append(outcome)
            if options.json:
                if options.case:
                    outcome.keep_others(_families_in(options.json))
                _write(options.json, outcomes, options.seed, whole.seconds)
    print(tally(outcomes))
    return int(any(one.failures for one in outcomes))


def _families_in(path: Path) -> list[dict[str, Any]]:
    """What a file of outcomes has."""
    return json.loads(path.read_text())["families"] if path.exists() else []


def _write(path: Path, outcomes: Sequence[Outcome], seed: int, seconds: float) -> None:
    """Write the outcomes, beside those of other families that the file has.

    After each family, as the whole takes long.
    """
    families = [
        {
            "family": one.family,
            "survived": one.ways.total(),
            "all": one.all,
            "ways": dict(one.ways),
            "failures": one.failures,
            "skipped": one.skipped,
            "cases": one.details,
        }
        for one in outcomes
    ]
    ran = {one.family for one in outcomes}
    families = [one for one in _families_in(path) if one["family"] not in ran] + families
    packages = ("torch", "safetensors", "pillow", "filelock", "jsonargparse")
    found = {
        "seed": seed,
        "versions": {name: version(name) for name in packages},
        "seconds_of_a_run": seconds,
        "families": families,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
