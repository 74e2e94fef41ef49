"""Families of faults: cases that each either survive or say what went wrong.

A new family is a function in `FAMILIES` (see `tests/faults/__main__.py`) that takes a `Workplace`
and yields cases. A case is a name and a function of a folder of its own, which returns in a few
words how the fault was survived ("identical", "refused: ..."), or raises an AssertionError.
"""

import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.runs import Whole

__all__ = ["Case", "Family", "Outcome", "Skipped", "Workplace", "survived", "tally"]


class Skipped(Exception):
    """This case is not possible on this system, or as this user; says why."""


@dataclass(frozen=True)
class Workplace:
    """What the cases of a family are made with."""

    whole: Whole
    folder: Path
    random: Random
    count: int
    """How many cases are wanted; families that are a table have their own number."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    name: str
    run: Callable[[Path], str]
    """Of a folder of its own, which is removed afterwards."""


@dataclass(frozen=True)
class Family:
    """Faults of one kind."""

    cases: Callable[[Workplace], Iterable[Case]]
    count: int = 0
    """How many cases the whole harness runs of it; 0 for all."""


@dataclass
class Outcome:
    """What became of a family's cases."""

    family: str
    ways: Counter[str] = field(default_factory=Counter)
    """How they survived -> how many did."""
    failures: dict[str, str] = field(default_factory=dict)
    """Name of a case that did not -> why."""
    details: dict[str, str] = field(default_factory=dict)
    """Name of a case -> how it survived, in full."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name of a case that was not possible here -> why."""

    @property
    def all(self) -> int:
        """Number of cases that were possible."""
        return self.ways.total() + len(self.failures)

    def keep_others(self, families: Iterable[Mapping[str, Any]]) -> None:
        """Add the results that an earlier run has of other cases of this family."""
        for earlier in (one for one in families if one["family"] == self.family):
            ran = {*self.details, *self.failures, *self.skipped}
            for mine, key in (
                (self.details, "cases"),
                (self.failures, "failures"),
                (self.skipped, "skipped"),
            ):
                known = earlier.get(key, {})
                mine |= {name: said for name, said in known.items() if name not in ran}
            self.ways = Counter(said.partition(":")[0] for said in self.details.values())


def survived(case: Case, outcome: Outcome, scratch: Path) -> None:
    """Run a case and add what became of it to its family's outcome."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        said = case.run(folder)
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome.failures[case.name] = f"{error} ({Path(where.filename).name}:{where.lineno})"
    except Skipped as error:
        outcome.skipped[case.name] = str(error)
    except Exception as error:  # noqa: BLE001
        outcome.failures[case.name] = f"{type(error).__name__}: {error}"
    else:
        outcome.ways[said.partition(":")[0]] += 1
        outcome.details[case.name] = said.replace(str(folder), "FOLDER")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tally(outcomes: Iterable[Outcome]) -> str:
    """The outcomes as Markdown, a row for each family."""
    lines = ["| faults | survived / all | how |", "|---|---|---|"]
    for one in outcomes:
        ways = ", ".join(f"{number} {way}" for way, number in one.ways.most_common())
        if one.skipped:
            ways += f"; {len(one.skipped)} skipped ({'; '.join({*one.skipped.values()})})"
        lines.append(f"| {one.family} | {one.ways.total()} / {one.all} | {ways} |")
    return "\n".join(lines)
