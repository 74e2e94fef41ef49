"""Searching for a case in which a relation does not hold, and saying it as a script."""

import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.fuzz.cases import Case, Impossible, Layer
from tests.fuzz.relations import Refused, Relation

SHRINKING = 20.0
"""Seconds after which a failing case is small enough."""
ALIKE = 3
"""Findings of one relation and one error, beyond which more are no news."""
SIZES = ("seed", "choice", "sizes", "space", "width", "outputs")
"""Fields that do not make a finding another one."""


@dataclass(frozen=True)
class Finding:
    """A failing case; that of `search` is the smallest."""

    relation: str
    case: Case
    error: str
    """The error's type and its first line."""
    traceback: str
    seconds: float
    """From the start of the search to the first failing case."""

    @property
    def kind(self) -> tuple[str, str]:
        """The relation, and the error without names and numbers."""
        return self.relation, re.sub(r"'[^']*'|[-\d.]+(e[-+]?\d+)?", "", self.error)[:60]

    @property
    def script(self) -> str:
        return (
            f"# {self.relation}: {self.error}\n"
            "from tests.fuzz.cases import *\n"
            f"from tests.fuzz.relations import {self.relation}\n\n"
            f"{self.relation}({self.case!r})\n"
        )

    def is_among(self, findings: Sequence["Finding"]) -> bool:
        """Whether this is one of the findings with more around it, or there are many alike."""
        alike = [other for other in findings if other.kind == self.kind]
        own = ingredients(self.case)
        return len(alike) >= ALIKE or any(ingredients(other.case) <= own for other in alike)


def ingredients(described: Any) -> set[str]:
    """What a case is made of, without its sizes."""
    names = {described.kind} if isinstance(described, Layer) else set()
    for f in fields(described):
        value = getattr(described, f.name)
        if f.name in (*SIZES, "kind") or value == f.default:
            continue
        for entry in value if isinstance(value, tuple) else [value]:
            inner = ingredients(entry) if is_dataclass(entry) else {f"{f.name}={entry}"}
            names |= {f"{type(described).__name__}.{name}" for name in inner}
    return names


@dataclass
class Counts:
    """What came of the cases of one relation."""

    tried: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    again: int = 0
    """Failures that are findings already."""
    seconds: float = 0.0


def run(relation: Relation, case: Case) -> None:
    """Try a relation on a case, with random numbers of its own.

    Raises:
        Impossible: torch does not run the case.
        Refused: the product does not take it.
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
    findings: Sequence[Finding] = (),
    until: float = float("inf"),
) -> Finding | None:
    """The smallest failing case among those that are drawn by a seed; None if there is none.

    Args:
        relation: what should hold.
        counts: to which the cases are added.
        number: the seed; it decides all that is drawn.
        examples: most cases that are drawn.
        findings: what is no news.
        until: when the search ends, as of `time.perf_counter`.
    """
    start = time.perf_counter()
    failures: dict[Case, Finding] = {}
    last: list[Finding] = []

    def holds(case: Case) -> None:
        now = time.perf_counter()
        first = next(iter(failures.values()), None)
        is_over = now > until if first is None else now > start + first.seconds + SHRINKING
        if case not in failures and not is_over:
            counts.tried += 1
            try:
                run(relation, case)
            except Impossible:
                counts.tried -= 1
            except Refused as refused:
                counts.refused[re.sub(r"'[^']*'|\d+", "_", str(refused))[:70]] += 1
            except Exception as error:
                text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                trace = "".join(traceback.format_exception(error))
                finding = Finding(relation.name, case, text, trace, now - start)
                if finding.is_among(findings):
                    counts.again += 1
                else:
                    failures[case] = finding
        if case in failures:  # one place, by which Hypothesis takes all failures for one
            last.append(failures[case])
            raise AssertionError(failures[case].error)

    test = settings(
        max_examples=examples, database=None, deadline=None, print_blob=False,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        report_multiple_bugs=False, phases=(Phase.generate, Phase.shrink),
        verbosity=Verbosity.quiet,
    )(seed(number)(given(relation.strategy)(holds)))  # fmt: skip
    try:
        test()
    except AssertionError:  # the last one is that of the smallest case
        return replace(last[-1], seconds=next(iter(failures.values())).seconds)
    finally:
        counts.seconds += time.perf_counter() - start
    return None
