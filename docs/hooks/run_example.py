"""Run one example cell by cell: ``python run_example.py SCRIPT FOLDER`` writes FOLDER/cells.json.

Without a folder the cells are printed as they stand, and nothing runs.
"""

import io
import json
import re
import sys
import types
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

MARK = re.compile(r"^# %%(.*)$", re.M)


def cells(text: str) -> list[dict[str, Any]]:
    """Kind, source and first line of each cell of a script in the percent format."""
    found, marks = [], list(MARK.finditer(text))
    for mark, end in zip(marks, [*(m.start() for m in marks[1:]), len(text)], strict=True):
        source = text[mark.end() : end].strip("\n")
        first = text.count("\n", 0, end - len(text[mark.end() : end].lstrip("\n")))
        if mark[1].strip() == "[markdown]":
            source = re.sub(r"^# ?", "", source, flags=re.M).strip()
            found.append({"kind": "markdown", "source": source})
        elif source:
            found.append({"kind": "code", "source": source, "line": first})
    return found


def run(script: Path, folder: Path) -> list[dict[str, Any]]:
    """The cells with what each printed and the figures that it left open."""
    from matplotlib import pyplot

    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module  # so that what an example defines can be pickled
    found = cells(script.read_text())
    number = 0
    for cell in found:
        if cell["kind"] == "markdown":
            continue
        code = compile("\n" * cell["line"] + cell["source"], str(script), "exec")
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, module.__dict__)
        cell["output"] = printed.getvalue().strip("\n")
        cell["figures"] = []
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            number += 1
            cell["figures"].append(f"figure_{number}.png")
            figure.savefig(folder / cell["figures"][-1], dpi=110, bbox_inches="tight")
        pyplot.close("all")
    return found


if __name__ == "__main__":
    script = Path(sys.argv[1])
    if len(sys.argv) == 2:
        json.dump(cells(script.read_text()), sys.stdout)
    else:
        folder = Path(sys.argv[2])
        done = json.dumps(run(script, folder), indent=1)
        (folder / "cells.json").write_text(done)
