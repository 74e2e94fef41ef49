"""Searching for a case in which a relation does not hold, and saying it as a script."""

import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.fuzz.cases import Described, Impossible, Layer
from tests.fuzz.relations import Refused, Relation

SHRINKING = 20.0
"""Seconds after which a failing case is small enough."""
SIZES = ("seed", "dice", "sizes", "space", "width", "outputs")
"""Fields that do not make a finding another one."""


@dataclass(frozen=True)
class Finding:
    """The smallest case that a search has found."""

    relation: str
    case: Described
    error: str
    """The error's type and its first line."""
    details: str
    """The traceback."""
    seconds: float
    """After which the first failing case was found."""

    @property
    def kind(self) -> tuple[str, str]:
        """The relation, and the error without names and numbers."""
        return self.relation, re.sub(r"'[^']*'|[-\d.]+(e[-+]?\d+)?", "", self.error)[:60]

    @property
    def script(self) -> str:
        return (
            f"# {self.relation}: {self.error}\n"
            "from tests.fuzz.cases import *\n"
            "from tests.fuzz.trainers import *\n\n"
            f"RELATIONS[{self.relation!r}].check({self.case!r})\n"
        )


def is_known(other: Finding, findings: Iterable[Finding]) -> bool:
    """Whether a failure is one of the findings with more around it, or of a kind found thrice."""
    of_kind = [one for one in findings if one.kind == other.kind]
    around = ingredients(other.case)
    return len(of_kind) > 2 or any(ingredients(one.case) <= around for one in of_kind)


def ingredients(described: Any) -> set[str]:
    """What a case is made of, without its sizes."""
    found = {described.kind} if isinstance(described, Layer) else set()
    for f in fields(described):
        value = getattr(described, f.name)
        if f.name in (*SIZES, "kind") or value == f.default:
            continue
        for one in value if isinstance(value, tuple) else [value]:
            inner = ingredients(one) if is_dataclass(one) else {f"{f.name}={one}"}
            found |= {f"{type(described).__name__}.{name}" for name in inner}
    return found


@dataclass
class Counts:
    """What came of the cases of one relation."""

    tried: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    known: int = 0
    seconds: float = 0.0


def run(relation: Relation, case: Described) -> None:
    """Try a relation on a case, with random numbers of its own.

    Raises:
        Refused: the product does not take the case.
        Exception: the relation does not hold.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        relation.check(case)


def search(
    relation: Relation,
    counts: Counts,
    number: int,
    examples: int,
    known: Iterable[Finding] = (),
    until: float = float("inf"),
) -> Finding | None:
    """The smallest failing case among so many that are drawn by a seed; None if there is none.

    Args:
        relation: what should hold.
        counts: to which the cases are added.
        number: the seed; it decides all that is drawn.
        examples: most cases that are drawn.
        known: findings whose cases, with more around them, are no news.
        until: the time at which the search ends, as by `time.perf_counter`.
    """
    start = time.perf_counter()
    failures: dict[Described, Finding] = {}
    last: list[Finding] = []

    def holds(case: Described) -> None:
        now = time.perf_counter()
        if failures and now > start + next(iter(failures.values())).seconds + SHRINKING:
            if case not in failures:
                return  # no smaller ones are looked for
        elif not failures and now > until:
            return
        if case not in failures:
            counts.tried += 1
            try:
                run(relation, case)
            except Impossible:
                counts.tried -= 1
            except Refused as refused:
                counts.refused[re.sub(r"'[^']*'|\d+", "_", str(refused))[:70]] += 1
            except Exception as error:
                text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                details = "".join(traceback.format_exception(error))
                found = Finding(relation.name, case, text, details, now - start)
                if is_known(found, known):
                    counts.known += 1
                    return
                failures[case] = found
        if case in failures:  # one place, by which Hypothesis takes all failures for one
            last.append(failures[case])
            raise AssertionError(failures[case].error)

    tried = given(relation.strategy)(holds)
    tried = settings(
        max_examples=examples, database=None, deadline=None, print_blob=False,
        suppress_health_check=list(HealthCheck),  # pyright: ignore
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink), verbosity=Verbosity.quiet,
    )(seed(number)(tried))  # fmt: skip
    try:
        tried()
    except AssertionError:
        first = next(iter(failures.values()))
        smallest = last[-1]
        return Finding(
            smallest.relation, smallest.case, smallest.error, smallest.details, first.seconds
        )
    finally:
        counts.seconds += time.perf_counter() - start
    return None
