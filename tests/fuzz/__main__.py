"""``python -m tests.fuzz --seconds 3600``: look for cases in which a relation does not hold.

It goes from relation to relation until the time is over, with other seeds in each round, prints the
smallest failing case of each finding as a script, and a table at the end. A failure that is an
earlier finding with more around it is counted, and not printed again.
"""

import argparse
import sys
import time

import torch

from tests.fuzz.search import Counts, Finding, search
from tests.fuzz.trainers import RELATIONS

EXAMPLES = 30
"""Cases of a relation in a round."""


def main() -> int:
    """Search until the time is over; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--relation", choices=list(RELATIONS), help="this one alone")
    parser.add_argument("--verbose", action="store_true", help="what was refused; tracebacks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [options.relation] if options.relation else list(RELATIONS)
    counts = {name: Counts() for name in names}
    findings: list[Finding] = []
    start = time.perf_counter()
    until, number = start + options.seconds, options.seed
    while time.perf_counter() < until:
        for name in names:
            found = search(RELATIONS[name], counts[name], number, EXAMPLES, findings, until)
            if found is not None:
                findings.append(found)
                after = time.perf_counter() - start
                print(f"--- finding {len(findings)}, after {after:.0f} s, seed {number}")
                print(found.script, flush=True)
                if options.verbose:
                    print(found.details, flush=True)
        number += 1
    print(
        f"{'relation':30} {'cases':>6} {'refused':>8} {'seconds':>8} {'findings':>9} {'again':>6}"
    )
    for name, of in counts.items():
        refused, own = sum(of.refused.values()), sum(f.relation == name for f in findings)
        share = f"{refused / max(of.tried, 1):.0%}"
        print(f"{name:30} {of.tried:6} {share:>8} {of.seconds:8.0f} {own:9} {of.known:6}")
        if options.verbose:
            for reason, times in of.refused.most_common(8):
                print(f"    {times:5}  {reason}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
